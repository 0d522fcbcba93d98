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

__all__ = ["FAMILIES", "Family"]
