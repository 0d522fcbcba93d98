"""What a tap returns, by name: a node of the graph, or one that the trace dropped because nothing used it.

A value is written as text: ``add_9`` is a node, ``~linear_3`` a spare node (see :mod:`layergraph.ir.spare`), which is
put back into the graph when, and only when, it is tapped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layergraph.ir.edit import Edit
from layergraph.ir.layers import LayerIndex, ModuleCall
from layergraph.ir.spare import SpareNode, from_data, target_of

SPARE = "~"


@dataclass(frozen=True)
class Entry:
    """One entry of the tuple that a registry key gives.

    Attributes:
        path: the module it was recorded on.
        value: what it is, see :mod:`layergraph.passes.tap_values`; None where it cannot be had.
        own: the module's own value where the entry was replaced by the last hidden state, else the same.
        given: what went into the module.
        is_initial: whether it is the input of the first recorded module.
        is_between: whether code between modules makes it, so that it is no value of any module.
    """

    path: str
    value: str | None
    own: str | None
    given: str | None
    is_initial: bool = False
    is_between: bool = False


@dataclass(frozen=True)
class Recorded:
    """All entries of one key for one collecting model, and the field of the return value they stand in.

    ``n_none`` modules returned None there.
    """

    key: str
    collector: str
    field: tuple[str, ...]
    entries: tuple[Entry, ...]
    n_none: int


def call_output(
    layers: LayerIndex, call: ModuleCall, index: int = 0, *, key: str | None = None
) -> tuple[str | None, bool]:
    """Entry ``index`` (or the one at ``key``) of what a module returned, and whether the module returned None there.

    (None, False) is a tensor that cannot be had: it needs more than plain ops, or what a pass removed.

    Raises:
        IndexError: there is no such entry.
    """
    if not call.outputs:
        return None, True
    key = call.output_key(index) if key is None else key
    node = next((node for name, node in call.outputs if name == key), None)
    if node is not None:
        return node, False
    spare = layers.spare.outputs.get(f"{call.path}#{call.occurrence}:{key}")
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


__all__ = ["SPARE", "Entry", "Recorded", "call_output", "revive", "spare_nodes"]
