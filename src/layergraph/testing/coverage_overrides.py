"""Config fields of model types whose sizes are tied together in ways that names do not tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _stages(*indices: int) -> dict[str, Any]:
    """The stages of a backbone that its parent reads: a parent's own choice does not outlive shrinking."""
    return {"backbone_config": {"out_indices": list(indices)}}


# Necks read four layers of a transformer, and two are left after shrinking.
_FOUR_LAYERS = {
    "backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
}
# These have no default.
_FULL_ROPE = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_HGNET = {"backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]}}
_LCNET = {"out_features": ["stage2", "stage3", "stage4", "stage5"]}
# Kernel size, stride and padding of the convolutions of a block, which has no default.
_INTRACLASS = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]} | {
    f"{name}_{ratio}ratio": [
        [size if is_tall else 1, size if is_wide else 1],
        [1, 1],
        [size // 2 if is_tall else 0, size // 2 if is_wide else 0],
    ]
    for ratio, size in (("long", 7), ("mid", 5), ("short", 3))
    for name, is_tall, is_wide in (
        ("vertical_long_to_small_conv", True, False),
        ("horizontal_small_to_long_conv", False, True),
        ("symmetric_conv_long", True, True),
    )
}

# Labels, since transformers looks for those of ImageNet otherwise and finds none for this model.
_REPVIT = {
    "architecture": "repvit_m1",
    "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
    "num_classes": 2,
    "label_names": ["a", "b"],
}
_PERCEPTION = {
    "architecture": "vit_pe_core_large_patch14_336",
    "model_args": {
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 4,
        "img_size": [56, 56],
        "ref_feat_shape": [4, 4],
        "global_pool": "",
    },
}

OVERRIDES: dict[str, Mapping[str, Any]] = {
    # fields without a default that works
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": _FULL_ROPE,
    "cohere_compass": {"text_config": _FULL_ROPE},
    "deepseek_ocr2": {"text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {**_EXPERTS, "n_shared_experts": 1},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "xmod": {"default_language": "en_XX"},
    "step3p5": {"sliding_window": 4},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen3_omni_moe": {"talker_config": {"text_config": {"shared_expert_intermediate_size": 48}}},
    "pix2struct_text_model": {"initializer_range": 0.02, "hidden_size": 64},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    # layers that refer to layers
    "gemma3n_text": {
        "vocab_size_per_layer_input": 99,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral_large4_text": {"kv_source_layers": [0, 1]},
    "mistral_large4": {"text_config": {"kv_source_layers": [0, 1]}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "molmo2_vision": {"out_indices": [0, 1]},
    # stages of backbones
    "d_fine": {**_stages(2, 3, 4), "num_queries": 8},
    "deimv2": {**_stages(2, 3, 4), "num_queries": 8},
    "rt_detr": {**_stages(2, 3, 4), "num_queries": 8},
    "rt_detr_v2": {**_stages(2, 3, 4), "num_queries": 8},
    "pp_doclayout_v2": {
        **_stages(2, 3, 4),
        "num_queries": 8,
        "num_labels": 2,
        "class_thresholds": [0.5, 0.5],
        "class_order": [0, 1],
    },
    "pp_doclayout_v3": {**_stages(1, 2, 3, 4), "num_queries": 8},
    "pp_doclayout_v4": {**_stages(2, 3, 4), "num_queries": 8},
    "upernet": _stages(1, 2, 3, 4),
    "pp_ocrv5_mobile_det": {"backbone_config": _LCNET},
    "slanet": {"backbone_config": _LCNET},
    "pp_ocrv5_server_det": {
        **_HGNET,
        "intraclass_block_config": _INTRACLASS,
        "kernel_list": [3, 2, 2],
        "scale_factor_list": [1, 2, 4, 8],
    },
    "pp_ocrv6_medium_det": {
        **_HGNET,
        "intraclass_block_config": _INTRACLASS,
        "kernel_list": [3, 2, 2],
        "scale_factor_list": [1, 2, 4, 8],
    },
    "mask2former": {"backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    "depth_anything": _FOUR_LAYERS,
    "prompt_depth_anything": _FOUR_LAYERS,
    "zoedepth": {**_FOUR_LAYERS, "bottleneck_features": 64},
    "chmv2": {
        "backbone_config": {
            **_FOUR_LAYERS["backbone_config"],
            "reshape_hidden_states": True,
            "return_class_token": True,
        }
    },
    "tipsv2_dpt": _FOUR_LAYERS,
    # widths that have to agree
    "dots3_note": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "efficientloftr": {"hidden_size": 256},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [4, 4]},
    "lw_detr_vit": {"image_size": 64},
    "lw_detr": {
        "backbone_config": {"image_size": 64, "out_indices": [1, 2]},
        "num_queries": 4,
        "projector_scale_factors": [1.0],
    },
    "longcat_flash": {"qk_head_dim": 32},
    "eomt": {"num_blocks": 1},
    "eomt_dinov3": {"num_blocks": 1},
    # attention is as wide as states and embeddings together
    "zamba": {
        "num_hidden_layers": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 4,
    },
    # a code of the vision tokenizer is an id of the vocabulary, and so is one of the audio tokenizer
    "apertus1p5": {
        "vision_config": {"codebook_size": 16},
        "audio_config": {"codebook_size": 16},
        "image_token_offset": 40,
        "audio_token_offset": 56,
    },
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": [32, 32, 64, 64]}},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [32, 32, 64, 64]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "eos_token_id": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_embed_dim": 16,
        "ple_layer_ids": [1],
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "ernie4_5_vl_moe_text": {"rope_parameters": {"mrope_section": [3, 3, 2]}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"mrope_section": [3, 3, 2]}}},
    # a parent's own default of one head, which is no change to shrinking
    "paligemma": {"text_config": {"num_key_value_heads": 1}},
    "colpali": {"vlm_config": {"text_config": {"num_key_value_heads": 1}}},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "deepseek_ocr2_vision": {"sam_config": {"downsample_channels": [64, 64]}},
    "depth_pro": {"intermediate_hook_ids": [1, 0]},
    # pixel shuffle puts four patches side by side
    "llama4_vision_model": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 7},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 7},
    "rf_detr": {"num_queries": 4},
    "vitmatte": {"backbone_config": {"patch_size": 16}},
    "blt": {"encoder_config": {"hidden_size_global": 64}, "decoder_config": {"hidden_size_global": 64}},
    "sam2": {
        "vision_config": {
            "backbone_config": {"hidden_size": 96},
            "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
            "fpn_hidden_size": 64,
        },
        "prompt_encoder_config": {"patch_size": 16},
    },
    "janus_vqgan": {"num_patches": 2},
    "pp_ocrv5_mobile_rec": {"image_size": 128},
    "pp_ocrv5_server_rec": {"image_size": 128},
    "pp_ocrv6_small_rec": {"image_size": 128},
    "pp_ocrv6_tiny_rec": {"image_size": 128},
    "uvdoc": {"backbone_config": {"out_indices": [1, 2, 3, 4, 5, 6]}},
    # timm
    "timm_backbone": {"backbone": "resnet18", "use_pretrained_backbone": False},
    "edgetam_vision_model": {"backbone_config": _REPVIT},
    "edgetam": {
        "vision_config": {
            "backbone_config": _REPVIT,
            "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
            "fpn_hidden_size": 64,
        },
        "prompt_encoder_config": {"patch_size": 16},
    },
    "fast_vlm": {
        "vision_config": {"architecture": "fastvit_t8", "hidden_size": 768, "model_args": {"inference_mode": True}}
    },
    "perception_lm": {"vision_config": _PERCEPTION},
    "gemma3n": {
        "text_config": {
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 99,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    },
}

__all__ = ["OVERRIDES"]
