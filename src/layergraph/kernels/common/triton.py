"""The phases that every shadow kernel is made of, each over one block of rows and a range of columns.

Names: T rows, D columns, R (or U) bottleneck; BT and BD are the block's rows and columns, RP and UP the bottleneck
rounded up to a power of two (at least 16 where a matrix instruction needs it). Rows of h, s and the results lie
``stride_*`` elements apart, columns one. Weights are contiguous in peft's Linear layout, so ``[R, D]`` for a product
that reduces D and ``[D, R]`` for one that expands to it. All accumulators are float32.

BT == 1 multiplies and sums; larger blocks use ``tl.dot``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

# Triton's interpreter keeps bfloat16 as bit patterns: dot and arithmetic on them are silently wrong, casts truncate.
# ``cast`` and ``operand`` emulate it there; in compiled code this constant is False and they are plain casts.
EMULATE = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def cast(value, dtype: tl.constexpr):
    """float32 to dtype, rounded to nearest even in the interpreter too."""
    if EMULATE and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(dtype)
    return result


@triton.jit
def operand(value, dtype: tl.constexpr):
    """An operand of ``tl.dot`` in dtype; in the interpreter a bfloat16 one is rounded and handed over as float32."""
    if EMULATE and dtype == tl.bfloat16:
        result = cast(value.to(tl.float32), dtype).to(tl.float32)
    else:
        result = value.to(dtype)
    return result


@triton.jit
def gelu(x):
    """Exact GELU: x times the normal distribution function."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); exp overflows to infinity for very negative x, and the quotient to the right 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def row_offsets(BT: tl.constexpr):
    """The rows of this program, int64: T times a row's stride may pass 2**31."""
    return tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)


@triton.jit
def slice_bounds(slice_d, D):
    """First column of this program's slice, and one past its last."""
    first = tl.program_id(1) * slice_d
    return first, tl.minimum(first + slice_d, D)


