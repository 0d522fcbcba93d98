"""A program's tensors elsewhere: on another device, with all that it remembers of before its passes, or copied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from layergraph.errors import InputError
from layergraph.ir import exported as torch_side
from layergraph.ir.adapter import Shadow
from layergraph.ir.program import GraphUnit, Original, Program


def device_of(program: Program) -> torch.device:
    """Where the program's tensors live; a graph without any, where its values are."""
    tensor = next(iter(program.state.values()), None)
    if tensor is not None:
        return tensor.device
    values = (node.meta.get("val") for node in program.forward.graph.nodes)
    return next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))


def on_device(program: Program, device: torch.device) -> Program:
    """The program with everything on ``device``. Tensors that share memory go on sharing it.

    Raises:
        InputError: weights without data (meta device) cannot go anywhere.
    """
    if device_of(program).type == "meta" != device.type and program.state:
        raise InputError(
            "the program's weights are on the meta device and have no data to move",
            path=next(iter(program.state)),
            do="program.load_weights(folder) fills them, on the CPU",
        )
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = torch_side.to_device(tensor, device)
        return moved[id(tensor)]

    state = {name: move(tensor) for name, tensor in program.state_dict.items()}
    return program.evolve(
        graphs=_units(program.graphs, device, state),
        original=_original(program.original, device) if program.original is not None else None,
        shadow=_shadow(program.shadow, move) if program.shadow is not None else None,
    )


def _units(
    units: Mapping[str, GraphUnit], device: torch.device, state: dict[str, torch.Tensor]
) -> dict[str, GraphUnit]:
    return {
        name: replace(unit, exported=torch_side.with_state(torch_side.on_device(unit.exported, device), state))
        for name, unit in units.items()
    }


def _original(original: Original, device: torch.device) -> Original:
    """Its graphs follow when they are asked for."""
    kept = {name: torch_side.to_device(tensor, device) for name, tensor in original.kept.items()}
    return replace(original, load=lambda state: _units(original.load(state), device, state), kept=kept)


def _shadow(shadow: Shadow, move: Callable[[torch.Tensor], torch.Tensor]) -> Shadow:
    adapters = {
        name: replace(adapter, tensors={key: move(tensor) for key, tensor in adapter.tensors.items()})
        for name, adapter in shadow.adapters.items()
    }
    return replace(shadow, adapters=adapters)


def copied(program: Program, memo: dict[int, Any]) -> Program:
    """The program over copies of its weights and adapters, as ``copy.deepcopy`` makes them with ``memo``.

    Graphs, their constants, and weights kept to undo passes stay shared: nothing writes to them.
    """

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = copy.deepcopy(tensor, memo)
        return made

    state = {name: twin(tensor) for name, tensor in program.state_dict.items()}
    graphs = {
        name: replace(unit, exported=torch_side.with_state(unit.exported, state))
        for name, unit in program.graphs.items()
    }
    return program.evolve(graphs=graphs, shadow=_shadow(program.shadow, twin) if program.shadow is not None else None)


__all__ = ["copied", "device_of", "on_device"]
