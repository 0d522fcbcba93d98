"""What a tap returns, by name: a node of the graph, or one that the trace dropped because nothing used it.

A value is written as text: ``add_9`` is a node, ``~linear_3`` a spare node (see :mod:`layergraph.ir.spare`), which is
put back into the graph when, and only when, it is tapped.
"""

from __future__ import annotations

import torch

from layergraph.ir.edit import Edit
from layergraph.ir.layers import LayerIndex, ModuleCall
from layergraph.ir.spare import SpareNode, from_data, target_of

SPARE = "~"


def call_output(layers: LayerIndex, call: ModuleCall, index: int = 0) -> tuple[str | None, bool]:
    """Entry ``index`` of what a module returned, and whether the module returned None there.

    (None, False) is a tensor that cannot be had: it needs more than plain ops, or what a pass removed.

    Raises:
        IndexError: there is no such entry.
    """
    if not call.outputs:
        return None, True
    node = call.output(index)
    if node is not None:
        return node, False
    spare = layers.spare_output(call, index)
    return (f"{SPARE}{spare}" if spare else None), spare is None


def spare_nodes(layers: LayerIndex, value: str) -> tuple[SpareNode, ...]:
    """The spare nodes that a value needs, in order; none for a node of the graph."""
    return layers.spare.needed_for(value.removeprefix(SPARE)) if value.startswith(SPARE) else ()


def revive(nodes: tuple[SpareNode, ...], edit: Edit) -> torch.fx.Node:
    """Put spare nodes back, behind all that they read, and return the last of them.

    One that an earlier tap put back is used again.
    """
    order = {node: number for number, node in enumerate(edit.graph.nodes)}
    names = {spare.name for spare in nodes}
    read = [edit.node(name) for spare in nodes for name in spare.references() if name not in names]
    # Parameters stand before all calls: nothing may be put between them.
    starts = [node for node in read if node.op != "placeholder"] + edit.graph.find_nodes(op="placeholder")
    cursor = max(starts, key=lambda node: order[node])
    made: dict[str, torch.fx.Node] = {}

    def find(name: str) -> torch.fx.Node:
        return made[name] if name in made else edit.node(name)

    for spare in nodes:
        target = target_of(spare.target)
        args = tuple(from_data(arg, find) for arg in spare.args)
        kwargs = {key: from_data(value, find) for key, value in spare.kwargs.items()}
        node = _same_call(target, args, kwargs, [find(name) for name in spare.references()])
        if node is None:
            scope = {key: (path, kind) for key, path, kind in spare.scope}
            node = edit.call(target, *args, after=cursor, scope=scope, **kwargs)
            order[node] = order[cursor]
            cursor = node
        elif order[node] > order[cursor]:
            cursor = node
        made[spare.name] = node
    return made[nodes[-1].name]


def _same_call(
    target: object, args: tuple[object, ...], kwargs: object, sources: list[torch.fx.Node]
) -> torch.fx.Node | None:
    """A node that makes this very call already. Ops that draw random numbers never do it twice alike."""
    for user in sources[0].users if sources else ():
        is_random = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
        if user.target is target and user.args == args and user.kwargs == kwargs and not is_random:
            return user
    return None


__all__ = ["SPARE", "call_output", "revive", "spare_nodes"]
