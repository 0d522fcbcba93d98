"""What a tap makes of a value before it is returned: reductions and casts, in the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from layergraph.errors import InputError
from layergraph.ir.edit import Edit
from layergraph.ir.printing import value_text

ATEN = torch.ops.aten


def check_reduction(
    node: torch.fx.Node, path: str, reduce: Any, dtype: str | None = None, names: Mapping[str, str] | None = None
) -> None:
    """Refuse a reduction or cast that the value does not have.

    Args:
        names: what to call sizes that may vary, see :func:`layergraph.ir.printing.size_names`.

    Raises:
        InputError: says which sizes or dtype it takes.
    """
    value = node.meta["val"]

    def fail(what: str, expected: str) -> None:
        found = value_text(value, names or {})
        raise InputError(
            what,
            pass_name="tap-outputs",
            path=path,
            node=node.name,
            expected=expected,
            found=found,
            do="choose other values, or another reduction",
        )

    if dtype is not None and not _keeps_kind(value.dtype, getattr(torch, dtype)):
        fail(f"a cast to {dtype} would cut the values off", "a dtype that holds fractions")
    if reduce is None:
        return
    if reduce in ("last", "mean") and value.dim() < 2:
        fail("a reduction over tokens needs two dimensions", "tokens and features")
    if reduce in ("mean", "norm") and not (value.is_floating_point() or value.is_complex()):
        fail(f"no {reduce} of whole numbers", "a floating-point dtype")
    if value.dim() < 1:
        fail("a reduction over features needs a dimension", "features")
    size = value.shape[-1]
    if isinstance(reduce, tuple) and isinstance(size, int) and reduce[1] > size:
        fail(f"topk of {reduce[1]} takes more features than there are", f"{reduce[1]} or more features")


def _keeps_kind(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether a cast keeps fractions and imaginary parts, where the value may have them."""
    holds = new.is_floating_point or new.is_complex
    return (holds or not (old.is_floating_point or old.is_complex)) and (new.is_complex or not old.is_complex)


def reduced(node: torch.fx.Node, reduce: Any, dtype: str | None, edit: Edit) -> Iterator[tuple[str, torch.fx.Node]]:
    """The value as asked for, reduced, then cast: what to append to its name, and the node."""
    check_reduction(node, "", reduce, dtype)  # a value that nothing else needs is known only now
    # Tokens are the dimension before features: 1 in [B, S, D], 0 in [N, D].
    tokens = node.meta["val"].dim() - 2
    results = [("", node)]
    if reduce == "last":
        results = [("", edit.call(ATEN.select.int, node, tokens, -1, after=node))]
    elif reduce == "mean":
        results = [("", edit.call(ATEN.mean.dim, node, [tokens], after=node))]
    elif reduce == "norm":
        results = [("", edit.call(ATEN.linalg_vector_norm.default, node, 2, [-1], after=node))]
    elif reduce is not None:
        pair = edit.call(ATEN.topk.default, node, reduce[1], -1, after=node)
        values = edit.call(operator.getitem, pair, 0, after=pair)
        results = [(".values", values), (".indices", edit.call(operator.getitem, pair, 1, after=values))]
    for suffix, result in results:
        if dtype is not None and suffix != ".indices":
            result = edit.call(ATEN.to.dtype, result, getattr(torch, dtype), after=result)
        yield suffix, result


__all__ = ["check_reduction", "reduced"]
