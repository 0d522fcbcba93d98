"""Run a graph as it stands, op by op, over a program's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from layergraph.errors import InputError
from layergraph.ir import exported as torch_side
from layergraph.ir.interface import holds, wrong_sizes
from layergraph.ir.program import GraphUnit


def run_graph(unit: GraphUnit, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs by name, given every input by name. Inputs that the graph mutates are changed in place.

    Raises:
        InputError: an op fails, and the sizes given break a condition under which the graph was traced, or an input
            is on another device than the weights.
    """
    exported = unit.exported
    if next((tensor.is_meta for tensor in exported.state_dict.values()), False):
        _check_devices(unit, tensors)  # torch's meta kernels take inputs from anywhere, and answer without data
    arguments: list[Any] = []
    inputs = iter(unit.interface.input_names)
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            arguments.append(tensors[next(inputs)])
        elif spec.target in exported.state_dict:
            arguments.append(exported.state_dict[spec.target])
        else:
            arguments.append(exported.constants[spec.target])
    try:
        outputs = exported.graph_module(*arguments)
    except (RuntimeError, ValueError, IndexError) as error:
        # torch also records what it merely assumed, such as sizes other than 1: asked only when an op has failed.
        broken = [text for text in torch_side.size_conditions(exported) if not holds(text, tensors)]
        if broken:
            raise wrong_sizes(broken, tensors) from error
        _check_devices(unit, tensors)
        raise
    specs = exported.graph_signature.output_specs
    user = [value for spec, value in zip(specs, outputs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    return dict(zip(unit.interface.outputs, user, strict=True))


def _check_devices(unit: GraphUnit, tensors: Mapping[str, torch.Tensor]) -> None:
    home = next((tensor.device for tensor in unit.exported.state_dict.values()), None)
    for name, tensor in tensors.items():
        if home is not None and tensor.device != home:
            do = "program.load_weights(folder) fills its weights"
            if home.type != "meta":
                do = f'move it: .to("{home}"); or program.to("{tensor.device}")'
            raise InputError(
                f"input {name!r} is on another device than the program",
                expected=str(home),
                found=str(tensor.device),
                do=do,
            )


__all__ = ["run_graph"]
