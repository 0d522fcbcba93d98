"""Make any transformers config tiny, by the meaning of its fields' names, through nested configs.

The result keeps the architecture: kinds of layers, grouped heads, windows, experts, tied weights. Only sizes shrink.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

# One consistent set of sizes. Sizes that mean different things differ where the architecture lets them.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS, VOCAB, EXPERTS = 64, 4, 2, 16, 96, 2, 99, 4
PATCH, IMAGE, FRAMES, WINDOW, POSITIONS = 8, 32, 4, 4, 128

# What shrinks: field name (whole, by regex) -> tiny value, or a function of the default value. The first match wins.
_RULES: tuple[tuple[str, str, Any], ...] = (
    ("vocabulary", r"vocab_size|.*_vocab_size", lambda v: min(v, VOCAB)),
    ("vocabulary", r"type_vocab_size|n_segments?", lambda v: min(v, 3)),
    (
        "depth",
        r"(encoder_|decoder_)?layers|n_layers?|num_layers|depth|.*num_hidden_layers|num_(encoder|decoder)_layers",
        LAYERS,
    ),
    ("widths", r".*num_(key_value|kv)_heads|n_kv_heads?|.*num_kv_heads", None),  # follows the ratio, see _kv_heads
    ("widths", r".*num_(attention_)?heads|n_heads?|(encoder|decoder)_attention_heads|num_heads|.*_n_heads", HEADS),
    ("widths", r"(global_)?head_dim|d_kv|attention_head_dim|.*_head_dim", lambda v: min(v, HEAD_DIM)),
    ("widths", r"moe_intermediate_size|expert_ffn_hidden_size|.*shared_expert_intermediate_size", INTERMEDIATE // 2),
    (
        "widths",
        r"(.*_)?(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|n_inner|dim_feedforward)",
        INTERMEDIATE,
    ),
    ("widths", r"hidden_size|d_model|n_embd|embed_dim|(.*_)?hidden_size|(word_)?embed(ding)?_(dim|size)|dim", HIDDEN),
    ("widths", r"out_hidden_size|projection_dim|output_dim|out_dim|projector_hidden_size|pooler_output_size", HIDDEN),
    ("widths", r"codebook_dim|adapter_input_size|adapter_in_dim|condition_dim|upsample_groups", HIDDEN),
    ("widths", r"(q|kv|o)_lora_rank", 16),
    ("experts", r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts", EXPERTS),
    ("experts", r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|router_top_k", lambda v: min(v, 2)),
    ("experts", r"n_shared_experts|num_shared_experts|n_group|topk_group", 1),
    ("depth", r"first_k_dense_replace|num_dense_layers", 1),
    ("images", r"image_size|crop_size|img_size|resolution|input_size|spatial_size", IMAGE),
    ("widths", r"patch_size|encoder_stride", lambda v: min(v, PATCH)),
    ("images", r"num_frames|frames_per_clip", FRAMES),
    ("positions", r"num_position_embeddings", 36),
    ("widths", r"window_size", IMAGE),
    ("widths", r"sliding_window|attention_window|local_attention|attention_chunk_size", lambda v: min(v, WINDOW)),
    (
        "positions",
        r"max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?|max_source_positions",
        POSITIONS,
    ),
    ("positions", r"max_target_positions|original_max_position_embeddings", POSITIONS),
    ("widths", r"num_conv_pos_embeddings", 8),
    ("widths", r"num_conv_pos_embedding_groups", 4),
    ("widths", r"num_mel_bins", lambda v: min(v, 16)),
    ("widths", r"num_codevectors_per_group", 8),
    ("widths", r"(proj_)?codevector_dim|classifier_proj_size|xvector_output_dim", 16),
)
_PATTERNS = tuple((kind, re.compile(pattern), value) for kind, pattern, value in _RULES)
# Kinds of sizes, see shrink_only.
KINDS = frozenset(kind for kind, _, _ in _RULES)
_PER_LAYER = re.compile(
    r".*(_per_layer|intermediate_size|layer_types|_layers|mlp_layer_types|block_types|layers_block_type|_pattern|layer_idx)$"
)
_TOKEN = re.compile(r".*_token_(id|index)$|.*_token$")
_LAYER_INDEXES = re.compile(r".*(block_indexes|visual_indexes|layer_indexes|out_indices|select_layer.*)$")


def shrink_config(config: Any, **overrides: Any) -> Any:
    """A new config of the class of ``config`` with tiny sizes.

    Args:
        config: a ``PreTrainedConfig`` (not changed).
        overrides: fields to set to these values instead; a mapping merges into a nested config's shrunk fields.
    """
    return shrink_only(KINDS, config, overrides)


def shrink_only(kinds: Collection[str], config: Any, overrides: Mapping[str, Any]) -> Any:
    """As :func:`shrink_config`, but only sizes of these kinds; all others stay as the config has them.

    Args:
        kinds: some of ``vocabulary`` (with the ids of special tokens), ``depth``, ``experts``, ``images``,
            ``positions`` and ``widths`` (all others: heads, patches, windows, ranks, bins).
        config, overrides: as for :func:`shrink_config`.
    """
    return type(config)(**_fields(config, overrides, _Shrink(frozenset(kinds))))


class _Shrink:
    """What to shrink; hands out distinct small ids for special tokens, one id for one token in nested configs."""

    def __init__(self, kinds: frozenset[str]) -> None:
        self.kinds = kinds
        self.ids: dict[Any, int] = {}

    def token(self, token: int) -> int:
        is_beyond = "vocabulary" in self.kinds and token >= VOCAB - 1
        return self.ids.setdefault(token, 3 + len(self.ids)) if is_beyond else token


def _fields(config: Any, overrides: Mapping[str, Any], shrink: _Shrink, nested_in: bool = False) -> dict[str, Any]:
    if getattr(config, "is_heterogeneous", False):
        config = copy.deepcopy(config)
        config.allow_global_per_layer_attribute_access = True  # sizes that layers then override
    accepted = _accepted(type(config))
    n_layers = _depth(config)
    made: dict[str, Any] = {}
    nested = set(getattr(config, "sub_configs", {}) or {})
    for name in accepted:
        value = getattr(config, name, None)
        if name not in nested and value is not None and not name.startswith("_"):
            small = _small(name, value, config, n_layers, shrink)
            # Sizes that a parent gave and that stay are said again
            if small is not value or (nested_in and shrink.kinds != KINDS):
                made[name] = small
    has_setter = getattr(vars(type(config)).get("image_size"), "fset", None) and "image_size" not in accepted
    if has_setter and "images" in shrink.kinds:
        made["image_size"] = IMAGE  # a property that sets the sizes of the configs inside, over what they say
    for name in nested:
        value = getattr(config, name, None)
        if value is not None and not isinstance(value, Mapping):
            # As data, not as a config: some parents fill in fields of theirs. They read model_type to find its class.
            made[name] = {"model_type": value.model_type} | _fields(
                value, overrides.get(name) or {}, shrink, nested_in=True
            )
    if "widths" not in shrink.kinds:
        return made | {name: value for name, value in overrides.items() if name not in nested}
    if getattr(config, "rope_parameters", None):
        # Families may add sections that their attention has defaults for, for its full size only
        added = overrides.get("rope_parameters") or {}
        by_layer = any(isinstance(value, Mapping) for value in config.rope_parameters.values())
        sections = {"mrope_section": [0, 0, 0]} if not by_layer and _has_sections(type(config)) else {}
        made["rope_parameters"] = _rope(sections | dict(config.rope_parameters), made) | added
        overrides = {name: value for name, value in overrides.items() if name != "rope_parameters"}
    if "head_dim" in accepted and getattr(config, "head_dim", None) is None:
        made["head_dim"] = HEAD_DIM  # what follows from width and heads; some code reads it all the same
    if "pad_token_id" in accepted and "vocab_size" in accepted and getattr(config, "pad_token_id", None) is None:
        made["pad_token_id"] = 0  # heads that pool the last token of a batch look for it
    return made | {name: value for name, value in overrides.items() if name not in nested}


def _accepted(cls: type) -> list[str]:
    names: dict[str, None] = {}
    if dataclasses.is_dataclass(cls):
        names.update(dict.fromkeys(field.name for field in dataclasses.fields(cls) if field.init))
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names[name] = None
    aliases = getattr(cls, "attribute_map", {}) or {}
    return [name for name in names if name not in aliases]


def _depth(config: Any) -> int | None:
    for name in ("num_hidden_layers", "n_layer", "depth", "num_layers", "encoder_layers"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _small(name: str, value: Any, config: Any, n_layers: int | None, shrink: _Shrink) -> Any:
    if isinstance(value, (bool, str, float)):
        return value
    if _TOKEN.fullmatch(name):
        if isinstance(value, int):
            return shrink.token(value)
        if isinstance(value, (list, tuple)):
            return [shrink.token(v) if isinstance(v, int) else v for v in value]
        return value
    if isinstance(value, (list, tuple)):
        return _small_list(name, value, n_layers, shrink.kinds)
    if not isinstance(value, int):
        return value
    for kind, pattern, small in _PATTERNS:
        if pattern.fullmatch(name):
            if kind not in shrink.kinds:
                return value
            if small is None:
                return _kv_heads(name, value, config)
            return small(value) if callable(small) else min(small, value) if value > 0 else value
    return value


def _small_list(name: str, given: list[Any] | tuple[Any, ...], n_layers: int | None, kinds: frozenset[str]) -> Any:
    value = list(given)
    if "widths" not in kinds and not (n_layers and len(value) == n_layers and _PER_LAYER.fullmatch(name)):
        is_square = name == "image_size" and "images" in kinds and all(isinstance(v, int) for v in value)
        return [min(v, IMAGE) for v in value] if is_square else given
    if _LAYER_INDEXES.fullmatch(name):
        return [LAYERS - 1] if name.startswith("full") else [0] if name.endswith("indexes") else value
    if n_layers and len(value) == n_layers and _PER_LAYER.fullmatch(name):
        # Keep both kinds where there are two: the last layer, and one unlike it
        other = next((item for item in value if item != value[-1]), value[0])
        return [other, *[value[-1]] * (LAYERS - 1)]
    if name == "backbone_feature_sizes":  # a pyramid of (height, width), the last in patches
        return [[IMAGE // PATCH * side // value[-1][0] for side in level] for level in value]
    if re.fullmatch(r"(num_)?(attention_)?heads", name) and value and all(isinstance(v, int) for v in value):
        # Heads of stages whose widths are multiples of the first one's
        return [max(1, v * 2 // value[0]) for v in value] if HIDDEN % value[0] else value
    if name == "conv_dim":
        return [32] * len(value)
    if name == "tdnn_dim":
        return [16] * len(value)
    if name in ("image_size", "patch_size") and all(isinstance(v, int) for v in value):
        return [min(v, IMAGE if name == "image_size" else PATCH) for v in value]
    return value


def _kv_heads(name: str, value: int, config: Any) -> int:
    heads = next((h for n in ("num_attention_heads", "num_heads") if isinstance(h := getattr(config, n, None), int)), 0)
    return HEADS if value >= heads else 1 if value == 1 else KV_HEADS


def _has_sections(config_class: type) -> bool:
    """Whether the attention of this config's models splits its heads for rotary positions in time, height, width."""
    spec = importlib.util.find_spec(config_class.__module__.replace(".configuration_", ".modeling_"))
    return spec is not None and spec.origin is not None and "mrope_section" in Path(spec.origin).read_text()


def _rope(rope: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters with multimodal sections that add up to half of the tiny head size."""
    small: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, Mapping):
            small[key] = _rope(value, made)
        elif key == "mrope_section" and value:
            dim = made.get("head_dim") or HEAD_DIM
            half = int(dim * float(rope.get("partial_rotary_factor") or 1.0)) // 2
            rest = max(1, half // 4)
            small[key] = [half - 2 * rest, rest, rest] if len(value) == 3 else value
        elif key in ("original_max_position_embeddings",):
            small[key] = min(value, 32)
        elif key in ("short_factor", "long_factor") and isinstance(value, list):
            small[key] = value[: (made.get("head_dim") or HEAD_DIM) // 2]
        else:
            small[key] = value
    return small


__all__ = ["KINDS", "shrink_config", "shrink_only"]
