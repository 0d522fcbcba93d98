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
        engine: ``eager`` runs op by op; ``inductor`` compiles the graph at the first call, once for prefill (many
            tokens) and once for decode (one), with all other sizes left open.

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
    return lambda tensors: dict(compiled(**tensors))


__all__ = ["ENGINES", "Runner", "runner"]
