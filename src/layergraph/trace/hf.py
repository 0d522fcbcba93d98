"""What is known about Hugging Face models: their inputs, what may vary, what they can record, how to trace them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from layergraph.ir.layers import LayerIndex
from layergraph.ir.program import ModelInfo
from layergraph.trace.cached import can_cache, plan_cached, refuse_fixed
from layergraph.trace.hf_captures import captures, collectors
from layergraph.trace.hf_context import hf_trace_context
from layergraph.trace.hf_returned import Returned, find_returned
from layergraph.trace.inputs import dynamic_dims, make_example_inputs
from layergraph.trace.marks import qualified
from layergraph.trace.prologue import Prologue, find_prologue

_DEFAULTS = {
    "attention_mask": ("ones_like", 2),
    "token_type_ids": ("zeros_like", 2),
    "decoder_attention_mask": ("ones_like", 2),
}
_SOURCES = {"decoder_attention_mask": ("decoder_input_ids", "decoder_inputs_embeds")}


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments made from the model's signature and config."""
    return make_example_inputs(model)


def prologue(model: nn.Module, arguments: Mapping[str, Any]) -> Prologue | None:
    """The host code that turns the model's own inputs into the graph's, where the model needs one."""
    return find_prologue(model, dict(arguments))


def context(model: nn.Module) -> AbstractContextManager[Any]:
    """Everything that must hold while a private copy is traced."""
    return _with_flags(model)


def set_flags(model: nn.Module) -> None:
    """Set the own configs of a private copy to what a graph is: uncached, and returning its output class."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            for flag, value in (("use_cache", False), ("return_dict", True)):
                if getattr(config, flag, value) != value:
                    setattr(config, flag, value)


@contextmanager
def _with_flags(model: nn.Module) -> Iterator[None]:
    set_flags(model)
    with hf_trace_context(model):
        yield


def returned(model: nn.Module, arguments: Mapping[str, Any], layers: LayerIndex) -> Returned:
    """What the traced model adds to its return value when asked, see :mod:`layergraph.trace.hf_returned`."""
    return find_returned(model, arguments, layers, context(model))


def default_of(name: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """What the model does without this input: all ones for masks over tokens, zeros for token types."""
    kind, rank = _DEFAULTS.get(name, (None, 0))
    if kind is None or tensors[name].dim() != rank:
        return None
    sources = _SOURCES.get(name, ("input_ids", "inputs_embeds"))
    return next((f"{kind}:{source}" for source in sources if source in tensors), None)


def model_info(twin: nn.Module, model: nn.Module, training: bool) -> ModelInfo:
    """Class, config and recordable outputs of a model."""
    config = getattr(model, "config", None)
    generation = getattr(model, "generation_config", None)
    return ModelInfo(
        cls=qualified(type(model)),
        config=_plain(config),
        generation_config=_plain(generation),
        config_class=qualified(type(config)) if config is not None else None,
        attributes=plain_attributes(model),
        captures=tuple(captures(model)),
        collectors=collectors(model),
        attention=getattr(config, "_attn_implementation", None),
        training=training,
    )


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Numbers and strings set on the module itself, which code around it may read (``spatial_merge_size``)."""
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, (bool, int, float, str)) and not name.startswith("_") and name != "training"
    }


def _plain(config: Any) -> Any:
    if config is None:
        return None
    return json.loads(json.dumps(config.to_dict(), default=str))


__all__ = [
    "can_cache",
    "captures",
    "collectors",
    "context",
    "default_of",
    "dynamic_dims",
    "example_inputs",
    "model_info",
    "plain_attributes",
    "plan_cached",
    "prologue",
    "refuse_fixed",
    "returned",
    "set_flags",
]
