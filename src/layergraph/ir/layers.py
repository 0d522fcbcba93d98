"""Which nodes belong to which module, what goes in and out of it, and which blocks repeat.

Module calls are recorded while tracing (see ``trace/export.py``), not guessed from patterns of ops: every call of
every module has its input and output nodes by name. :class:`LayerIndex` is a value; Edit makes a new one.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch.fx

from layergraph.ir.spare import Spare


@dataclass(frozen=True)
class ModuleCall:
    """One call of one module.

    Attributes:
        path: module path in the model; "" is the model itself.
        occurrence: 0 for the first call of that module, 1 for the second...
        cls: class as ``module:qualname``.
        inputs: pairs of key path and node name for every tensor argument: ``"0"`` is the first positional one,
            ``"hidden_states"`` a keyword, ``"position_embeddings.1"`` inside a container.
        outputs: the same for what it returned: ``""`` is a bare tensor, ``"0"`` the first of a tuple; node name is
            None where the module returned None, or where nothing uses the value any more.
        returns: ``tensor``, ``tuple``, ``list``, ``mapping`` or ``other``.
        end: position in the order in which calls returned (hooks of transformers fire in that order).
    """

    path: str
    occurrence: int
    cls: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str | None], ...]
    returns: str
    end: int = 0

    @property
    def first_input(self) -> str | None:
        """Node of the first tensor argument: the hidden state for every block in transformers."""
        return self.inputs[0][1] if self.inputs else None

    def output(self, index: int = 0) -> str | None:
        """Node of entry ``index`` of what was returned (negatives count from the end); a bare tensor is taken whole.

        Raises:
            IndexError: there is no such entry.
        """
        key = self.output_key(index)
        return next((node for name, node in self.outputs if name == key), None)

    def output_key(self, index: int = 0) -> str:
        """Key of that entry.

        Raises:
            IndexError: there is no such entry.
        """
        if self.returns == "tensor":
            return self.outputs[0][0]
        keys = list(dict.fromkeys(key.partition(".")[0] for key, _ in self.outputs))
        if not -len(keys) <= index < len(keys):
            raise IndexError(index)
        return keys[index]

    @property
    def n_outputs(self) -> int:
        return len({key.partition(".")[0] for key, _ in self.outputs})

    def to_list(self) -> list[Any]:
        inputs, outputs = [list(pair) for pair in self.inputs], [list(pair) for pair in self.outputs]
        return [self.path, self.occurrence, self.cls, inputs, outputs, self.returns, self.end]

    @classmethod
    def from_list(cls, data: list[Any]) -> ModuleCall:
        path, occurrence, name, inputs, outputs, returns, end = data
        return cls(path, occurrence, name, tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), returns, end)


@dataclass(frozen=True)
class LayerIndex:
    """All module calls of one graph, in the order they were entered.

    Attributes:
        calls: see :class:`ModuleCall`.
        bases: for each class of a call, the classes it derives from (itself first), as ``module:qualname``.
        spare: what modules returned and nothing in the graph uses.
        returned: what the model adds to its return value when asked, where it was run to find out: key -> field ->
            for each entry the module values it is, see :mod:`layergraph.trace.hf_returned`.
    """

    calls: tuple[ModuleCall, ...] = ()
    bases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spare: Spare = field(default_factory=Spare)
    returned: Mapping[str, Mapping[str, tuple[tuple[str, ...], ...]]] = field(default_factory=dict)

    @cached_property
    def by_path(self) -> Mapping[str, tuple[ModuleCall, ...]]:
        table: dict[str, list[ModuleCall]] = defaultdict(list)
        for call in self.calls:
            table[call.path].append(call)
        return {path: tuple(calls) for path, calls in table.items()}

    @cached_property
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """Repeated blocks: path of the list -> paths of its items in order, for lists of two or more like items.

        A list of one is a stack too when its item holds other modules (a one-layer model still has layers).
        """
        items: dict[str, dict[int, str]] = defaultdict(dict)
        for path in self.by_path:
            match = re.fullmatch(r"(.+)\.(\d+)", path)
            if match:
                items[match[1]][int(match[2])] = path
        stacks = {}
        for parent, found in items.items():
            paths = tuple(found[index] for index in sorted(found))
            classes = {self.by_path[path][0].cls for path in paths}
            has_children = any(other.startswith(paths[0] + ".") for other in self.by_path)
            if len(classes) == 1 and has_children:
                stacks[parent] = paths
        return stacks

    def layer_of(self, path: str) -> str | None:
        """The innermost repeated block that ``path`` lies in, or None."""
        best = None
        for paths in self.stacks.values():
            for layer in paths:
                if (path == layer or path.startswith(layer + ".")) and (best is None or len(layer) > len(best)):
                    best = layer
        return best

    def is_a(self, call: ModuleCall, cls: str) -> bool:
        """Whether the module is an instance of ``cls`` (``module:qualname``, or a bare class name)."""
        for base in self.bases.get(call.cls, (call.cls,)):
            if base == cls or base.rpartition(":")[2].rpartition(".")[2] == cls:
                return True
        return False

    def spare_output(self, call: ModuleCall, index: int = 0) -> str | None:
        """Name of the spare node that is entry ``index`` of what ``call`` returned, if it is one.

        Raises:
            IndexError: there is no such entry.
        """
        return self.spare.outputs.get(f"{call.path}#{call.occurrence}:{call.output_key(index)}")

    def renamed(self, names: Mapping[str, str | None]) -> LayerIndex:
        """The same index where nodes were replaced (``old -> new``) or are gone (``old -> None``)."""
        if not names:
            return self
        calls = []
        for call in self.calls:
            inputs = tuple((key, _resolve(names, node)) for key, node in call.inputs)
            outputs = tuple((key, None if node is None else _resolve(names, node)) for key, node in call.outputs)
            alive = tuple((key, node) for key, node in inputs if node is not None)
            calls.append(replace(call, inputs=alive, outputs=outputs))
        return replace(self, calls=tuple(calls), spare=self.spare.renamed(names))

    def entered(self, path: str, old: str, new: str) -> LayerIndex:
        """The same index where the module at ``path``, and those inside it, are given node ``new`` for ``old``."""

        def swap(pairs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
            return tuple((key, new if node == old else node) for key, node in pairs)

        calls = []
        for call in self.calls:
            if call.path == path or call.path.startswith(path + "."):
                call = replace(call, inputs=swap(call.inputs), outputs=swap(call.outputs))
            calls.append(call)
        return replace(self, calls=tuple(calls), spare=self.spare.entered(path, old, new))

    def with_call(
        self,
        path: str,
        cls: str,
        inputs: tuple[tuple[str, str], ...],
        outputs: tuple[tuple[str, str | None], ...],
        returns: str,
    ) -> LayerIndex:
        """The same index with one more call, the last to return."""
        occurrence = len(self.by_path.get(path, ()))
        end = max((call.end for call in self.calls), default=-1) + 1
        call = ModuleCall(path, occurrence, cls, inputs, outputs, returns, end)
        return replace(self, calls=(*self.calls, call))

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": [call.to_list() for call in self.calls],
            "bases": {name: list(bases) for name, bases in self.bases.items()},
            "spare": self.spare.to_dict(),
            "returned": {
                key: {name: [list(places) for places in entries] for name, entries in fields.items()}
                for key, fields in self.returned.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerIndex:
        calls = tuple(ModuleCall.from_list(item) for item in data["calls"])
        bases = {name: tuple(bases) for name, bases in data["bases"].items()}
        returned = {
            key: {name: tuple(map(tuple, entries)) for name, entries in fields.items()}
            for key, fields in data.get("returned", {}).items()
        }
        return cls(calls, bases, Spare.from_dict(data.get("spare", {})), returned)


def _resolve(names: Mapping[str, str | None], node: str) -> str | None:
    seen: str | None = node
    while seen is not None and seen in names:
        seen = names[seen]
    return seen


def module_path(node: torch.fx.Node) -> str:
    """Path of the innermost module whose forward made the node; "" is the model itself."""
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0].partition("@")[0] if stack else ""


def path_pattern(glob: str) -> re.Pattern[str]:
    """A module path or glob as a regular expression: ``*`` within one name, ``**`` across dots, ``?``, ``[0-3]``."""
    text = fnmatch.translate(glob.replace("**", "\0").replace("*", "\1"))
    body = text.removeprefix("(?s:").removesuffix(")\\Z").removesuffix(")\\z")
    return re.compile(body.replace("\\\0", ".*").replace("\0", ".*").replace("\\\1", r"[^.]*").replace("\1", r"[^.]*"))


def span(graph: torch.fx.Graph, path: str) -> list[torch.fx.Node]:
    """The nodes made inside the module at ``path``, in graph order."""
    return [node for node in graph.nodes if _inside(node, path)]


def _inside(node: torch.fx.Node, path: str) -> bool:
    stack = node.meta.get("nn_module_stack")
    return bool(stack) and any(entry[0].partition("@")[0] == path for entry in stack.values())


def user_nodes(nodes: Iterable[torch.fx.Node]) -> Iterator[torch.fx.Node]:
    """Nodes outside ``nodes`` that use one of them, each once."""
    inside = set(nodes)
    seen: set[torch.fx.Node] = set()
    for node in inside:
        for user in node.users:
            if user not in inside and user not in seen:
                seen.add(user)
                yield user


__all__ = ["LayerIndex", "ModuleCall", "module_path", "path_pattern", "span", "user_nodes"]
