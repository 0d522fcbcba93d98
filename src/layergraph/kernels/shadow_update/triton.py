"""Triton kernels of shadow_update: one whole kernel for the tile and row families, two for split."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layergraph.kernels.common.launch import Plan, as_rows, ceil_div, declare_kernels, on_device, plan_for, start
from layergraph.kernels.common.triton import (
    current_arch,
    gelu,
    load_bias,
    phase_bottleneck,
    phase_update,
    row_offsets,
    slice_bounds,
    store_partial,
    sum_partials,
)


@triton.jit
def update_whole(
    hidden, shadow, t1_weight, t1_bias, t2_weight, t2_bias, g1_weight, g1_bias, g2_weight, g2_bias, new_shadow,
    T, D, stride_h, stride_s, stride_n,
    U: tl.constexpr, UP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles): both bottlenecks over d, then candidate, gate and the new state over d."""
    rows = row_offsets(BT)
    low = tl.arange(0, UP)
    t, g = phase_bottleneck(
        hidden, t1_weight, g1_weight, rows, 0, D, T, D, stride_h, U, UP, BT, BD, EVEN_D, PRECISION
    )  # fmt: skip
    t = gelu(t + load_bias(t1_bias, low, U))
    g = gelu(g + load_bias(g1_bias, low, U))
    phase_update(
        t, g, shadow, t2_weight, t2_bias, g2_weight, g2_bias, new_shadow, rows, 0, D, T, D, stride_s, stride_n,
        U, UP, BT, BD, EVEN_D, PRECISION,
    )  # fmt: skip


@triton.jit
def update_reduce(
    hidden, t1_weight, g1_weight, part, T, D, stride_h, slice_d,
    U: tl.constexpr, UP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, slices of d): partial sums [slices, T, 2 U] of the two bottlenecks, T's before G's."""
    rows = row_offsets(BT)
    low = tl.arange(0, UP)
    first, last = slice_bounds(slice_d, D)
    t, g = phase_bottleneck(
        hidden, t1_weight, g1_weight, rows, first, last, T, D, stride_h, U, UP, BT, BD, EVEN_D, PRECISION
    )  # fmt: skip
    store_partial(part, t, rows, low, T, 0, U, 2 * U)
    store_partial(part, g, rows, low, T, U, U, 2 * U)


@triton.jit
def sum_bottleneck(
    part, t1_bias, g1_bias, rows, T, slices,
    U: tl.constexpr, UP: tl.constexpr, BT: tl.constexpr, NC: tl.constexpr,
):  # fmt: skip
    """What :func:`update_reduce` left, as the two activations [BT, UP]."""
    low = tl.arange(0, UP)
    t = sum_partials(part, rows, low, T, 0, U, 2 * U, slices, UP, BT, NC)
    g = sum_partials(part, rows, low, T, U, U, 2 * U, slices, UP, BT, NC)
    return gelu(t + load_bias(t1_bias, low, U)), gelu(g + load_bias(g1_bias, low, U))


@triton.jit
def update_expand(
    shadow, part, t1_bias, t2_weight, t2_bias, g1_bias, g2_weight, g2_bias, new_shadow, T, D, stride_s, stride_n,
    slice_d, slices, U: tl.constexpr, UP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    NC: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, slices of d): sum the partials, write this slice of the new state."""
    rows = row_offsets(BT)
    first, last = slice_bounds(slice_d, D)
    t, g = sum_bottleneck(part, t1_bias, g1_bias, rows, T, slices, U, UP, BT, NC)
    phase_update(
        t, g, shadow, t2_weight, t2_bias, g2_weight, g2_bias, new_shadow, rows, first, last, T, D, stride_s, stride_n,
        U, UP, BT, BD, EVEN_D, PRECISION,
    )  # fmt: skip


WHOLE = (update_whole,)
SPLIT = (update_reduce, update_expand)
declare_kernels("shadow_update", WHOLE + SPLIT)


def launch(
    hidden: Tensor,
    shadow: Tensor,
    t1_weight: Tensor,
    t1_bias: Tensor,
    t2_weight: Tensor,
    t2_bias: Tensor,
    g1_weight: Tensor,
    g1_bias: Tensor,
    g2_weight: Tensor,
    g2_bias: Tensor,
    prepared: Plan | None = None,
) -> Tensor:
    """shadow_update on a GPU. Arguments as for the op; ``prepared`` overrides the choice of kernel and block sizes."""
    out = shadow.new_empty(shadow.shape)
    h, s, n = as_rows(hidden), as_rows(shadow), as_rows(out)
    weights = (t1_weight, t1_bias, t2_weight, t2_bias, g1_weight, g1_bias, g2_weight, g2_bias)
    t1, t1b, t2, t2b, g1, g1b, g2, g2b = (weight.contiguous() for weight in weights)
    (tokens, width), u = h.shape, t1.shape[0]
    if isinstance(tokens, int) and tokens == 0:
        return out
    if prepared is None:
        prepared = plan_for("shadow_update", hidden, t1, 0, u, current_arch())
    tiles = ceil_div(tokens, prepared.config.block_t)
    with on_device(hidden):
        if prepared.config.family == "split":
            part = h.new_empty((prepared.slices, tokens, 2 * u), dtype=torch.float32)
            grid = (tiles, prepared.slices)
            start(update_reduce, grid, (h, t1, g1, part, tokens, width, h.stride(0), prepared.slice_d), prepared)
            arguments = (s, part, t1b, t2, t2b, g1b, g2, g2b, n, tokens, width, s.stride(0), n.stride(0))
            start(update_expand, grid, (*arguments, prepared.slice_d, prepared.slices), prepared)
        else:
            arguments = (h, s, t1, t1b, t2, t2b, g1, g1b, g2, g2b, n, tokens, width)
            start(update_whole, (tiles,), (*arguments, h.stride(0), s.stride(0), n.stride(0)), prepared)
    return out


__all__ = ["SPLIT", "WHOLE", "launch", "sum_bottleneck", "update_expand", "update_reduce", "update_whole"]
