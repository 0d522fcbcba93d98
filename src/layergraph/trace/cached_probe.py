"""What a decoder keeps between calls, found out by running it once on two tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layergraph.compat import cache_argument
from layergraph.errors import NotSupportedError
from layergraph.ir.cache_geometry import CacheGeometry, CacheGroup, CacheState, CacheTensor


@dataclass
class Probed:
    """The cache that one call leaves, and what the embedding of its tokens looks like (None where it makes none)."""

    cache: Any
    embedding: torch.Tensor | None = None


def probe(model: nn.Module, names: Mapping[str, Any], example: torch.Tensor) -> Probed:
    """Run ``model`` once with a cache of its kind.

    Args:
        names: arguments of its forward.
        example: two tokens, int64 ids [1, 2] or embeddings [1, 2, features].

    Raises:
        NotSupportedError: the model fails.
    """
    probed = Probed(None)
    calls: list[torch.Tensor] = []
    given: dict[str, Any] = {"use_cache": True}
    if example.is_floating_point():
        given["inputs_embeds"] = example
    else:
        given["input_ids"] = example
    handles = []
    if "input_ids" in given:
        table = model.get_input_embeddings()
        handles.append(table.register_forward_hook(lambda module, args, output: calls.append(output)))
    if not insists_on_cache(model):
        probed.cache = given[cache_argument(names)] = _probe_cache(model.config)
    try:
        with torch.no_grad():
            output = model(**given)
    except Exception as error:
        raise NotSupportedError(
            "the model itself does not run with a cache", found=f"{type(error).__name__}: {str(error)[:200]}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if probed.cache is None:
        probed.cache = output[cache_argument(output)]
    if len(calls) == 1 and isinstance(calls[0], torch.Tensor) and calls[0].dim() == 3:
        probed.embedding = calls[0]
    return probed


def _probe_cache(config: Any) -> Any:
    """An empty cache, which has a length (none) for models without attention as well: upstream's raises there."""
    from transformers import DynamicCache

    class ProbeCache(DynamicCache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            return query_length, 0

    return ProbeCache(config=config)


def insists_on_cache(model: nn.Module) -> bool:
    """Whether the model insists on a class of cache that its own module defines."""
    from transformers.cache_utils import Cache

    scope = vars(sys.modules[type(model).__module__]).values()
    return any(isinstance(item, type) and issubclass(item, Cache) and _is_local(item, model) for item in scope)


def _is_local(cls: type, model: nn.Module) -> bool:
    return cls.__module__ == type(model).__module__


def layer_types(config: Any) -> list[str]:
    from transformers.cache_utils import get_layer_types_and_kwargs

    return list(getattr(config, "layer_types", None) or get_layer_types_and_kwargs(config)[0])


def kind_of(types: list[str], layer: int) -> str:
    return types[layer] if layer < len(types) else "full_attention"


def geometry_of(cache: Any, types: list[str], half: str = "") -> CacheGeometry:
    """What ``cache`` holds, as data; ``half`` (``shadow_``) goes before every name.

    Raises:
        NotSupportedError: a layer keeps something else than keys, values and states; or nothing is kept.
    """
    groups: dict[str, CacheGroup] = {}
    tensors: list[CacheTensor] = []
    states: list[CacheState] = []
    for index, layer in enumerate(cache.layers):
        states.extend(_states(index, layer, half))
        name = type(layer).__name__
        if name == "DummyLayer" or not getattr(layer, "is_initialized", False):
            continue
        if not name.endswith(("DynamicLayer", "DynamicSlidingWindowLayer", "AttentionLayer")):
            raise NotSupportedError(
                f"layer {index} keeps {kind_of(types, index)} state, which cached graphs do not hold",
                found=name,
                do="trace with cached=False: the uncached graph is complete",
            )
        group = _group(layer, kind_of(types, index), half)
        groups[group.name] = group
        for role, tensor in (("keys", layer.keys), ("values", layer.values)):
            heads, features = int(tensor.shape[1]), int(tensor.shape[3])
            tensors.append(
                CacheTensor(
                    f"{half}cache_{index}_{role}", index, role, group.name, heads, features, _text(tensor.dtype)
                )
            )
    for index, state in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(state, torch.Tensor):
            states.append(_state(index, "recurrent_0", state, half))
    if not tensors and not states and not half:
        raise NotSupportedError("the model keeps nothing in the cache it is given", found=type(cache).__name__)
    return CacheGeometry(tuple(groups.values()), tuple(tensors), tuple(states))


def _group(layer: Any, kind: str, half: str) -> CacheGroup:
    reach = getattr(layer, "sliding_window", None)
    if reach is None:
        return CacheGroup(f"{half}full")
    if kind == "chunked_attention":
        return CacheGroup(f"{half}chunk{reach}", chunk=int(reach))
    return CacheGroup(f"{half}window{reach}", window=int(reach))


def _states(index: int, layer: Any, half: str) -> Iterator[CacheState]:
    for kind in ("conv", "recurrent"):
        for number, tensor in (getattr(layer, f"{kind}_states", None) or {}).items():
            if tensor is not None:
                yield _state(index, f"{kind}_{number}", tensor, half)


def _state(index: int, role: str, tensor: torch.Tensor, half: str) -> CacheState:
    return CacheState(f"{half}cache_{index}_{role}", index, role, tuple(tensor.shape[1:]), _text(tensor.dtype))


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["Probed", "geometry_of", "insists_on_cache", "kind_of", "layer_types", "probe"]
