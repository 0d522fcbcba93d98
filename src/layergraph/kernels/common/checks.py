"""Argument checks of the shadow ops, run by fake and real kernels alike, so that both raise the same errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from layergraph.errors import InputError, InputTypeError

# Shape of every adapter tensor, by argument name: peft's Linear layouts ([out, in]).
ADAPTER_SHAPES: Mapping[str, tuple[str, ...]] = {
    "t1_weight": ("u", "d"),
    "t1_bias": ("u",),
    "t2_weight": ("d", "u"),
    "t2_bias": ("d",),
    "g1_weight": ("u", "d"),
    "g1_bias": ("u",),
    "g2_weight": ("d", "u"),
    "g2_bias": ("d",),
    "down_weight": ("r", "d"),
    "up_weight": ("d", "r"),
}

#: What states and adapters may be; float8 has no arithmetic of its own.
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def check_types(op: str, arguments: Mapping[str, object]) -> None:
    """Raise :class:`InputTypeError` naming the first argument that is no tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise InputTypeError(
                f"layergraph::{op}: {name} is not a tensor",
                expected="a torch.Tensor",
                found=f"{type(value).__name__} ({value!r})",
                do="wrap a number as torch.tensor(number)" if isinstance(value, int | float) else None,
            )


def check_arguments(
    op: str, hidden: Tensor, shadow: Tensor, adapter: Mapping[str, Tensor], alpha: Tensor | None
) -> None:
    """Check shapes, dtypes and devices of one call.

    Args:
        op: the op's name without its namespace, for messages.
        hidden, shadow: floating point, ``[..., d]``, of one shape; their dtypes may differ.
        adapter: the adapter tensors of the op by argument name (a subset of :data:`ADAPTER_SHAPES`), of one dtype.
        alpha: 0-d float32, or None for an op without it.

    Raises:
        InputError: names the argument, what was found and what was expected.
    """
    if _is_right(hidden, shadow, adapter, alpha):
        return
    if hidden.dim() == 0 or (type(hidden.shape[-1]) is int and hidden.shape[-1] == 0):
        _fail(op, "hidden", "the wrong shape", "[..., d], d from 1 up", _text(hidden.shape))
    if not _same_shape(hidden.shape, shadow.shape):
        _fail(op, "shadow", "the wrong shape", f"{_text(hidden.shape)}, the shape of hidden", _text(shadow.shape))
    sizes: dict[str, int] = {"d": hidden.shape[-1]}
    for name, tensor in adapter.items():
        _check_shape(op, name, tensor, ADAPTER_SHAPES[name], sizes)
    if alpha is not None and alpha.dim() != 0:
        _fail(op, "alpha", "the wrong shape", "[] (0-d)", _text(alpha.shape))

    first_name, first = next(iter(adapter.items()))
    for name, tensor in (("hidden", hidden), ("shadow", shadow), (first_name, first)):
        if tensor.dtype not in DTYPES:
            _fail(op, name, "the wrong dtype", "float16, bfloat16, float32 or float64", str(tensor.dtype))
    for name, tensor in adapter.items():
        if tensor.dtype != first.dtype:
            _fail(op, name, "the wrong dtype", f"{first.dtype}, the dtype of {first_name}", str(tensor.dtype))
    if alpha is not None and alpha.dtype != torch.float32:
        _fail(op, "alpha", "the wrong dtype", "torch.float32", str(alpha.dtype))

    others = {"shadow": shadow, **adapter, **({} if alpha is None else {"alpha": alpha})}
    for name, tensor in others.items():
        if tensor.device != hidden.device:
            _fail(op, name, "the wrong device", f"{hidden.device}, the device of hidden", str(tensor.device))


def _is_right(hidden: Tensor, shadow: Tensor, adapter: Mapping[str, Tensor], alpha: Tensor | None) -> bool:
    """True for a call without fault, told in a few microseconds; False asks for the checks that can name one."""
    shape = hidden.shape
    # Sizes that are symbols take the long way, which knows how to ask about them.
    if not shape or not all(type(size) is int for size in (*shape, *shadow.shape)) or shape != shadow.shape:
        return False
    sizes = {"d": shape[-1]}
    device, dtype = hidden.device, next(iter(adapter.values())).dtype
    for name, tensor in adapter.items():
        found = tensor.shape
        pattern = ADAPTER_SHAPES[name]
        if len(found) != len(pattern) or tensor.dtype is not dtype or tensor.device != device:
            return False
        for letter, size in zip(pattern, found, strict=True):
            if sizes.setdefault(letter, size) != size:
                return False
    if alpha is not None and (alpha.dim() or alpha.dtype is not torch.float32 or alpha.device != device):
        return False
    if 0 in sizes.values() or not DTYPES.issuperset((dtype, hidden.dtype, shadow.dtype)):
        return False
    return shadow.device == device


def _check_shape(op: str, name: str, tensor: Tensor, pattern: tuple[str, ...], sizes: dict[str, int]) -> None:
    """Match one shape against a pattern such as ("r", "d"); the first tensor that mentions a letter fixes its size."""
    bound = {letter: tensor.shape[i] for i, letter in enumerate(pattern) if i < tensor.dim()}
    known = {letter: sizes.get(letter, bound.get(letter)) for letter in pattern}
    fits = tensor.dim() == len(pattern) and all(_same(bound[letter], known[letter]) for letter in pattern)
    if not fits or 0 in (size for size in bound.values() if type(size) is int):
        expected = ", ".join(str(sizes.get(letter, letter)) for letter in pattern)
        _fail(op, name, "the wrong shape", f"[{expected}] ({', '.join(pattern)}, from 1 up)", _text(tensor.shape))
    sizes.update(bound)


def _same_shape(left: Iterable[int], right: Iterable[int]) -> bool:
    left, right = tuple(left), tuple(right)
    return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))


def _same(left: int | None, right: int | None) -> bool:
    if isinstance(left, torch.SymInt) or isinstance(right, torch.SymInt):
        # A size known only at run time must not stop a trace: the real call checks it again.
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return bool(guard_or_true(left == right))
    return left == right


def _text(shape: Iterable[int]) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"


def _fail(op: str, name: str, fault: str, expected: str, found: str) -> None:
    raise InputError(f"layergraph::{op}: {name} has {fault}", expected=expected, found=found)


__all__ = ["ADAPTER_SHAPES", "check_arguments", "check_types"]
