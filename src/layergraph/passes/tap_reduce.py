"""What a tap makes of a value before it is returned: reductions and casts, in the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from layergraph.errors import InputError
from layergraph.ir.edit import Edit

ATEN = torch.ops.aten


def check_reduction(node: torch.fx.Node, path: str, reduce: Any) -> None:
    """Refuse a reduction that the value does not have.

    Raises:
        InputError: says which sizes or dtype it takes.
    """
    value = node.meta["val"]

    def fail(what: str, expected: str) -> None:
        found = f"{str(value.dtype).removeprefix('torch.')}{[str(size) for size in value.shape]}".replace("'", "")
        raise InputError(
            what,
            pass_name="tap-outputs",
            path=path,
            node=node.name,
            expected=expected,
            found=found,
            do="choose other values, or another reduction",
        )

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


def reduced(node: torch.fx.Node, reduce: Any, dtype: str | None, edit: Edit) -> Iterator[tuple[str, torch.fx.Node]]:
    """The value as asked for, reduced, then cast: what to append to its name, and the node."""
    check_reduction(node, "", reduce)  # a value that nothing else needs is known only now
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
