"""Structural checks: a table of named rules that every program keeps after every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from layergraph.errors import StructureError
from layergraph.ir.program import GraphUnit, Program
from layergraph.ir.template import Template

Rule = Callable[[Program, GraphUnit], Iterator[str]]


def _torch_accepts(program: Program, unit: GraphUnit) -> Iterator[str]:
    """torch's own verifier: signature, placeholders, state and values agree."""
    try:
        unit.exported.validate()
        unit.graph.lint()
    except Exception as error:
        yield str(error).strip().splitlines()[0]


def _state_fits(program: Program, unit: GraphUnit) -> Iterator[str]:
    """Each parameter, buffer and constant has the shape and dtype that the graph says."""
    exported = unit.exported
    for name, target in unit.targets.items():
        held = exported.state_dict.get(target, exported.constants.get(target))
        value = unit.nodes[name].meta["val"]
        if held is None:
            yield f"{target} is not held"
        elif isinstance(held, torch.Tensor) and (tuple(held.shape), held.dtype) != (tuple(value.shape), value.dtype):
            yield f"{target} is {held.dtype}{list(held.shape)}, the graph takes {value.dtype}{list(value.shape)}"


def _interface_matches(program: Program, unit: GraphUnit) -> Iterator[str]:
    """Names of inputs and outputs are those of the graph, and the return value's leaves are its outputs."""
    signature = unit.exported.graph_signature
    if len(signature.user_inputs) != len(unit.interface.inputs):
        yield f"{len(unit.interface.inputs)} inputs named, the graph takes {len(signature.user_inputs)}"
    if len(signature.user_outputs) != len(unit.interface.outputs):
        yield f"{len(unit.interface.outputs)} outputs named, the graph returns {len(signature.user_outputs)}"
    missing = set(_leaves(unit.interface.template)) ^ set(unit.interface.outputs)
    if missing:
        yield f"outputs and return value disagree on {', '.join(sorted(missing))}"


def _leaves(template: Template) -> Iterator[str]:
    if isinstance(template, dict):
        if "$" in template:
            yield template["$"]
        for child in template.values():
            yield from _leaves(child)
    elif isinstance(template, list):
        for child in template:
            yield from _leaves(child)


def _layers_exist(program: Program, unit: GraphUnit) -> Iterator[str]:
    """Every node that a module boundary names is in the graph."""
    for call in unit.layers.calls:
        for _, node in (*call.inputs, *call.outputs):
            if node is not None and node not in unit.nodes:
                yield f"{call.path} names %{node}, which is gone"


def _nodes_have_modules(program: Program, unit: GraphUnit) -> Iterator[str]:
    """Every operation has a value and says in which module it runs."""
    for node in unit.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and len(node.target._schema.returns):
            yield f"%{node.name} has no value"


def _one_state(program: Program, unit: GraphUnit) -> Iterator[str]:
    """All graphs of a program hold the same tensors under the same names."""
    for target in unit.targets.values():
        tensors = {
            id(other.exported.state_dict[target])
            for other in program.graphs.values()
            if target in other.exported.state_dict
        }
        if len(tensors) > 1:
            yield f"{target} is another tensor in another graph"


RULES: dict[str, Rule] = {
    "torch-accepts": _torch_accepts,
    "state-fits": _state_fits,
    "interface-matches": _interface_matches,
    "layers-exist": _layers_exist,
    "nodes-have-values": _nodes_have_modules,
    "one-state": _one_state,
}


def check_structure(program: Program) -> None:
    """All rules on all graphs.

    Raises:
        StructureError: names the rule and the first fault.
    """
    for name, unit in program.graphs.items():
        for rule, check in RULES.items():
            for fault in check(program, unit):
                raise StructureError(
                    f"graph {name!r} breaks rule {rule}",
                    expected=(check.__doc__ or "").strip(),
                    found=fault,
                    do="the last pass is at fault; check what its rewrite inserts and removes",
                )


def check_sizes(before: Program, after: Program) -> None:
    """Inputs both have are as dynamic after as before.

    Raises:
        StructureError: a size became fixed, or another one.
    """
    for name, unit in after.graphs.items():
        shapes: dict[str, Any] = {item.name: item.shape for item in before[name].interface.inputs}
        for item in unit.interface.inputs:
            if shapes.get(item.name, item.shape) != item.shape:
                raise StructureError(
                    f"input {item.name!r} of graph {name!r} changed its sizes",
                    expected=str(shapes[item.name]),
                    found=str(item.shape),
                    do="use ops that keep dynamic sizes dynamic",
                )


__all__ = ["RULES", "check_sizes", "check_structure"]
