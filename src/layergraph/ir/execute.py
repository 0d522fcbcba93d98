"""Run a graph as it stands, op by op, over a program's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from layergraph.ir.program import GraphUnit


def run_graph(unit: GraphUnit, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs by name, given every input by name. Inputs that the graph mutates are changed in place."""
    exported = unit.exported
    arguments: list[Any] = []
    inputs = iter(unit.interface.input_names)
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            arguments.append(tensors[next(inputs)])
        elif spec.target in exported.state_dict:
            arguments.append(exported.state_dict[spec.target])
        else:
            arguments.append(exported.constants[spec.target])
    outputs = exported.graph_module(*arguments)
    specs = exported.graph_signature.output_specs
    user = [value for spec, value in zip(specs, outputs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    return dict(zip(unit.interface.outputs, user, strict=True))


__all__ = ["run_graph"]
