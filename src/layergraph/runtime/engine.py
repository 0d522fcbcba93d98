"""What runs a graph: the graph as it stands, or Inductor's code for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram

from layergraph.errors import InputError
from layergraph.ir.execute import run_graph
from layergraph.ir.program import GraphUnit

Runner = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
ENGINES = ("eager", "inductor")

# One compiled module for each graph, however many sessions step it.
_COMPILED: weakref.WeakKeyDictionary[ExportedProgram, Any] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def runner(unit: GraphUnit, engine: str) -> Runner:
    """A function from every input of ``unit`` by name to its outputs by name.

    Args:
        engine: ``eager`` runs op by op; ``inductor`` compiles the graph at the first call. Sizes are left open but for
            ones, which torch compiles apart: a prompt of many tokens and a single one, a batch and a single row.

    Raises:
        InputError: another engine.
    """
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}", expected=" or ".join(ENGINES), do="use one of these")
    if engine == "eager":
        return partial(run_graph, unit)
    with _LOCK:
        compiled = _COMPILED.get(unit.exported)
        if compiled is None:
            compiled = torch.compile(unit.exported.module(), dynamic=True, fullgraph=True)
            _COMPILED[unit.exported] = compiled
    named = [(item.name, dim, size) for item in unit.interface.inputs for dim, size in enumerate(item.shape)]
    open_sizes = [(name, dim) for name, dim, size in named if isinstance(size, str)]

    def run(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # The same memory under tensors that are views of nothing: torch would compile for the sizes of their bases.
        given = {name: tensor.data for name, tensor in tensors.items()}
        for name, dim in open_sizes:
            # Said outright: 64 slots beside 64 features are taken for the same size, and fixed with it.
            if given[name].shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(given[name], dim)
        return dict(compiled(**given))

    return run


__all__ = ["ENGINES", "Runner", "runner"]
