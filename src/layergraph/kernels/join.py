"""Join the update after layer l with the inject before layer l + 1: one op reads h and s once and writes s' and h'.

Before::

    %s1 = shadow_update(h, s, <update of l>)
    %h1 = shadow_inject(h, %s1, <inject of l + 1>)

After::

    %both = shadow_update_inject(h, s, <update of l>, <inject of l + 1>)
    %s1 = %both[0]
    %h1 = %both[1]

Left alone, with the reason (:class:`Refusal`):

* R1: something uses the new state before everything the inject needs has been computed.
* R2: several injects read the new state; the joined op has one.
* R3: the inject reads another hidden state than the update did.
* R4: the adapters of the two layers differ in dtype.
* R5: something between the two writes in place to a tensor the pair reads, or could.

Interface and weights stay as they are. :func:`find_pairs` only reads; :func:`join_pairs` edits a graph module.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from layergraph.kernels.ops import INJECT, UPDATE, UPDATE_INJECT


@dataclasses.dataclass(frozen=True)
class Pair:
    """An update and the inject that follows it. ``before`` is the first node that must come after the joined op."""

    update: Node
    inject: Node
    before: Node

    @property
    def arguments(self) -> tuple[Node, ...]:
        """The arguments of the joined op."""
        return _arguments(self.update) + _arguments(self.inject)[2:]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An update that keeps its own op, and why. ``rule`` is one of R1 to R5."""

    update: Node
    rule: str
    reason: str


class Found(NamedTuple):
    """What :func:`find_pairs` saw; an update without any inject of its state is in neither list."""

    pairs: list[Pair]
    refusals: list[Refusal]


def find_pairs(graph: Graph) -> Found:
    """Pairs to join, in graph order, and near misses with their reasons. The graph is not changed."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    found = Found([], [])
    for update in graph.nodes:
        if update.target is not UPDATE:
            continue
        injects = [user for user in update.users if user.target is INJECT and _arguments(user)[1] is update]
        if not injects:
            continue
        verdict = _judge(update, injects, position)
        if isinstance(verdict, Pair):
            found.pairs.append(verdict)
        else:
            found.refusals.append(verdict)
    return found


def _judge(update: Node, injects: list[Node], position: dict[Node, int]) -> Pair | Refusal:
    if len(injects) > 1:
        return Refusal(update, "R2", f"{len(injects)} injects read its state: {', '.join(map(str, injects))}")
    (inject,) = injects
    update_reads, inject_reads = _arguments(update), _arguments(inject)
    if inject_reads[0] is not update_reads[0]:
        return Refusal(update, "R3", f"{inject} reads {inject_reads[0]}, the update read {update_reads[0]}")
    ours, theirs = _dtype(update_reads[2]), _dtype(inject_reads[2])
    if ours != theirs:
        return Refusal(update, "R4", f"adapters of {ours} and {theirs}")
    needed = [node for node in inject.all_input_nodes if node is not update]
    ready = max(position[node] for node in needed)
    users = [*update.users, *inject.users]
    before = min(users, key=position.__getitem__)
    if position[before] <= ready:
        late = max(needed, key=position.__getitem__)
        return Refusal(update, "R1", f"{before} uses the new state before {late}, which {inject} needs")
    writer = _writer_between(update, inject, position)
    if writer is not None:
        return Refusal(update, "R5", f"{writer} writes in place between {update} and {inject}")
    return Pair(update, inject, before)


def _arguments(node: Node) -> tuple[Node, ...]:
    """The arguments in the op's order, however they were passed."""
    rest = node.target._schema.arguments[len(node.args) :]
    return (*node.args, *(node.kwargs[argument.name] for argument in rest))


def _dtype(node: object) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _writer_between(update: Node, inject: Node, position: dict[Node, int]) -> Node | None:
    """A node between the two that may change what they read.

    Writing to a graph input that the pair does not read (a cache) is harmless; anything else could be a view of
    something it does.
    """
    read = {*update.all_input_nodes, *inject.all_input_nodes}
    for node, index in position.items():
        if not position[update] < index < position[inject] or node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if not isinstance(value, Node) or value in read or value.op != "placeholder":
                return node
    return None


def join_pairs(module: GraphModule) -> Found:
    """Join every pair of :func:`find_pairs` in place, recompile, and return what was found.

    The names of the two results, ``meta["val"]`` and the module stack stay with them, so that the output names in an
    ExportedProgram's signature still hold.
    """
    graph = module.graph
    found = find_pairs(graph)
    for pair in found.pairs:
        with graph.inserting_before(pair.before):
            joined = graph.call_function(UPDATE_INJECT, pair.arguments)
        joined.meta = dict(pair.update.meta)
        if "val" in pair.update.meta and "val" in pair.inject.meta:
            joined.meta["val"] = (pair.update.meta["val"], pair.inject.meta["val"])
        # The two nodes become the two results, so that names and metadata stay where they are.
        after = joined
        for index, node in enumerate((pair.update, pair.inject)):
            node.target, node.args, node.kwargs = operator.getitem, (joined, index), {}
            after.append(node)
            after = node
    if found.pairs:
        graph.lint()
        module.recompile()
    return found


__all__ = ["Found", "Pair", "Refusal", "find_pairs", "join_pairs"]
