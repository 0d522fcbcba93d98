"""Values that a model computed and nothing used: kept as data beside the graph, so that a tap can have them.

A trace drops what nobody reads (router logits beside the experts chosen by them, weights of a pruned head). That is
right for the graph, which pays for nothing that was not asked for, and wrong for a tap that asks later. So nodes on
the way to such an output of a module are remembered here as plain data, and put back on demand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx

from layergraph.errors import FormatError
from layergraph.ir.graph_check import is_operator

Refs = Mapping[str, "str | None"]


@dataclass(frozen=True)
class SpareNode:
    """One node that is not in the graph.

    Attributes:
        name: its own; other spare nodes refer to it by that.
        target: the op as text.
        args, kwargs: JSON data; ``{"%": name}`` is a node, spare or of the graph.
        scope: the ``nn_module_stack``: (key, path, class), outermost first.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    scope: tuple[tuple[str, str, str], ...]

    def references(self) -> list[str]:
        return list(_references([list(self.args), dict(self.kwargs)]))

    def with_references(self, names: Refs) -> SpareNode:
        args, kwargs = _renamed(list(self.args), names), _renamed(dict(self.kwargs), names)
        return replace(self, args=tuple(args), kwargs=kwargs)

    def is_inside(self, path: str) -> bool:
        return any(entry[1].partition("@")[0] == path for entry in self.scope)

    def to_list(self) -> list[Any]:
        return [self.name, self.target, list(self.args), dict(self.kwargs), [list(entry) for entry in self.scope]]

    @classmethod
    def from_list(cls, data: list[Any]) -> SpareNode:
        name, target, args, kwargs, scope = data
        return cls(name, target, tuple(args), kwargs, tuple((key, path, kind) for key, path, kind in scope))


@dataclass(frozen=True)
class Spare:
    """All spare nodes of one graph, in order, and which outputs of module calls they are.

    Attributes:
        nodes: by name, each after those it refers to.
        outputs: ``path#occurrence:key`` of a module call's output -> name of its spare node; "" where the value was
            a tensor but needs more than plain ops, or something that is gone since.
    """

    nodes: Mapping[str, SpareNode] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    def needed_for(self, name: str) -> tuple[SpareNode, ...]:
        """The spare nodes that compute ``name``, in order, itself last."""
        wanted = {name}
        for node in reversed(tuple(self.nodes.values())):
            if node.name in wanted:
                wanted.update(node.references())
        return tuple(node for node in self.nodes.values() if node.name in wanted)

    def renamed(self, names: Refs) -> Spare:
        """The same where nodes of the graph were replaced or are gone (and with them what is computed from them)."""
        if not self.nodes or not names:
            return self
        return self._changed(lambda node: node.with_references(names))

    def entered(self, path: str, old: str, new: str) -> Spare:
        """The same where the module at ``path`` is given node ``new`` for ``old``."""
        return self._changed(lambda node: node.with_references({old: new}) if node.is_inside(path) else node)

    def _changed(self, change: Callable[[SpareNode], SpareNode]) -> Spare:
        kept: dict[str, SpareNode] = {}
        for node in self.nodes.values():
            changed = change(node)
            alive = [
                name for name in changed.references() if name is not None and (name not in self.nodes or name in kept)
            ]
            if len(alive) == len(changed.references()):
                kept[node.name] = changed
        return Spare(kept, {key: name if name in kept else "" for key, name in self.outputs.items()})

    def to_dict(self) -> dict[str, Any]:
        return {"nodes": [node.to_list() for node in self.nodes.values()], "outputs": dict(self.outputs)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spare:
        nodes = [SpareNode.from_list(item) for item in data.get("nodes", ())]
        return cls({node.name: node for node in nodes}, dict(data.get("outputs", {})))


def collect(graph: torch.fx.Graph, wanted: Mapping[str, torch.fx.Node]) -> Spare:
    """What computes the ``wanted`` nodes (output key -> node) and is not needed for anything else in ``graph``.

    Values that need something that is no plain op call (a nested graph) are left out.
    """
    live: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        is_kept = node.op in ("placeholder", "output", "get_attr") or node.is_impure()
        if is_kept or any(user in live for user in node.users):
            live.add(node)
    needed: set[torch.fx.Node] = {node for node in wanted.values() if node not in live}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(source for source in node.all_input_nodes if source not in live)
    nodes: dict[str, SpareNode] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes if node in needed else ()
        if node in needed and all(
            (source in live and source.op != "get_attr") or source.name in nodes for source in sources
        ):
            made = _encode(node)
            if made is not None:
                nodes[node.name] = made
    lost = {key: node.name if node.name in nodes else "" for key, node in wanted.items() if node not in live}
    return Spare(nodes, lost)


def _encode(node: torch.fx.Node) -> SpareNode | None:
    target = _target_text(node.target)
    try:
        args, kwargs = _to_data(list(node.args)), _to_data(dict(node.kwargs))
    except TypeError:
        return None
    stack = node.meta.get("nn_module_stack") or {}
    scope = tuple((key, path, str(kind)) for key, (path, kind) in stack.items())
    return SpareNode(node.name, target, tuple(args), kwargs, scope) if target is not None else None


def _target_text(target: Any) -> str | None:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", "")
    return f"operator.{name}" if getattr(operator, name, None) is target else None


def target_of(text: str) -> Callable[..., Any]:
    """The op that a spare node calls: one of torch's registered ops, or arithmetic of the ``operator`` module.

    Raises:
        FormatError: neither; the text may come from a folder.
    """
    space, _, rest = text.partition(".")
    if not is_operator(f"_operator.{rest}" if space == "operator" else f"torch.ops.{text}"):
        raise FormatError(
            "a value kept beside the graph is computed by an op that is not registered with torch",
            found=repr(text)[:200],
            do="import the library that registers the op; or do not use this folder, and save again from the model",
            shell="name the library that registers the op: --import MODULE; or do not use this folder",
        )
    found: Any = operator if space == "operator" else getattr(torch.ops, space)
    for part in rest.split("."):
        found = getattr(found, part)
    return found


_KINDS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def _to_data(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"%": value.name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_to_data(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _to_data(item) for key, item in value.items()}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if type(value) in _KINDS:
        return {_KINDS[type(value)]: str(value).removeprefix("torch.")}
    raise TypeError(type(value).__name__)


def from_data(value: Any, nodes: Callable[[str], torch.fx.Node]) -> Any:
    """Arguments as the op takes them; ``nodes`` gives a node by name."""
    if isinstance(value, list):
        return [from_data(item, nodes) for item in value]
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, text),) = value.items()
        if kind == "%":
            return nodes(text)
        if kind == "device":
            return torch.device(text)
        found = getattr(torch, str(text), None)
        if type(found) not in _KINDS:
            raise FormatError(
                "a value kept beside the graph has an argument of an unknown kind",
                found=repr(value)[:200],
                do="copy the folder again, or save again",
            )
        return found
    return value


def _references(value: Any) -> Iterable[str]:
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, Mapping):
        if "%" in value:
            yield value["%"]
        else:
            for item in value.values():
                yield from _references(item)


def _renamed(value: Any, names: Refs) -> Any:
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if isinstance(value, Mapping):
        if "%" in value:
            found = value["%"]
            while found is not None and found in names and names[found] != found:
                found = names[found]
            return {"%": found}
        return {key: _renamed(item, names) for key, item in value.items()}
    return value


__all__ = ["Spare", "SpareNode", "collect", "from_data", "target_of"]
