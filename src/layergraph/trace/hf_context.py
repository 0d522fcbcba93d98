"""What a private copy of a Hugging Face model needs while it is traced, as one context manager.

Written against transformers 5.17 to 5.24. Its exporters apply about a hundred patches to classes and to torch itself
(``apply_patches("dynamo")``). We apply none of them: other threads would meet them, and those that matter here have
a local counterpart.

- chunked vision and audio attention: :func:`varlen_attention`, which also takes images of different size;
- experts: :func:`traceable_experts`;
- gated delta rules: :func:`traceable_delta_rules`;
- masks that upstream builds with vmap: :func:`broadcast_masks`;
- ``torch.nn.functional.scaled_dot_product_attention`` through the MATH backend: not wanted. It decomposes attention
  into matmuls in the graph, and the guard it avoids comes from batch sizes that depend on data;
- sliding-window cache layers as full layers: programs here are uncached, and masks carry the window;
- optional hub kernels off: they are swapped in by ``kernelize``, which a model in eval mode has not called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from layergraph.errors import NotSupportedError
from layergraph.trace.attention import packed_attentions, varlen_attention
from layergraph.trace.hf_delta import traceable_delta_rules
from layergraph.trace.hf_experts import traceable_experts
from layergraph.trace.hf_masks import broadcast_masks
from layergraph.trace.inputs import PACKED_DIMS


@contextmanager
def hf_trace_context(model: nn.Module) -> Iterator[None]:
    """Make ``model``, a private copy, traceable for the block; everything is put back after it, exceptions included.

    Raises:
        NotSupportedError: flash or flex attention is set where it cannot be traced.
    """
    with ExitStack() as stack:
        _refuse_kernels(model)
        stack.enter_context(traceable_experts(model))
        stack.enter_context(traceable_delta_rules(model))
        stack.enter_context(broadcast_masks())
        stack.enter_context(_equal_sizes(model))
        stack.enter_context(varlen_attention(model))
        yield


def _refuse_kernels(model: nn.Module) -> None:
    packed = {id(module) for module in packed_attentions(model).values()}
    for path, module in model.named_modules():
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if name and id(module) not in packed and ("flash" in name or "flex" in name) and _is_attention(module):
            raise NotSupportedError(
                f"{name} cannot be traced",
                path=path,
                do='call model.set_attn_implementation("sdpa") (or "eager") before tracing',
                shell="add --attention sdpa, or eager",
            )


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and not any("." in name for name, _ in module.named_modules())


@contextmanager
def _equal_sizes(model: nn.Module) -> Iterator[None]:
    """State, before the model runs, which sizes of a packed tower's inputs belong together.

    Its code often mixes them without ever comparing, and torch would then carry independent symbols through the
    graph: (patches // (patches // 4)) * windows, and so on.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes: dict[str, Any] = {}
        for name, label in PACKED_DIMS.items():
            if isinstance(kwargs.get(name), torch.Tensor) and kwargs[name].dim() <= 2:
                size = kwargs[name].shape[0]
                torch._check(sizes.setdefault(label, size) == size)
        merge = getattr(model, "spatial_merge_size", None)
        if isinstance(merge, int) and {"patches", "merged_patches"} <= sizes.keys():
            torch._check(sizes["patches"] == sizes["merged_patches"] * merge**2)

    handle = model.register_forward_pre_hook(hook, with_kwargs=True) if packed_attentions(model) else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


__all__ = ["hf_trace_context"]
