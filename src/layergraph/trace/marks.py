"""Marks: while a model is traced, every module call leaves its inputs and outputs in the graph as marker nodes.

A marker takes a tensor and returns nothing, so data flow is what it would be without. After the trace the markers
are read into a :class:`~layergraph.ir.layers.LayerIndex` and removed: what a module returned, and at which place of
a tuple, is known instead of guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from layergraph.ir import spare
from layergraph.ir.layers import LayerIndex, ModuleCall

_LIBRARY = torch.library.Library("layergraph", "FRAGMENT")
_LIBRARY.define("mark(Tensor value, int number) -> ()")
_LIBRARY.impl("mark", lambda value, number: None, "CompositeExplicitAutograd")
torch.library.register_fake("layergraph::mark", lambda value, number: None, lib=_LIBRARY)
MARK = torch.ops.layergraph.mark.default
has_side_effect(MARK)  # our own op: keeps tracing from dropping nodes that return nothing


@dataclass
class _Call:
    path: str
    occurrence: int
    cls: str
    inputs: list[tuple[str, int]] = field(default_factory=list)
    outputs: list[tuple[str, int | None]] = field(default_factory=list)
    returns: str = "other"
    end: int = 0


class Recorder:
    """Records the module calls of one trace."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.open: list[_Call] = []
        self.bases: dict[str, tuple[str, ...]] = {}
        self._n_marks = 0
        self._n_ended = 0
        self._n_calls: dict[str, int] = {}

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Hook every module of ``model`` for the block. ``model`` is a private copy: nobody else calls it."""
        handles = []
        for path, module in model.named_modules(remove_duplicate=True):
            if path:
                handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def where(self) -> str:
        """Path of the innermost module that is running; where an exception came from."""
        return self.open[-1].path if self.open else ""

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            occurrence = self._n_calls.get(path, 0)
            self._n_calls[path] = occurrence + 1
            call = _Call(path, occurrence, self._class(type(module)))
            call.inputs = [(key, mark) for key, mark in self._mark((args, kwargs), skip=1) if mark is not None]
            self.calls.append(call)
            self.open.append(call)

        return hook

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self.open.pop()
        call.end = self._n_ended
        self._n_ended += 1
        if isinstance(output, torch.Tensor):
            call.returns = "tensor"
        elif isinstance(output, Mapping):
            call.returns, output = "mapping", dict(output)
        elif isinstance(output, (tuple, list)):
            call.returns = "tuple" if isinstance(output, tuple) else "list"
            output = list(output)  # a named tuple's entries have positions as well, and names only as keys
        call.outputs = self._mark(output, skip=0)
        if isinstance(output, (tuple, list)):
            # Entries that hold no tensor (sizes, empty tuples) keep their place: recorders count from either end.
            have = {key.partition(".")[0] for key, _ in call.outputs}
            call.outputs += [(str(i), None) for i in range(len(output)) if str(i) not in have]
            call.outputs.sort(key=lambda item: int(item[0].partition(".")[0]))

    def _mark(self, value: Any, skip: int) -> list[tuple[str, int | None]]:
        marks: list[tuple[str, int | None]] = []
        for key, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                number = self._n_marks
                self._n_marks += 1
                torch.ops.layergraph.mark(leaf, number)
                marks.append((_key_text(key[skip:]), number))
            elif leaf is None:
                marks.append((_key_text(key[skip:]), None))
        return marks

    def _class(self, cls: type) -> str:
        name = qualified(cls)
        if name not in self.bases:
            self.bases[name] = tuple(qualified(base) for base in cls.__mro__ if base not in (object, nn.Module))
        return name

    def collect(self, module: torch.fx.GraphModule) -> LayerIndex:
        """Read and remove the markers of a traced graph (and of graphs nested in it)."""
        nodes: dict[int, torch.fx.Node] = {}
        for child in module.modules():
            if isinstance(child, torch.fx.GraphModule):
                for node in list(child.graph.nodes):
                    if node.target is MARK:
                        if child is module:
                            nodes[node.args[1]] = node.args[0]
                        for source in node.all_input_nodes:
                            # torch's pass for autocast regions moves nodes into subgraphs and loses users on the way.
                            source.users.setdefault(node, None)
                        child.graph.erase_node(node)
                    elif node.target is torch.ops.aten._assert_tensor_metadata.default:
                        child.graph.erase_node(node)  # repeats what the interface checks, and would keep values alive
                if child is not module:
                    child.recompile()
        wanted = {
            f"{call.path}#{call.occurrence}:{key}": nodes[mark]
            for call in self.calls
            for key, mark in call.outputs
            if mark in nodes
        }
        kept = spare.collect(module.graph, wanted)
        # What only a marker kept alive goes: a graph costs nothing for what nobody asked for.
        module.graph.eliminate_dead_code()
        module.recompile()
        alive = {node.name for node in module.graph.nodes}

        def name(mark: int | None) -> str | None:
            found = nodes.get(mark) if mark is not None else None
            return found.name if found is not None and found.name in alive else None

        calls = []
        for call in self.calls:
            inputs = tuple((key, found) for key, mark in call.inputs if (found := name(mark)) is not None)
            outputs = tuple((key, name(mark)) for key, mark in call.outputs)
            calls.append(ModuleCall(call.path, call.occurrence, call.cls, inputs, outputs, call.returns, call.end))
        return LayerIndex(tuple(calls), self.bases, kept)


def qualified(cls: type) -> str:
    """``module:qualname``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _key_text(keys: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in keys)


__all__ = ["MARK", "Recorder", "qualified"]