@triton.jit
def load_block(ptr, stride, rows, cols, T, D, EVEN_D: tl.constexpr):
    """[BT, BD] of a matrix of T rows, zero outside, as float32."""
    mask = (rows < T)[:, None]
    if not EVEN_D:
        mask = mask & (cols < D)[None, :]
    return tl.load(ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_block(ptr, stride, rows, cols, T, D, value):
    """Store what :func:`cast` made for the pointer's dtype, inside the matrix only."""
    mask = (rows < T)[:, None] & (cols < D)[None, :]
    tl.store(ptr + rows[:, None] * stride + cols[None, :], value, mask=mask)


@triton.jit
def multiply(a, w, acc, EXACT: tl.constexpr, PRECISION: tl.constexpr, dtype: tl.constexpr):
    """acc + a @ w with w in dtype.

    EXACT says that a holds bfloat16 values. With float32 weights two bfloat16 products are then enough: w is cut into a
    high and a low part, and what is dropped is below 2**-16 of w.
    """
    if EXACT and dtype == tl.float32:
        high = operand(w, tl.bfloat16)
        low = operand(w - high.to(tl.float32), tl.bfloat16)
        left = operand(a, tl.bfloat16)
        result = tl.dot(left, low, tl.dot(left, high, acc))
    elif dtype == tl.float32:
        # The interpreter ignores the mode, and refuses the name of one it does not know.
        result = tl.dot(a, w, acc, input_precision="ieee" if EMULATE else PRECISION)
    else:
        result = tl.dot(operand(a, dtype), operand(w, dtype), acc)
    return result


@triton.jit
def reduce_block(
    acc, a, weight, cols, low, D, R,
    BT: tl.constexpr, EVEN_D: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BT, RP] + a [BT, BD] @ weight[:, cols].T"""
    if BT == 1:
        mask = (low < R)[:, None]
        if not EVEN_D:
            mask = mask & (cols < D)[None, :]
        w = tl.load(weight + low[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        result = acc + tl.sum(w * a, axis=1)[None, :]
    else:
        mask = (low < R)[None, :]
        if not EVEN_D:
            mask = mask & (cols < D)[:, None]
        w = tl.load(weight + low[None, :] * D + cols[:, None], mask=mask, other=0.0)
        result = multiply(a, w, acc, EXACT, PRECISION, weight.dtype.element_ty)
    return result


@triton.jit
def expand_block(
    p, weight, cols, low, D, R,
    BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """p [BT, RP] @ weight[cols].T, [BT, BD]"""
    if BT == 1:
        mask = (low < R)[None, :]
        if not EVEN_D:
            mask = mask & (cols < D)[:, None]
        w = tl.load(weight + cols[:, None] * R + low[None, :], mask=mask, other=0.0).to(tl.float32)
        result = tl.sum(w * p, axis=1)[None, :]
    else:
        mask = (low < R)[:, None]
        if not EVEN_D:
            mask = mask & (cols < D)[None, :]
        w = tl.load(weight + cols[None, :] * R + low[:, None], mask=mask, other=0.0)
        zero = tl.zeros((BT, BD), dtype=tl.float32)
        result = multiply(p, w, zero, False, PRECISION, weight.dtype.element_ty)
    return result


@triton.jit
def load_bias(ptr, offsets, size):
    """A bias as a float32 row, zero past its end."""
    return tl.load(ptr + offsets, mask=offsets < size, other=0.0).to(tl.float32)[None, :]


@triton.jit
def discrepancy(h, s, hidden_dtype: tl.constexpr, shadow_dtype: tl.constexpr):
    """h - s rounded to the two dtypes' common one, as in the reference; a bfloat16 result is then an exact operand."""
    if hidden_dtype == shadow_dtype:
        delta = cast(h - s, hidden_dtype).to(tl.float32)
    else:
        delta = h - s
    return delta


# ---- phases --------------------------------------------------------------------------------------------------------
@triton.jit
def phase_down(
    hidden, shadow, down_weight, rows, start, stop, T, D, stride_h, stride_s,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Eq. 2 and half of 3: (h - s) @ down.T over columns start to stop, [BT, RP]."""
    hidden_dtype: tl.constexpr = hidden.dtype.element_ty
    shadow_dtype: tl.constexpr = shadow.dtype.element_ty
    exact: tl.constexpr = hidden_dtype == tl.bfloat16 and shadow_dtype == tl.bfloat16
    low = tl.arange(0, RP)
    acc = tl.zeros((BT, RP), dtype=tl.float32)
    for first in range(start, stop, BD):
        cols = first + tl.arange(0, BD)
        h = load_block(hidden, stride_h, rows, cols, T, D, EVEN_D)
        s = load_block(shadow, stride_s, rows, cols, T, D, EVEN_D)
        delta = discrepancy(h, s, hidden_dtype, shadow_dtype)
        acc = reduce_block(acc, delta, down_weight, cols, low, D, R, BT, EVEN_D, exact, PRECISION)
    return acc


@triton.jit
def phase_up(
    hidden, up_weight, p, scale, out, rows, start, stop, T, D, stride_h, stride_o,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The rest of Eq. 3, and 4: out = h + scale * p @ up.T over columns start to stop."""
    low = tl.arange(0, RP)
    for first in range(start, stop, BD):
        cols = first + tl.arange(0, BD)
        correction = expand_block(p, up_weight, cols, low, D, R, BT, BD, EVEN_D, PRECISION)
        h = load_block(hidden, stride_h, rows, cols, T, D, EVEN_D)
        store_block(out, stride_o, rows, cols, T, D, cast(h + scale * correction, out.dtype.element_ty))


@triton.jit
def phase_bottleneck(
    hidden, t1_weight, g1_weight, rows, start, stop, T, D, stride_h,
    U: tl.constexpr, UP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The first Linears of Eq. 5 and 6 without bias over columns start to stop: two of [BT, UP]."""
    exact: tl.constexpr = hidden.dtype.element_ty == tl.bfloat16
    low = tl.arange(0, UP)
    t = tl.zeros((BT, UP), dtype=tl.float32)
    g = tl.zeros((BT, UP), dtype=tl.float32)
    for first in range(start, stop, BD):
        cols = first + tl.arange(0, BD)
        h = load_block(hidden, stride_h, rows, cols, T, D, EVEN_D)
        t = reduce_block(t, h, t1_weight, cols, low, D, U, BT, EVEN_D, exact, PRECISION)
        g = reduce_block(g, h, g1_weight, cols, low, D, U, BT, EVEN_D, exact, PRECISION)
    return t, g


@triton.jit
def gated_block(
    t, g, shadow, t2_weight, t2_bias, g2_weight, g2_bias, rows, cols, low, T, D, stride_s,
    U: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The second Linears of Eq. 5 and 6, and 7, for one block of columns: [BT, BD]."""
    candidate = expand_block(t, t2_weight, cols, low, D, U, BT, BD, EVEN_D, PRECISION) + load_bias(t2_bias, cols, D)
    logit = expand_block(g, g2_weight, cols, low, D, U, BT, BD, EVEN_D, PRECISION) + load_bias(g2_bias, cols, D)
    gate = sigmoid(logit)
    s = load_block(shadow, stride_s, rows, cols, T, D, EVEN_D)
    return (1.0 - gate) * s + gate * candidate


@triton.jit
def phase_update(
    t, g, shadow, t2_weight, t2_bias, g2_weight, g2_bias, new_shadow, rows, start, stop, T, D, stride_s, stride_n,
    U: tl.constexpr, UP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the new state's columns start to stop from the two activations [BT, UP]."""
    low = tl.arange(0, UP)
    for first in range(start, stop, BD):
        cols = first + tl.arange(0, BD)
        value = gated_block(
            t, g, shadow, t2_weight, t2_bias, g2_weight, g2_bias, rows, cols, low, T, D, stride_s,
            U, BT, BD, EVEN_D, PRECISION,
        )  # fmt: skip
        store_block(new_shadow, stride_n, rows, cols, T, D, cast(value, new_shadow.dtype.element_ty))


@triton.jit
def phase_update_down(
    t, g, hidden, shadow, t2_weight, t2_bias, g2_weight, g2_bias, down_weight, new_shadow, rows, start, stop, T, D,
    stride_h, stride_s, stride_n,
    U: tl.constexpr, UP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """:func:`phase_update` and, from the state as stored, :func:`phase_down` of the next inject: [BT, RP]."""
    hidden_dtype: tl.constexpr = hidden.dtype.element_ty
    shadow_dtype: tl.constexpr = new_shadow.dtype.element_ty
    exact: tl.constexpr = hidden_dtype == tl.bfloat16 and shadow_dtype == tl.bfloat16
    low_u = tl.arange(0, UP)
    low_r = tl.arange(0, RP)
    acc = tl.zeros((BT, RP), dtype=tl.float32)
    for first in range(start, stop, BD):
        cols = first + tl.arange(0, BD)
        value = gated_block(
            t, g, shadow, t2_weight, t2_bias, g2_weight, g2_bias, rows, cols, low_u, T, D, stride_s,
            U, BT, BD, EVEN_D, PRECISION,
        )  # fmt: skip
        stored = cast(value, shadow_dtype)
        store_block(new_shadow, stride_n, rows, cols, T, D, stored)
        h = load_block(hidden, stride_h, rows, cols, T, D, EVEN_D)
        delta = discrepancy(h, stored.to(tl.float32), hidden_dtype, shadow_dtype)
        acc = reduce_block(acc, delta, down_weight, cols, low_r, D, R, BT, EVEN_D, exact, PRECISION)
    return acc


# ---- partial sums of the split family: [slices, T, WIDTH] float32 -------------------------------------------------
@triton.jit
def store_partial(part, value, rows, low, T, column, R, WIDTH):
    """Store this slice's [BT, RP] at a column of the partials."""
    ptr = part + (tl.program_id(1).to(tl.int64) * T + rows[:, None]) * WIDTH + column + low[None, :]
    tl.store(ptr, value, mask=(rows < T)[:, None] & (low < R)[None, :])


@triton.jit
def sum_partials(
    part, rows, low, T, column, R, WIDTH, slices,
    RP: tl.constexpr, BT: tl.constexpr, NC: tl.constexpr,
):  # fmt: skip
    """The sum over all slices, [BT, RP], NC slices at a time and always in the same order: deterministic."""
    acc = tl.zeros((BT, RP), dtype=tl.float32)
    for first in range(0, slices, NC):
        some = first + tl.arange(0, NC).to(tl.int64)
        ptr = part + (some[:, None, None] * T + rows[None, :, None]) * WIDTH + column + low[None, None, :]
        mask = (some < slices)[:, None, None] & (rows < T)[None, :, None] & (low < R)[None, None, :]
        acc += tl.sum(tl.load(ptr, mask=mask, other=0.0), axis=0)
    return acc


def current_arch() -> str:
    """``sm_90``, ``gfx942`` and so on: the target Triton would compile for now."""
    target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":")[0]


def is_interpreted(kernel: object) -> bool:
    """True for a kernel that Triton's interpreter runs."""
    return isinstance(kernel, InterpretedFunction)


__all__ = [
    "EMULATE",
    "cast",
    "current_arch",
    "discrepancy",
    "expand_block",
    "gated_block",
    "gelu",
    "is_interpreted",
    "load_bias",
    "load_block",
    "multiply",
    "operand",
    "phase_bottleneck",
    "phase_down",
    "phase_up",
    "phase_update",
    "phase_update_down",
    "reduce_block",
    "row_offsets",
    "sigmoid",
    "slice_bounds",
    "store_block",
    "store_partial",
    "sum_partials",
]
