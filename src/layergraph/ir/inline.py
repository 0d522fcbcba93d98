"""Splice one graph into another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.node import map_arg

from layergraph.errors import EditError
from layergraph.ir.edit import Edit
from layergraph.ir.exported import op_name
from layergraph.ir.program import GraphUnit

# Checks of sizes that tracing leaves behind: the host graph has its own.
_CHECKS = (
    "_assert_scalar",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_tensor_metadata",
)


def inline(
    edit: Edit,
    unit: GraphUnit,
    inputs: Mapping[str, torch.fx.Node],
    *,
    state: Mapping[str, torch.fx.Node] | None = None,
    before: torch.fx.Node,
    prefix: str,
) -> dict[str, torch.fx.Node]:
    """Copy all of ``unit`` into the graph being edited, and return its outputs by name.

    Every op is computed anew on the host's fake tensors, so sizes become the host's symbols. A size that the host
    leaves open and the spliced graph would fix is an error.

    Args:
        inputs: a node of the host for each user input of ``unit``.
        state: nodes that stand for parameters and buffers of ``unit``, by name in its state dict. The others become
            state of the host: parameters and persistent buffers as such, constants as non-persistent buffers.
        before: where, in the host.
        prefix: module path that everything copied lies under.

    Raises:
        EditError: an input is not bound, a size would become fixed, the graph holds what cannot be copied, or it holds
            for some sizes of what is no input of the host.
    """
    given = dict(state or {})
    exported = unit.exported
    targets = unit.targets
    names = dict(zip(map(str, exported.graph_signature.user_inputs), unit.interface.input_names, strict=True))
    made: dict[torch.fx.Node, Any] = {}
    for node in exported.graph.find_nodes(op="placeholder", sort=True):
        if node.name in names:
            name = names[node.name]
            if name not in inputs:
                raise EditError(
                    f"input {name!r} of the spliced graph is not bound",
                    pass_name=edit.made_by,
                    expected=", ".join(names.values()),
                    do="give a node of the host for it",
                )
            made[node] = inputs[name]
            continue
        target = targets[node.name]
        if target not in given and node.users:
            given[target] = _add_state(edit, unit, target, f"{prefix}.{target}")
        made[node] = given.get(target)
    for condition in unit.interface.conditions:
        edit.add_condition(condition, inputs)
    _copy(edit, exported.graph_module, made, before, prefix)
    output = next(iter(reversed(exported.graph.nodes)))
    flat = output.args[0][-len(unit.interface.outputs) :]
    return {name: made[node] for name, node in zip(unit.interface.outputs, flat, strict=True)}


def _add_state(edit: Edit, unit: GraphUnit, target: str, name: str) -> torch.fx.Node:
    exported = unit.exported
    if target not in exported.state_dict:
        return edit.add_buffer(name, exported.constants[target], persistent=False)
    tensor = exported.state_dict[target]
    return edit.add_parameter(name, tensor) if isinstance(tensor, torch.nn.Parameter) else edit.add_buffer(name, tensor)


def _copy(
    edit: Edit,
    module: torch.fx.GraphModule,
    made: dict[torch.fx.Node, Any],
    before: torch.fx.Node,
    prefix: str,
) -> None:
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":
            made[node] = getattr(module, str(node.target))
            continue
        if op_name(node.target).rpartition("::")[2].split(".")[0] in _CHECKS or "_assert" in op_name(node.target):
            continue
        args = map_arg(node.args, lambda item: made[item])
        kwargs = map_arg(node.kwargs, lambda item: made[item])
        if op_name(node.target) == "wrap_with_set_grad_enabled":
            # Rotary tables under no_grad: nothing in there requires grad, so the body can stand in the open.
            made[node] = _copy_body(edit, args[1], args[2:], before, prefix)
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise EditError(
                f"a graph with {op_name(node.target)} cannot be spliced",
                pass_name=edit.made_by,
                node=node.name,
                do="trace that module without control flow",
            )
        if op_name(node.target) == "getitem" and isinstance(args[0], tuple):
            made[node] = args[0][args[1]]
            continue
        scope = {
            key: (f"{prefix}.{path}" if path else prefix, cls)
            for key, (path, cls) in node.meta.get("nn_module_stack", {}).items()
        }
        made[node] = edit.call(node.target, *args, before=before, scope=scope, **kwargs)


def _copy_body(edit: Edit, body: Any, args: Any, before: torch.fx.Node, prefix: str) -> tuple[Any, ...]:
    made: dict[torch.fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder", sort=True), args, strict=True))
    _copy(edit, body, made, before, prefix)
    output = next(iter(reversed(body.graph.nodes)))
    return tuple(map_arg(output.args[0], lambda item: made[item]))


__all__ = ["inline"]
