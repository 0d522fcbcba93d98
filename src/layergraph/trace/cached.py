"""The cached graph of a decoder: ``step``, for prefill (many tokens) and decode (one) alike.

The model's own forward is traced over a cache whose layers write into tensors given from outside, and over masks
made here from positions, so rows may be padded on either side and stand at different lengths. Inputs:

====================  =========================  ============================================================
``input_ids``         int64 [batch, tokens]      the new tokens; -1 where an embedding is given instead
``inputs_embeds``     [batch, tokens, features]  embeddings, read where ``input_ids`` is -1
``position_ids``      int64 [batch, tokens]      for position embeddings
``token_positions``   int64 [batch, tokens]      which token of its row each one is, from 0; -1 for padding
``logits_to_keep``    int64 [kept]               which of the new tokens get logits (models with a head)
``tokens_written``    int64 [1]                  tokens held, padding too, for the few models that count these
``GROUP_write``       int64 [batch, tokens]      slots to write, for each group of layers
``GROUP_positions``   int64 [slots, batch]       mutated: the token that each slot holds, -1 for none
``cache_L_keys``...   [slots, batch, heads, d]   mutated
``cache_L_conv_0``..  [batch, ...]               mutated: states of layers that keep no tokens
====================  =========================  ============================================================

Batch, tokens and slots are dynamic. A group that holds everything keeps token *n* in slot *n* (position biases of
some models rely on it).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from layergraph.compat import cache_argument
from layergraph.errors import NotSupportedError
from layergraph.ir.cache_geometry import CacheGeometry
from layergraph.trace.cached_kinds import adapted, counts_columns, refuse_kinds
from layergraph.trace.cached_layers import traced_cache
from layergraph.trace.cached_masks import visible, write_positions
from layergraph.trace.cached_probe import geometry_of, insists_on_cache, kind_of, layer_types, probe
from layergraph.trace.hf_request import longest_chunk

# Sizes at trace time: no two equal, none that torch would fix.
_BATCH, _TOKENS, _SLOTS, _KEPT = 2, 5, 24, 3
# A step takes at least that many tokens at once.
_LEAST_TOKENS = 128


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


def plan_cached(model: nn.Module, *, half: str = "", embeddings: str = "either", width: int = 0) -> CachedCall:
    """Find out what ``model`` (a private copy) caches, by running it once on two tokens, and how to trace that.

    Args:
        half: goes before the name of everything held: ``shadow_`` for the shadow's half of a dual cache.
        embeddings: whether the model is given tokens or their embeddings: ``either``, ``only`` or ``never``.
        width: of embeddings, for ``only``.

    Raises:
        NotSupportedError: it keeps something that cached graphs do not hold; says what.
    """
    refuse_kinds(model)
    names = inspect.signature(model.forward).parameters
    types = layer_types(model.config)
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    main = "inputs_embeds" if embeddings == "only" else "input_ids"
    example = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
    if main == "inputs_embeds":
        example = torch.zeros(1, 2, width, dtype=weight.dtype, device=weight.device)
    probed = probe(model, names, example)
    geometry = geometry_of(probed.cache, types, half)
    embedding = {"either": probed.embedding, "only": example, "never": None}[embeddings]
    n_tokens = _TOKENS + longest_chunk(model.config)
    tensors, dims = _examples(geometry, weight.device, n_tokens, embedding, "logits_to_keep" in names)
    if main != "input_ids":
        del tensors["input_ids"], dims["input_ids"]
    if counts_columns(model):
        tensors["tokens_written"], dims["tokens_written"] = torch.zeros(1, dtype=torch.int64, device=weight.device), {}
    additive = weight.dtype if getattr(model.config, "_attn_implementation", None) == "eager" else None
    kinds: dict[str, str] = {kind_of(types, tensor.layer): tensor.group for tensor in geometry.tensors}
    state_kinds = {kind_of(types, state.layer) for state in geometry.states}
    widest = next((group for group in geometry.groups if group.reach is None), next(iter(geometry.groups), None))
    held = [*(tensor.layer for tensor in geometry.tensors), *(state.layer for state in geometry.states)]
    n_layers = max([len(types), *(layer + 1 for layer in held)])
    own_cache = type(probed.cache) if insists_on_cache(model) else None
    model_forward = model.forward

    def call(flat: Mapping[str, torch.Tensor]) -> Any:
        masks = {}
        for group in geometry.groups:
            write_positions(group, flat)
            masks[group.name] = visible(group, flat, additive=additive)
        # Layers with states want to know which tokens are padding: those must not enter the state.
        real = (flat["token_positions"] >= 0).to(torch.int64)
        by_kind = dict.fromkeys(state_kinds, real) | {kind: masks[group] for kind, group in kinds.items()}
        arguments: dict[str, Any] = {
            main: flat[main],
            "position_ids": flat["position_ids"],
            "attention_mask": by_kind if len({*masks, *state_kinds}) > 1 else next(iter(by_kind.values()), None),
            "use_cache": True,
            cache_argument(names): traced_cache(geometry, flat, n_layers, own_cache),
            "logits_to_keep": flat.get("logits_to_keep"),
        }
        with adapted(model, widest, flat), _embeddings(model, flat):
            return model_forward(**{name: value for name, value in arguments.items() if name in names})

    return CachedCall(geometry, tensors, dims, call)


def refuse_fixed(plan: CachedCall, exported: ExportedProgram, conditions: tuple[str, ...]) -> None:
    """Refuse a graph that holds for some lengths only: loops over tokens in Python, and branches on their number.

    Raises:
        NotSupportedError: names the input and what is fixed.
    """
    for condition in conditions:
        raise _one_length(condition)
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    for name, node in zip(plan.tensors, exported.graph_signature.user_inputs, strict=True):
        for dim, label in plan.dims[name].items():
            size = values[node].shape[dim]
            found = None
            # torch leaves a symbol in the shape and notes elsewhere that it has one value.
            if not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols:
                found = f"{label} = {size}"
            elif (bounds := exported.range_constraints.get(size.node.expr)) is not None and bounds.lower > 2:
                found = f"{label} >= {bounds.lower}"
            elif label == "tokens" and bounds is not None and bounds.upper < _LEAST_TOKENS:
                found = f"{label} <= {bounds.upper}"
            if found is not None:
                raise _one_length(f"{found} in {name}")


def _one_length(found: str) -> NotSupportedError:
    return NotSupportedError(
        "the model's code branches or loops on lengths, so one graph cannot stand for prefill and decode",
        found=found,
        do="trace with cached=False: the uncached graph is complete",
    )


# The trace's inputs -----------------------------------------------------------------------------------------------


def _examples(
    geometry: CacheGeometry, device: torch.device, n_tokens: int, embedding: torch.Tensor | None, keeps_logits: bool
) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    order = torch.arange(n_tokens, device=device).expand(_BATCH, -1).contiguous()
    each = {0: "batch", 1: "tokens"}
    tensors: dict[str, torch.Tensor] = {"input_ids": torch.zeros_like(order)}
    dims: dict[str, dict[int, str]] = {"input_ids": each}

    def add(name: str, tensor: torch.Tensor, labels: dict[int, str]) -> None:
        tensors[name], dims[name] = tensor, labels

    if embedding is not None:
        features = embedding.shape[-1]
        add("inputs_embeds", torch.zeros(_BATCH, n_tokens, features, dtype=embedding.dtype, device=device), each)
    add("position_ids", order, each)
    add("token_positions", order.clone(), each)
    if keeps_logits:
        add("logits_to_keep", torch.arange(_KEPT, device=device), {0: "kept"})
    for number, group in enumerate(geometry.groups):
        # Each group has its own length: windows are shorter than the full context.
        slots = n_tokens + _SLOTS + 8 * number
        labels = {0: f"{group.name}_slots", 1: "batch"}
        add(group.write, order.clone(), each)
        add(group.positions, torch.full((slots, _BATCH), -1, device=device), labels)
        for tensor in geometry.tensors:
            if tensor.group == group.name:
                shape = (slots, _BATCH, tensor.heads, tensor.features)
                add(tensor.name, torch.zeros(shape, dtype=getattr(torch, tensor.dtype), device=device), labels)
    for state in geometry.states:
        value = torch.zeros(_BATCH, *state.shape, dtype=getattr(torch, state.dtype), device=device)
        add(state.name, value, {0: "batch"})
    return tensors, dims


@contextmanager
def _embeddings(model: nn.Module, flat: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let given embeddings stand in for tokens -1, inside the model's own embedding.

    One graph for ids and embeddings, mixed at will, costs a comparison; a graph of its own for embeddings would cost
    as much to trace as the whole step.
    """
    if "inputs_embeds" not in flat or "input_ids" not in flat:
        yield
        return
    table = model.get_input_embeddings()
    given = flat["input_ids"] < 0

    def clamp(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].clamp(min=0), *args[1:])

    def choose(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return torch.where(given[..., None], flat["inputs_embeds"], output)

    # Before the recorder's hooks: what the embedding returns is what the first layer gets.
    handles = [
        table.register_forward_pre_hook(clamp, prepend=True),
        table.register_forward_hook(choose, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


__all__ = ["CachedCall", "can_cache", "plan_cached", "refuse_fixed"]
