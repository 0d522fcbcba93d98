"""Triton kernels of shadow_update_inject: one whole kernel for the tile and row families, three for split.

The first and last kernel of the split family are those of the two ops it joins.
"""

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
    phase_up,
    phase_update_down,
    row_offsets,
    slice_bounds,
    store_partial,
)
from layergraph.kernels.shadow_inject.triton import inject_expand
from layergraph.kernels.shadow_update.triton import sum_bottleneck, update_reduce


@triton.jit
def update_inject_whole(
    hidden, shadow, t1_weight, t1_bias, t2_weight, t2_bias, g1_weight, g1_bias, g2_weight, g2_bias,
    down_weight, up_weight, alpha, new_shadow, out, T, D, stride_h, stride_s, stride_n, stride_o,
    U: tl.constexpr, UP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles): three passes over d; h is read three times, from L2 all but the first."""
    rows = row_offsets(BT)
    low = tl.arange(0, UP)
    t, g = phase_bottleneck(
        hidden, t1_weight, g1_weight, rows, 0, D, T, D, stride_h, U, UP, BT, BD, EVEN_D, PRECISION
    )  # fmt: skip
    t = gelu(t + load_bias(t1_bias, low, U))
    g = gelu(g + load_bias(g1_bias, low, U))
    p = phase_update_down(
        t, g, hidden, shadow, t2_weight, t2_bias, g2_weight, g2_bias, down_weight, new_shadow, rows, 0, D, T, D,
        stride_h, stride_s, stride_n, U, UP, R, RP, BT, BD, EVEN_D, PRECISION,
    )  # fmt: skip
    phase_up(
        hidden, up_weight, p, tl.load(alpha), out, rows, 0, D, T, D, stride_h, stride_o,
        R, RP, BT, BD, EVEN_D, PRECISION,
    )  # fmt: skip


@triton.jit
def update_expand_reduce(
    hidden, shadow, part, t1_bias, t2_weight, t2_bias, g1_bias, g2_weight, g2_bias, down_weight, new_shadow, part_r,
    T, D, stride_h, stride_s, stride_n, slice_d, slices,
    U: tl.constexpr, UP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    NC: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, slices of d): a slice of the new state, and partial sums [slices, T, R] for the inject."""
    rows = row_offsets(BT)
    first, last = slice_bounds(slice_d, D)
    t, g = sum_bottleneck(part, t1_bias, g1_bias, rows, T, slices, U, UP, BT, NC)
    p = phase_update_down(
        t, g, hidden, shadow, t2_weight, t2_bias, g2_weight, g2_bias, down_weight, new_shadow, rows, first, last, T, D,
        stride_h, stride_s, stride_n, U, UP, R, RP, BT, BD, EVEN_D, PRECISION,
    )  # fmt: skip
    store_partial(part_r, p, rows, tl.arange(0, RP), T, 0, R, R)


WHOLE = (update_inject_whole,)
SPLIT = (update_reduce, update_expand_reduce, inject_expand)
declare_kernels("shadow_update_inject", WHOLE + SPLIT)


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
    down_weight: Tensor,
    up_weight: Tensor,
    alpha: Tensor,
    prepared: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """shadow_update_inject on a GPU. Arguments as for the op; ``prepared`` overrides the kernel and block sizes."""
    new_shadow, out = shadow.new_empty(shadow.shape), hidden.new_empty(hidden.shape)
    h, s, n, y = as_rows(hidden), as_rows(shadow), as_rows(new_shadow), as_rows(out)
    weights = (t1_weight, t1_bias, t2_weight, t2_bias, g1_weight, g1_bias, g2_weight, g2_bias, down_weight, up_weight)
    t1, t1b, t2, t2b, g1, g1b, g2, g2b, down, up = (weight.contiguous() for weight in weights)
    (tokens, width), u, r = h.shape, t1.shape[0], down.shape[0]
    if isinstance(tokens, int) and tokens == 0:
        return new_shadow, out
    if prepared is None:
        prepared = plan_for("shadow_update_inject", hidden, t1, r, u, current_arch())
    tiles = ceil_div(tokens, prepared.config.block_t)
    strides = (h.stride(0), s.stride(0), n.stride(0))
    with on_device(hidden):
        if prepared.config.family == "split":
            part = h.new_empty((prepared.slices, tokens, 2 * u), dtype=torch.float32)
            part_r = h.new_empty((prepared.slices, tokens, r), dtype=torch.float32)
            grid = (tiles, prepared.slices)
            start(update_reduce, grid, (h, t1, g1, part, tokens, width, h.stride(0), prepared.slice_d), prepared)
            middle = (h, s, part, t1b, t2, t2b, g1b, g2, g2b, down, n, part_r, tokens, width, *strides)
            start(update_expand_reduce, grid, (*middle, prepared.slice_d, prepared.slices), prepared)
            last = (h, part_r, up, alpha, y, tokens, width, h.stride(0), y.stride(0), prepared.slice_d, prepared.slices)
            start(inject_expand, grid, last, prepared)
        else:
            arguments = (h, s, t1, t1b, t2, t2b, g1, g1b, g2, g2b, down, up, alpha, n, y, tokens, width)
            start(update_inject_whole, (tiles,), (*arguments, *strides, y.stride(0)), prepared)
    return new_shadow, out


__all__ = ["SPLIT", "WHOLE", "launch", "update_expand_reduce", "update_inject_whole"]
