"""Which conditions on sizes decide what a graph computes, among all that torch notes while tracing."""

from __future__ import annotations

import itertools
import re

import torch
from torch.export import ExportedProgram

from layergraph.ir.exported import size_conditions
from layergraph.ir.interface import holds

# A number of steps that Python code took from a size: ``for chunk in range(length // 64)``.
_COUNT = re.compile(r"\(.*(//|%).*\) == \d+")
_SIZE = re.compile(r"(\w+)\.shape\[(\d+)\]")
_TRIED = (1, 2, 3, 5, 8, 13, 16, 31, 63, 64, 65, 96, 127, 128, 129, 200, 257, 1000, 4099)


def conditions(exported: ExportedProgram) -> tuple[str, ...]:
    """Conditions without which the graph computes something else than the model, and no op says so.

    A loop over chunks of a text is unrolled when it is traced: the graph then holds for that number of chunks. torch
    notes it beside a hundred identities and assumptions (no size is 1), which every graph survives; those that hold
    for all sizes tried are dropped.
    """
    found = []
    for text in size_conditions(exported):
        if _COUNT.fullmatch(text) and not _is_identity(text):
            found.append(text)
    return tuple(found)


def _is_identity(text: str) -> bool:
    places = sorted({(name, int(dim)) for name, dim in _SIZE.findall(text)})
    if len(places) > 2:
        return False
    ranks: dict[str, int] = {}
    for name, dim in places:
        ranks[name] = max(ranks.get(name, 0), dim + 1)
    for sizes in itertools.product(_TRIED, repeat=len(places)):
        chosen = dict(zip(places, sizes, strict=True))
        shapes = {name: [chosen.get((name, dim), 1) for dim in range(rank)] for name, rank in ranks.items()}
        if not holds(text, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}):
            return False
    return True


__all__ = ["conditions"]
