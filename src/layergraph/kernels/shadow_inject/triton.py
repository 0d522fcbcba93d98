"""Triton kernels of shadow_inject: one whole kernel for the tile and row families, two for split."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layergraph.kernels.common.launch import Plan, as_rows, ceil_div, declare_kernels, on_device, plan_for, start
from layergraph.kernels.common.triton import (
    current_arch,
    phase_down,
    phase_up,
    row_offsets,
    slice_bounds,
    store_partial,
    sum_partials,
)


@triton.jit
def inject_whole(
    hidden, shadow, down_weight, up_weight, alpha, out, T, D, stride_h, stride_s, stride_o,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles): reduce over d, then expand over d; h comes from L2 the second time."""
    rows = row_offsets(BT)
    p = phase_down(
        hidden, shadow, down_weight, rows, 0, D, T, D, stride_h, stride_s, R, RP, BT, BD, EVEN_D, PRECISION
    )  # fmt: skip
    phase_up(
        hidden, up_weight, p, tl.load(alpha), out, rows, 0, D, T, D, stride_h, stride_o,
        R, RP, BT, BD, EVEN_D, PRECISION,
    )  # fmt: skip


@triton.jit
def inject_reduce(
    hidden, shadow, down_weight, part, T, D, stride_h, stride_s, slice_d,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, slices of d): partial sums [slices, T, R] of (h - s) @ down.T."""
    rows = row_offsets(BT)
    first, last = slice_bounds(slice_d, D)
    p = phase_down(
        hidden, shadow, down_weight, rows, first, last, T, D, stride_h, stride_s, R, RP, BT, BD, EVEN_D, PRECISION
    )  # fmt: skip
    store_partial(part, p, rows, tl.arange(0, RP), T, 0, R, R)


@triton.jit
def inject_expand(
    hidden, part, up_weight, alpha, out, T, D, stride_h, stride_o, slice_d, slices,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    NC: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, slices of d): sum the partials, expand this slice."""
    rows = row_offsets(BT)
    first, last = slice_bounds(slice_d, D)
    p = sum_partials(part, rows, tl.arange(0, RP), T, 0, R, R, slices, RP, BT, NC)
    phase_up(
        hidden, up_weight, p, tl.load(alpha), out, rows, first, last, T, D, stride_h, stride_o,
        R, RP, BT, BD, EVEN_D, PRECISION,
    )  # fmt: skip


WHOLE = (inject_whole,)
SPLIT = (inject_reduce, inject_expand)
declare_kernels("shadow_inject", WHOLE + SPLIT)


def launch(
    hidden: Tensor,
    shadow: Tensor,
    down_weight: Tensor,
    up_weight: Tensor,
    alpha: Tensor,
    prepared: Plan | None = None,
) -> Tensor:
    """shadow_inject on a GPU. Arguments as for the op; ``prepared`` overrides the choice of kernel and block sizes."""
    out = hidden.new_empty(hidden.shape)
    h, s, y = as_rows(hidden), as_rows(shadow), as_rows(out)
    down, up = down_weight.contiguous(), up_weight.contiguous()
    (tokens, width), r = h.shape, down.shape[0]
    if isinstance(tokens, int) and tokens == 0:
        return out
    if prepared is None:
        prepared = plan_for("shadow_inject", hidden, down, r, 0, current_arch())
    tiles = ceil_div(tokens, prepared.config.block_t)
    sizes = (tokens, width, h.stride(0))
    with on_device(hidden):
        if prepared.config.family == "split":
            part = h.new_empty((prepared.slices, tokens, r), dtype=torch.float32)
            grid = (tiles, prepared.slices)
            start(inject_reduce, grid, (h, s, down, part, *sizes, s.stride(0), prepared.slice_d), prepared)
            arguments = (h, part, up, alpha, y, *sizes, y.stride(0), prepared.slice_d, prepared.slices)
            start(inject_expand, grid, arguments, prepared)
        else:
            arguments = (h, s, down, up, alpha, y, *sizes, s.stride(0), y.stride(0))
            start(inject_whole, (tiles,), arguments, prepared)
    return out


__all__ = ["SPLIT", "WHOLE", "inject_expand", "inject_reduce", "inject_whole", "launch"]
