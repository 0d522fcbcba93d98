"""Edit: the only writer of graphs, signatures and state.

An edit works on a copy. :meth:`Edit.finish` checks everything and returns a new program, or raises and leaves nothing
behind. It keeps in step what torch leaves to the author of a pass (pytorch issue 108571): graph signature, state
dict, constants, example inputs, call specs, ``meta["val"]``, module paths, and our own interface, layer index and
provenance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from layergraph.errors import EditError
from layergraph.ir import exported as torch_side
from layergraph.ir.cache_geometry import CacheGeometry
from layergraph.ir.edit_signature import SignatureEdit
from layergraph.ir.program import GraphUnit, Program


class Edit(SignatureEdit):
    """Edits one graph of a program.

    Args:
        program: what to start from; it is not changed.
        graph: name of the graph to edit.
        made_by: label recorded as the maker of new nodes.

    Use it as a context manager to have errors name the pass; call :meth:`finish` for the new program.
    """

    def __enter__(self) -> Edit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, EditError) and error.pass_name is None:
            error.pass_name = self.made_by

    # What is known of the graph and its program -------------------------------------------------------------------

    def add_module_call(
        self,
        path: str,
        cls: str,
        inputs: Sequence[tuple[str, torch.fx.Node]],
        outputs: Sequence[tuple[str, torch.fx.Node]],
    ) -> None:
        """Record one more module call in the layer index, so that what a pass made can be named by path."""
        named = [tuple((key, node.name) for key, node in pairs) for pairs in (inputs, outputs)]
        returns = "tensor" if [key for key, _ in outputs] == [""] else "tuple"
        self._layers = self._layers.with_call(path, cls, named[0], named[1], returns)

    def extend_cache(self, more: CacheGeometry) -> None:
        """Record what else the graph keeps between calls, beside what it kept already; the inputs are yours to add.

        Raises:
            EditError: the graph keeps nothing.
        """
        if self._cache is None:
            raise EditError("this graph keeps nothing between calls", do="edit the cached graph, step")
        self._cache = self._cache.joined(more)

    def change_program(self, **fields: Any) -> None:
        """Set fields of the program to be (``shadow``, ``model``); graphs and weights have methods of their own."""
        self._changes.update(fields)

    # The end ------------------------------------------------------------------------------------------------------

    def finish(self) -> Program:
        """The edited program.

        Nodes that nothing uses any more are gone, and with them the parameters and buffers that only they used.

        Raises:
            EditError: the result is not a valid exported program, or sizes would have become fixed.
        """
        original = self.program[self.name].nodes
        used_before = {
            spec.target
            for spec in self._inputs
            if self._nodes[spec.arg.name].users or (spec.arg.name in original and original[spec.arg.name].users)
        }
        self._eliminate_dead(used_before)
        try:
            exported = torch_side.build(
                self._exported,
                self.graph,
                self._inputs,
                self._outputs,
                self._state,
                self._constants,
                input_names=self._interface.input_names,
                output_names=self._interface.outputs,
                examples=self._examples if self._has_examples else None,
            )
        except Exception as error:
            raise EditError(
                "the edited graph is not a valid exported program",
                pass_name=self.made_by,
                found=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                do="check what the pass's rewrite inserts and removes",
            ) from error
        alive = {node.name for node in self.graph.nodes}
        unit = GraphUnit(
            exported,
            self._interface,
            self._layers.renamed(self._renames),
            {name: made for name, made in self._provenance.items() if name in alive},
            self._cache,
        )
        aliases = {alias: kept for alias, kept in self._aliases.items() if alias in self._state}
        return self.program.evolve(
            graphs=share_state(self.program.graphs, self.name, unit),
            weights=self._weights,
            aliases=aliases,
            **self._changes,
        )

    def _eliminate_dead(self, used_before: set[str | None]) -> None:
        original = self.program[self.name].nodes
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("placeholder", "output") or node.users:
                continue
            # Attention counts as random (it has a dropout): unused already in the trace it stays, as torch leaves it;
            # unused from now on it goes.
            was_unused = node.name in original and not original[node.name].users
            if not node.is_impure(impure_random=was_unused):
                self._forget(node)
        for spec in list(self._inputs):
            node = self._nodes[spec.arg.name]
            if spec.target is None or node.users or spec.target not in used_before or spec.target in self._kept:
                continue
            self._drop_placeholder(node)
            dropped = self._state.pop(spec.target, None)
            self._constants.pop(spec.target, None)
            for alias, kept in self._aliases.items():
                # Other names of a tensor that is gone. In use under another name they have a spec of their own.
                if kept == spec.target and dropped is not None and self._state.get(alias) is dropped:
                    self._state.pop(alias)


def share_state(graphs: Mapping[str, GraphUnit], name: str, edited: GraphUnit) -> dict[str, GraphUnit]:
    """All graphs over one state dict: the edited one's, and what only the others still use."""
    if len(graphs) == 1:
        return {name: edited}
    state = dict(edited.exported.state_dict)
    for other, unit in graphs.items():
        if other != name:
            for target in unit.targets.values():
                if target in unit.exported.state_dict:
                    state.setdefault(target, unit.exported.state_dict[target])
    units = {**graphs, name: edited}
    return {
        key: dataclasses.replace(unit, exported=torch_side.with_state(unit.exported, state))
        for key, unit in units.items()
    }


__all__ = ["Edit", "share_state"]
