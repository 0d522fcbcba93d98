"""What a private copy of a Hugging Face model needs while it is traced, as one context manager.

Written against transformers 5.17 to 5.24. Its exporters apply about a hundred patches to classes and to torch itself
(``apply_patches("dynamo")``). We apply none of them: other threads would meet them, and those that matter here have
a local counterpart.

- chunked vision and audio attention: :func:`varlen_attention`, which also takes images of different size;
- ``torch.nn.functional.scaled_dot_product_attention`` through the MATH backend: not wanted. It decomposes attention
  into matmuls in the graph, and the guard it avoids comes from batch sizes that depend on data;
- sliding-window cache layers as full layers: programs here are uncached, and masks carry the window;
- optional hub kernels off: they are swapped in by ``kernelize``, which a model in eval mode has not called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from layergraph.errors import NotSupportedError
from layergraph.trace.attention import packed_attentions, varlen_attention

# Loops over the experts that were hit, which depends on data; grouped_mm and batched_mm compute the same without.
_TRACEABLE_EXPERTS = "batched_mm"


@contextmanager
def hf_trace_context(model: nn.Module) -> Iterator[None]:
    """Make ``model``, a private copy, traceable for the block; everything is put back after it, exceptions included.

    Raises:
        NotSupportedError: flash or flex attention is set where it cannot be traced.
    """
    with ExitStack() as stack:
        _refuse_kernels(model)
        stack.enter_context(_experts(model))
        stack.enter_context(varlen_attention(model))
        yield


def _configs(model: nn.Module) -> dict[int, Any]:
    """Every config object that a module holds, by identity."""
    configs = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return configs


def _refuse_kernels(model: nn.Module) -> None:
    packed = {id(module) for module in packed_attentions(model).values()}
    for path, module in model.named_modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if name and id(module) not in packed and ("flash" in name or "flex" in name) and _is_attention(module):
            raise NotSupportedError(
                f"{name} cannot be traced",
                path=path,
                do='call model.set_attn_implementation("sdpa") (or "eager") before tracing',
            )


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and not any("." in name for name, _ in module.named_modules())


@contextmanager
def _experts(model: nn.Module) -> Iterator[None]:
    changed = []
    for config in _configs(model).values():
        if getattr(config, "_experts_implementation", None) not in (None, "batched_mm", "grouped_mm"):
            changed.append((config, config._experts_implementation_internal))
            config._experts_implementation_internal = _TRACEABLE_EXPERTS
    try:
        yield
    finally:
        for config, value in changed:
            config._experts_implementation_internal = value


__all__ = ["hf_trace_context"]
