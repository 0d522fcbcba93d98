"""Run a graph as it stands, op by op, over a program's tensors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from layergraph.errors import InputError
from layergraph.ir.program import GraphUnit


def run_graph(unit: GraphUnit, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs by name, given every input by name. Inputs that the graph mutates are changed in place.

    Raises:
        InputError: an op fails, and the sizes given break a condition under which the graph was traced.
    """
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
    try:
        outputs = exported.graph_module(*arguments)
    except (RuntimeError, ValueError, IndexError) as error:
        broken = _broken_conditions(unit, tensors)
        if not broken:
            raise
        raise InputError(
            "the graph does not take inputs of these sizes",
            expected="; ".join(broken[:2]),
            found=", ".join(f"{name} {list(tensor.shape)}" for name, tensor in list(tensors.items())[:4]),
            do="use sizes that meet the condition, or trace again with example_inputs of such sizes",
        ) from error
    specs = exported.graph_signature.output_specs
    user = [value for spec, value in zip(specs, outputs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    return dict(zip(unit.interface.outputs, user, strict=True))


def _broken_conditions(unit: GraphUnit, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Conditions on sizes that torch recorded with the graph and that these inputs do not meet, as people read them.

    Asked for only when an op has failed: torch also records what it merely assumed, such as sizes other than 1.
    """
    broken = []
    for condition in unit.exported._guards_code:
        text = re.sub(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", r"\1.shape[\2]", condition)
        sizes = re.sub(r"(\w+)\.shape\[(\d+)\]", lambda m: str(tensors[m[1]].shape[int(m[2])]), text)
        if "**" not in sizes and re.fullmatch(r"[\d\s()+\-*/%<>=!]+", sizes):
            with contextlib.suppress(ZeroDivisionError, SyntaxError):
                if not eval(sizes, {"__builtins__": {}}):  # only digits and operators, as the pattern above says
                    broken.append(text)
    return broken


__all__ = ["run_graph"]
