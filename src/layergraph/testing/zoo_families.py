"""What the zoo knows of each family: one line, the kinds of model and the config fields that names do not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        kinds: kind to recipe, see :func:`layergraph.testing.zoo.build_model`; the first is the default.
        config: fields on top of the shrunk config, nested ones as mappings.
    """

    kinds: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)


_LM = {"lm": "AutoModelForCausalLM", "base": "AutoModel", "classifier": "AutoModelForSequenceClassification"}
_VLM = "AutoModelForImageTextToText"
# Decoders that shrink by the names of their fields alone
_PLAIN_DECODERS = (
    "opt bloom gpt_bigcode mistral qwen2 qwen2_moe qwen3_moe gemma gemma2 phi phi3 falcon stablelm starcoder2 olmo "
    "olmo2 olmoe cohere cohere2 granite granitemoe deepseek_v3 smollm3 glm glm4 ernie4_5 persimmon xglm biogpt "
    "apertus seed_oss exaone4 arcee helium diffllama mpt rwkv"
)


def _tower(cls: str, part: str = "vision_config", **kinds: str) -> dict[str, str]:
    return {"vision": f"{cls}:{part}", **kinds}


def _sections(*sizes: int) -> dict[str, Any]:
    """Sizes of the time, height and width parts of a text model's rotary positions, half a head in all."""
    return {"text_config": {"rope_parameters": {"mrope_section": list(sizes)}}}


FAMILIES: dict[str, Family] = {
    # decoders
    "llama": Family(_LM, {"num_key_value_heads": 2}),
    "qwen3": Family(_LM),
    "gemma3_text": Family(_LM, {"query_pre_attn_scalar": 16}),
    "gemma4_text": Family(
        {"lm": _LM["lm"], "base": _LM["base"]}, {"global_head_dim": 32, "vocab_size_per_layer_input": 99}
    ),
    "gpt2": Family(_LM),
    "gpt_neox": Family(_LM),
    "mixtral": Family(_LM),
    "gpt_oss": Family(_LM),
    # encoders
    "bert": Family({"lm": "AutoModelForMaskedLM", "base": "AutoModel", "classifier": _LM["classifier"]}),
    "t5": Family({"encoder": "T5EncoderModel", "seq2seq": "AutoModelForSeq2SeqLM"}),
    "wav2vec2": Family({"base": "AutoModel", "ctc": "AutoModelForCTC"}),
    # images and videos of one size
    "vit": Family({"base": "AutoModel", "classifier": "AutoModelForImageClassification"}),
    "clip": Family(_tower("CLIPVisionModel", dual="AutoModel", text="CLIPTextModel:text_config")),
    "siglip": Family(_tower("SiglipVisionModel", dual="AutoModel", text="SiglipTextModel:text_config")),
    "dinov2": Family({"base": "AutoModel", "classifier": "AutoModelForImageClassification"}),
    "videomae": Family({"base": "AutoModel", "classifier": "AutoModelForVideoClassification"}),
    "vivit": Family({"base": "AutoModel"}, {"tubelet_size": [2, 8, 8]}),
    "vjepa2": Family({"base": "AutoModel"}, {"pred_num_attention_heads": 4, "pred_hidden_size": 64}),
    "videoprism": Family(_tower("VideoPrismVisionModel"), {"vision_config": {"tubelet_size": [1, 8, 8]}}),
    # Its VQ-VAE has no forward, only encode and decode: this is the module that encodes
    "emu3": Family(
        _tower("Emu3VQVAEEncoder", "vq_config"),
        {
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1, 2],
                "num_res_blocks": 1,
                "attn_resolutions": [1],
            }
        },
    ),
    # packed patches and grids
    "qwen2_vl": Family(_tower("Qwen2VisionTransformerPretrainedModel", vlm=_VLM), _sections(4, 2, 2)),
    "qwen2_5_vl": Family(_tower("Qwen2_5_VisionTransformerPretrainedModel", vlm=_VLM), _sections(4, 2, 2)),
    "qwen2_5_omni": Family(_tower("Qwen2_5OmniVisionEncoder", "thinker_config.vision_config")),
    "qwen3_vl": Family(_tower("Qwen3VLVisionModel", vlm=_VLM)),
    "qwen3_vl_moe": Family(_tower("Qwen3VLMoeVisionModel", vlm=_VLM)),
    "qwen3_omni_moe": Family(_tower("Qwen3OmniMoeVisionEncoder", "thinker_config.vision_config")),
    "qwen3_5": Family(_tower("Qwen3_5VisionModel", vlm=_VLM)),
    "qwen3_5_moe": Family(_tower("Qwen3_5MoeVisionModel", vlm=_VLM)),
    "qwen4_exp": Family(_tower("Qwen4ExpVisionModel")),
    "glm4v": Family(_tower("Glm4vVisionModel", vlm=_VLM), _sections(4, 2, 2)),
    "glm4v_moe": Family(_tower("Glm4vMoeVisionModel", vlm=_VLM), _sections(2, 1, 1)),
    "glm5_next": Family(_tower("Glm5NextVisionModel", vlm=_VLM)),
    "glm_ocr": Family(_tower("GlmOcrVisionModel", vlm=_VLM), _sections(4, 2, 2)),
    "exaone4_5": Family(_tower("Exaone4_5_VisionModel", vlm=_VLM)),
    "cohere_compass": Family(_tower("CohereCompassVisionModel")),
    "minimax_m3_vl": Family(_tower("MiniMaxM3VLVisionModel", vlm=_VLM)),
}

# Found by name and not listed: tests that go through every model of the zoo need no hundred decoders of one kind.
DECODERS: dict[str, Family] = {
    **{name: Family(_LM) for name in _PLAIN_DECODERS.split()},
    "gpt_neo": Family(_LM, {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 4}),
    "gptj": Family(_LM, {"rotary_dim": 8}),
    "codegen": Family(_LM, {"rotary_dim": 8}),
    "nemotron": Family(_LM, {"num_key_value_heads": 2, "head_dim": 16}),
    "hunyuan_v1_dense": Family(_LM, {"head_dim": 16, "num_key_value_heads": 2}),
    "llama4_text": Family(_LM, {"attention_chunk_size": 4, "floor_scale": 4, "intermediate_size_mlp": 96}),
    # decoders with states beside keys and values, or instead of them
    "minimax": Family(_LM),
    "mamba": Family(_LM),
    "mamba2": Family(_LM, {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 8}),
    "nemotron_h": Family(
        _LM,
        {
            "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "bamba": Family(_LM, {"attn_layer_indices": [1], "mamba_chunk_size": 8, "mamba_d_state": 16}),
    "jamba": Family(_LM, {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_d_state": 8}),
    "recurrent_gemma": Family(_LM, {"block_types": ["recurrent", "attention"], "attention_window_size": 4}),
    "qwen3_next": Family(_LM, {"linear_key_head_dim": 16, "linear_value_head_dim": 16}),
    "lfm2": Family(_LM, {"layer_types": ["conv", "full_attention"]}),
}

__all__ = ["DECODERS", "FAMILIES", "Family"]
