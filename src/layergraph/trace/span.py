"""Trace a module alone, for its graph to be spliced into another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from layergraph.ir.program import GraphUnit
from layergraph.trace.export import trace


def trace_span(
    module: nn.Module,
    example_inputs: Mapping[str, Any],
    dims: Mapping[str, Mapping[int, str]],
    *,
    training: bool = False,
) -> GraphUnit:
    """The uncached graph of ``module``, for :func:`layergraph.ir.inline.inline`.

    Args:
        example_inputs: keyword arguments of its forward; no size that may vary is 0 or 1.
        dims: which sizes may vary, and what they are called: ``{"x": {0: "batch"}}``.
        training: keep dropout alive.

    Raises:
        TraceError: the module cannot be exported.
    """
    return trace(module, dict(example_inputs), dynamic=dims, training=training, cached=False).forward


__all__ = ["trace_span"]
