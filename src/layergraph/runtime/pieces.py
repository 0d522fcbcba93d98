"""Outputs of a prompt that was written in several pieces, as if it had been written in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layergraph.errors import NotSupportedError
from layergraph.ir.program import GraphUnit


def join(
    unit: GraphUnit, pieces: list[dict[str, torch.Tensor]], batch: int, sizes: list[int]
) -> dict[str, torch.Tensor]:
    """Join every output along its tokens, wherever they stand in its shape.

    Args:
        unit: the cached graph.
        pieces: its outputs, by name, piece by piece.
        batch: rows.
        sizes: tokens of each piece.

    Raises:
        NotSupportedError: an output grows with what is held (attention weights): pieces of it do not fit together.
    """
    shapes = _shapes(unit)
    return {name: _joiner(unit, name, shapes)([piece[name] for piece in pieces], batch, sizes) for name in pieces[0]}


def _shapes(unit: GraphUnit) -> dict[str, list[Any]]:
    """Symbolic sizes of the inputs that name them, and of every output."""
    values = {node.name: node.meta["val"] for node in unit.graph.find_nodes(op="placeholder")}
    inputs = dict(zip(unit.interface.input_names, unit.exported.graph_signature.user_inputs, strict=True))
    outputs = dict(zip(unit.interface.outputs, unit.exported.graph_signature.user_outputs, strict=True))
    shapes = {name: _sizes(values[node]) for name, node in inputs.items() if name in ("input_ids", "logits_to_keep")}
    return {f"<{name}>": shape for name, shape in shapes.items()} | {
        name: _sizes(unit.nodes[node].meta["val"]) for name, node in outputs.items()
    }


def _sizes(value: torch.Tensor) -> list[Any]:
    return [size.node.expr if isinstance(size, torch.SymInt) else int(size) for size in value.shape]


def _joiner(
    unit: GraphUnit, name: str, shapes: dict[str, list[Any]]
) -> Callable[[list[torch.Tensor], int, list[int]], torch.Tensor]:
    rows, tokens = shapes["<input_ids>"]
    kept = shapes.get("<logits_to_keep>", [None])[0]
    shape = shapes[name]
    known = {symbol for size in (rows, tokens, kept) for symbol in getattr(size, "free_symbols", ())}
    if any(getattr(size, "free_symbols", set()) - known for size in shape):
        raise NotSupportedError(
            f"output {name!r} grows with what is held, and this prompt is written in pieces",
            expected="a prompt of one piece",
            do="step the prompt yourself in pieces, or remove that tap",
            shell="give a shorter prompt, or a program without that tap",
        )
    for dim, size in enumerate(shape):
        if size in (tokens, kept):
            return lambda values, batch, sizes: torch.cat(values, dim=dim)
        if size == rows * tokens:
            return lambda values, batch, sizes: _join_flat(values, dim, batch, sizes)
    # Nothing in it stands for tokens (a sum, a loss over experts): the last piece's is the newest.
    return lambda values, batch, sizes: values[-1]


def _join_flat(values: list[torch.Tensor], dim: int, batch: int, sizes: list[int]) -> torch.Tensor:
    """Rows and tokens stand in one dimension: all tokens of the first row come first."""
    apart = [value.unflatten(dim, (batch, size)) for value, size in zip(values, sizes, strict=True)]
    return torch.cat(apart, dim=dim + 1).flatten(dim, dim + 1)


__all__ = ["join"]
