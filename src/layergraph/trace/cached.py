"""The cached graph of a decoder: ``step``, for prefill (many tokens) and decode (one) alike.

The model's own forward is traced over a cache whose layers write into tensors given from outside, and over masks
made here from positions, so rows may be padded on either side and stand at different lengths. Inputs:

====================  =========================  ============================================================
``input_ids``         int64 [batch, tokens]      the new tokens
``position_ids``      int64 [batch, tokens]      for position embeddings
``token_positions``   int64 [batch, tokens]      which token of its row each one is, from 0; -1 for padding
``logits_to_keep``    int64 [kept]               which of the new tokens get logits (models with a head)
``GROUP_write``       int64 [batch, tokens]      slots to write, for each group of layers
``GROUP_positions``   int64 [slots, batch]       mutated: the token that each slot holds, -1 for none
``cache_L_keys``...   [slots, batch, heads, d]   mutated
====================  =========================  ============================================================

Batch, tokens and slots are dynamic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layergraph.errors import NotSupportedError
from layergraph.ir.cache_geometry import CacheGeometry, CacheGroup, CacheTensor

_ATEN = torch.ops.aten
# Sizes at trace time: no two equal, none that torch would fix.
_BATCH, _TOKENS, _SLOTS = 2, 5, 24


def can_cache(model: nn.Module) -> bool:
    """Whether the model is a decoder that generates: then it gets a cached graph."""
    config = getattr(model, "config", None)
    return (
        callable(getattr(model, "can_generate", None))
        and model.can_generate()
        and not getattr(config, "is_encoder_decoder", False)
        and "input_ids" in inspect.signature(model.forward).parameters
        and _text_only(config)
    )


def _text_only(config: Any) -> bool:
    """Composite models (vision and text) feed their decoder embeddings: their towers are traced alone."""
    return config is not None and config.get_text_config(decoder=True) is config


@dataclass(frozen=True)
class CachedCall:
    """How to trace a cached graph.

    Attributes:
        geometry: what it keeps.
        tensors: example inputs by flat name.
        dims: dynamic dimensions by input, with their labels.
        call: runs the model on flat tensors.
    """

    geometry: CacheGeometry
    tensors: Mapping[str, torch.Tensor]
    dims: Mapping[str, Mapping[int, str]]
    call: Callable[[Mapping[str, torch.Tensor]], Any]


def plan_cached(model: nn.Module) -> CachedCall:
    """Find out what ``model`` (a private copy) caches, by running it once on two tokens, and how to trace that.

    Raises:
        NotSupportedError: it keeps something that is not keys and values.
    """
    from transformers import DynamicCache

    device = next(model.parameters()).device
    cache = DynamicCache(config=model.config)
    names = inspect.signature(model.forward).parameters
    probe = {"input_ids": torch.zeros(1, 2, dtype=torch.int64, device=device), "use_cache": True}
    with torch.no_grad():
        model(**probe, **{_cache_name(names): cache})
    types, _ = _layer_types(model.config)
    geometry = _geometry(cache, types)
    tensors, dims = _examples(geometry, device, "logits_to_keep" in names)
    dtype = next(model.parameters()).dtype
    eager = getattr(model.config, "_attn_implementation", None) == "eager"
    kinds = {types[tensor.layer]: tensor.group for tensor in geometry.tensors}

    def call(flat: Mapping[str, torch.Tensor]) -> Any:
        masks = {group.name: _mask(group, flat, dtype if eager else None) for group in geometry.groups}
        mask: Any = {kind: masks[group] for kind, group in kinds.items()}
        if len(geometry.groups) == 1:
            mask = masks[geometry.groups[0].name]
        arguments: dict[str, Any] = {
            "input_ids": flat["input_ids"],
            "position_ids": flat["position_ids"],
            "attention_mask": mask,
            "use_cache": True,
            _cache_name(names): _TracedCache(geometry, flat),
        }
        if "logits_to_keep" in names:
            arguments["logits_to_keep"] = flat["logits_to_keep"]
        return model_forward(**arguments)

    model_forward = model.forward
    return CachedCall(geometry, tensors, dims, call)


def _cache_name(parameters: Mapping[str, Any]) -> str:
    return "cache" if "cache" in parameters else "past_key_values"


def _layer_types(config: Any) -> tuple[list[str], Any]:
    from transformers.cache_utils import get_layer_types_and_kwargs

    return get_layer_types_and_kwargs(config)


def _geometry(cache: Any, types: list[str]) -> CacheGeometry:
    groups: dict[str, CacheGroup] = {}
    tensors: list[CacheTensor] = []
    for index, layer in enumerate(cache.layers):
        kind = types[index] if index < len(types) else "full_attention"
        name = type(layer).__name__
        if name == "DummyLayer" or not getattr(layer, "is_initialized", False):
            continue
        if name not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
            raise NotSupportedError(
                f"layer {index} keeps {kind} state, which cached graphs do not hold yet",
                found=name,
                do="trace with cached=False: the uncached graph is complete",
            )
        group = CacheGroup("full")
        if name == "DynamicSlidingWindowLayer":
            reach = int(layer.sliding_window)
            is_chunk = kind == "chunked_attention"
            group = CacheGroup(f"chunk{reach}", chunk=reach) if is_chunk else CacheGroup(f"window{reach}", window=reach)
        groups[group.name] = group
        for role, tensor in (("keys", layer.keys), ("values", layer.values)):
            heads, features = int(tensor.shape[1]), int(tensor.shape[3])
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.append(CacheTensor(f"cache_{index}_{role}", index, role, group.name, heads, features, dtype))
    return CacheGeometry(tuple(groups.values()), tuple(tensors))


def _examples(
    geometry: CacheGeometry, device: torch.device, keeps_logits: bool
) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    order = torch.arange(_TOKENS, device=device).expand(_BATCH, -1).contiguous()
    tensors: dict[str, torch.Tensor] = {
        "input_ids": integers(_BATCH, _TOKENS),
        "position_ids": order,
        "token_positions": order.clone(),
    }
    dims: dict[str, dict[int, str]] = {name: {0: "batch", 1: "tokens"} for name in tensors}
    if keeps_logits:
        tensors["logits_to_keep"] = torch.arange(3, device=device)
        dims["logits_to_keep"] = {0: "kept"}
    for number, group in enumerate(geometry.groups):
        # Each group has its own length: windows are shorter than the full context.
        slots = _SLOTS + 8 * number
        tensors[group.write] = order.clone()
        dims[group.write] = {0: "batch", 1: "tokens"}
        tensors[group.positions] = integers(slots, _BATCH) - 1
        dims[group.positions] = {0: f"{group.name}_slots", 1: "batch"}
        for tensor in geometry.tensors:
            if tensor.group == group.name:
                shape = (slots, _BATCH, tensor.heads, tensor.features)
                tensors[tensor.name] = torch.zeros(shape, dtype=getattr(torch, tensor.dtype), device=device)
                dims[tensor.name] = {0: f"{group.name}_slots", 1: "batch"}
    return tensors, dims


def _mask(group: CacheGroup, flat: Mapping[str, torch.Tensor], additive: torch.dtype | None) -> torch.Tensor:
    """Which slots each new token sees, ``[batch, 1, tokens, slots]``: bool, or additive for eager attention.

    Also writes the new tokens' positions: after that a slot's position tells all there is to know.
    """
    query = flat["token_positions"]
    write, held = flat[group.write], flat[group.positions]
    rows = torch.arange(query.shape[0], device=query.device)
    held.index_put_((write.t(), rows[None, :]), query.t())
    key = held.t()[:, None, :]
    position = query[:, :, None]
    seen = (key >= 0) & (key <= position)
    if group.window is not None:
        seen = seen & (position - key < group.window)
    if group.chunk is not None:
        seen = seen & (position // group.chunk == key // group.chunk)
    # Padding sees itself and nothing else: a row without any key would be 0 / 0.
    own = torch.arange(held.shape[0], device=query.device)[None, None, :] == write[:, :, None]
    mask = (seen | own)[:, None]
    if additive is None:
        return mask
    lowest = torch.finfo(additive).min
    return torch.where(mask, torch.zeros((), dtype=additive), torch.full((), lowest, dtype=additive))


class _TracedLayer:
    """One layer of the cache during the trace: writes into the given tensors, returns all slots."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    is_initialized = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, write: torch.Tensor) -> None:
        self.keys, self.values, self._write = keys, values, write

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(keys.shape[0], device=keys.device)
        index = (self._write.t(), rows[None, :])
        for held, new in ((self.keys, keys), (self.values, values)):
            held.index_put_(index, new.permute(2, 0, 1, 3))
        return self.keys.permute(1, 2, 0, 3), self.values.permute(1, 2, 0, 3)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.keys.shape[0]), 0

    def get_max_length(self) -> int:
        return -1


class _Absent(_TracedLayer):
    """A layer that keeps nothing."""

    def __init__(self) -> None:
        pass

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values


def _TracedCache(geometry: CacheGeometry, flat: Mapping[str, torch.Tensor]) -> Any:
    from transformers.cache_utils import Cache

    count = max(tensor.layer for tensor in geometry.tensors) + 1
    layers: list[Any] = [_Absent() for _ in range(count)]
    held = {(tensor.layer, tensor.role): tensor for tensor in geometry.tensors}
    for index in range(count):
        if (index, "keys") in held:
            keys, values = held[index, "keys"], held[index, "values"]
            write = flat[geometry.group(keys.group).write]
            layers[index] = _TracedLayer(flat[keys.name], flat[values.name], write)
    return Cache(layers=layers)


__all__ = ["CachedCall", "can_cache", "plan_cached"]
