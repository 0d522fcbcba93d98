"""tap-outputs: intermediate values become named outputs of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from layergraph.errors import InputError, NotFoundError, OutOfRangeError
from layergraph.ir.edit import Edit
from layergraph.ir.layers import ModuleCall, module_path
from layergraph.ir.printing import size_names
from layergraph.ir.program import GraphUnit, Program
from layergraph.ir.spare import SpareNode
from layergraph.ir.template import is_occupied, reserved_names
from layergraph.passes.base import Findings, Pass, Promise, Refusal, Site, freeze
from layergraph.passes.tap_faults import no_such_op, nothing_matches, nothing_recorded, refuse, refuse_between
from layergraph.passes.tap_options import check_options, is_of_nodes, plain_what, what_as_data
from layergraph.passes.tap_reduce import check_reduction, reduced
from layergraph.passes.tap_registry import record, registry_keys
from layergraph.passes.tap_targets import find_calls, find_ops
from layergraph.passes.tap_values import Recorded, call_output, revive, spare_nodes


@dataclass(frozen=True)
class _Target:
    """One value to return: what it is, flat output name, place in the return value, how to have it back.

    The last one of ``only=True`` names all outputs that stay.
    """

    value: str
    name: str
    place: tuple[str | int, ...]
    length: int
    path: str
    spare: tuple[SpareNode, ...] = ()
    keep_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class TapOutputs(Pass):
    """Return intermediate values, chosen after the trace, without hooks.

    Before::

        out  logits: f32[batch,sequence,512] = ^linear_14

    After ``TapOutputs("hidden_states", entries=[1])``::

        out  logits: f32[batch,sequence,512] = ^linear_14
        out  hidden_states.1: f32[batch,sequence,64] = ^add_9

    Nothing is computed twice and no node is added, unless a reduction or a cast is asked for, or the value is one that
    nothing else needs (router logits beside the experts chosen by them): the trace keeps such values beside the graph,
    where they cost nothing, and a tap puts back the nodes that compute them. Taps are named as the model's own return
    value names them (``out.hidden_states[1]``), or by module path (``out["model.layers.3.mlp"]``).

    Left alone, with the reason in the report:

    * R1: a recorded module returned None there (for keys other than hidden_states, as transformers skips it);
    * R2: the value is part of no graph: nothing used it, and it needs more than plain ops to compute;
    * R3: the graph returns it already under that name.

    Args:
        what: a key of the model's ``_can_record_outputs`` (``"hidden_states"``), a module path, a glob
            (``"model.layers.*.mlp"``; ``**`` crosses dots), a compiled regex or ``"re:..."``, a module class or class
            name, an op as ``"model.layers.0::softmax#0"``, a node as ``"%add_9"``, a list of any of these but keys
            (in its order, each value once), or a predicate on the nodes that compute something (a saved program holds
            those it chose).
        entries: which entries of the key's tuple, counted as transformers counts them (entry 0 of hidden_states is
            what enters the first block); negatives from the end; True or None is all, False none.
        layers: which blocks instead, meaning what each returns itself (before a final norm).
        index: which output of a module, the first by default, or which input for ``at="input"``; negatives from the
            end.
        at: ``"output"`` or ``"input"`` of the module.
        reduce: ``"last"`` (the last token), ``"mean"`` (over tokens), ``"norm"`` (L2 over features) or
            ``("topk", k)`` (values and indices over features), computed in the graph.
        dtype: cast the tap (``torch.float16`` or ``"float16"``).
        only: return nothing but taps; everything behind the last one goes, weights included.
        name: return path taps as one tuple of that name.
    """

    pass_name: ClassVar[str] = "tap-outputs"
    promise: ClassVar[Promise] = "additive"

    what: Any = "hidden_states"
    entries: Any = None
    layers: Any = None
    index: int | None = None
    at: str = "output"
    reduce: Any = None
    dtype: Any = None
    only: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        for field in ("entries", "layers", "reduce"):
            object.__setattr__(self, field, freeze(getattr(self, field)))
        if isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        object.__setattr__(self, "what", plain_what(self.what))
        check_options(self)

    def promises(self) -> Promise:
        return "defined" if self.only else "additive"

    def keeps(self, program: Program, graph: str) -> bool:
        """Without logits nothing generates: ``only=True`` drops the cached graph, whose caches would keep weights."""
        return not (self.only and program[graph].cache is not None)

    def reference(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """``only=True``: what was returned before is gone; what taps return is checked against module calls."""
        return {}

    def options(self) -> dict[str, Any]:
        return super().options() | {"what": what_as_data(self.what)}

    def resolved_options(self, findings: Findings) -> dict[str, Any]:
        options = self.options()
        if callable(self.what) and not isinstance(self.what, type):
            chosen = [f"%{site.nodes[0]}" for site in findings.sites if site.nodes]
            options["what"] = list(dict.fromkeys(chosen))
        return options

    def find(self, program: Program, graph: str) -> Findings:
        unit = program[graph]
        refusals: list[Refusal] = []
        if isinstance(self.what, str) and self.what in registry_keys(program.model, unit.layers):
            targets = list(self._from_registry(program, unit, refusals))
        else:
            targets = list(self._from_graph(program, unit, refusals))
        sites = []
        for target in targets:
            if target.name in unit.interface.outputs and not self.only:
                found = f"{target.name} is returned already"
                refusals.append(Refusal(target.path, "R3", "an output of a new name", found))
                continue
            if target.value in unit.nodes:
                check_reduction(unit.nodes[target.value], target.path, self.reduce, self.dtype, size_names(unit))
            target = replace(target, spare=spare_nodes(unit.layers, target.value))
            nodes = () if target.spare else (target.value,)
            detail = f"returned as {target.name}" + (", which nothing else needs" if target.spare else "")
            sites.append(Site(target.path, nodes, detail, target))
        if self.only and sites:
            last, names = sites[-1], tuple(site.data.name for site in sites)
            detail = f"{last.detail}; everything but taps goes"
            sites[-1] = replace(last, detail=detail, data=replace(last.data, keep_only=names))
        return Findings(tuple(sites), tuple(refusals))

    def rewrite(self, site: Site, edit: Edit) -> None:
        target: _Target = site.data
        tapped = revive(target.spare, edit) if target.spare else edit.node(target.value)
        for suffix, node in reduced(tapped, self.reduce, self.dtype, edit):
            if target.name + suffix not in edit.output_names:
                place = (target.name + suffix,) if suffix else target.place
                edit.add_output(target.name + suffix, node, place, target.length)
        if target.keep_only:
            _keep_only(target.keep_only, edit)

    # Choosing -----------------------------------------------------------------------------------------------------

    def _from_registry(self, program: Program, unit: GraphUnit, refusals: list[Refusal]) -> Iterator[_Target]:
        self._refuse_unread("a key of the model", ("index", None), ("name", None))
        tuples = record(unit, program.model, self.what)
        if not any(item.key == self.what and item.entries for item in tuples):
            raise nothing_recorded(self.what, tuples, program, unit)
        for item in tuples:
            count = len(item.entries)
            if item.n_none:
                refusals.append(Refusal(item.collector, "R1", "a tensor", f"None from {item.n_none} modules"))
            main = item.key == self.what
            for position in self._selected(item, count) if main else range(count):
                entry = item.entries[position]
                value = entry.own if self.layers is not None else entry.value
                if self.at == "input":
                    value = entry.given
                if value is None:
                    refusals.append(refuse_between(entry) if entry.is_between else refuse(entry.path, is_none=False))
                    continue
                name = ".".join([*item.field, str(position)])
                yield _Target(value, name, (*item.field, position), count, entry.path)

    def _refuse_unread(self, what: str, *options: tuple[str, Any]) -> None:
        """Refuse options that do not apply to ``what``: ignored, they would mislead."""
        for option, default in options:
            if getattr(self, option) != default:
                raise InputError(
                    f"{option} says nothing about {what}",
                    pass_name="tap-outputs",
                    found=f"{option}={getattr(self, option)!r}",
                    do=f"leave {option} out, or tap a module path",
                )

    def _selected(self, item: Recorded, count: int) -> list[int]:
        """Positions in the tuple, in order."""
        if self.layers is not None:
            blocks = [position for position, entry in enumerate(item.entries) if not entry.is_initial]
            return [blocks[index] for index in _indices(self.layers, len(blocks), "layers")]
        return _indices(self.entries, count, "entries")

    def _from_graph(self, program: Program, unit: GraphUnit, refusals: list[Refusal]) -> Iterator[_Target]:
        if self.name is not None:
            _check_name(self.name, unit)
        found = list(self._candidates(program, unit, refusals))
        subset, option = (self.entries, "entries") if self.layers is None else (self.layers, "layers")
        chosen = [found[index] for index in _indices(subset, len(found), option)] if found else []
        for position, (path, name, node) in enumerate(chosen):
            if self.name is not None:
                yield _Target(node, f"{self.name}.{position}", (self.name, position), len(chosen), path)
            else:
                if name not in unit.interface.outputs:
                    _check_name(name, unit)
                yield _Target(node, name, (name,), 0, path)

    def _candidates(self, program: Program, unit: GraphUnit, refusals: list[Refusal]) -> Iterator[tuple[str, str, str]]:
        """Path, name and value of all that is asked for, each once, in the order of asking."""
        seen: set[str] = set()
        for item in self.what if isinstance(self.what, tuple) else (self.what,):
            left: list[Refusal] = []
            for candidate in self._matching(item, program, unit, left):
                if candidate[1] not in seen:
                    seen.add(candidate[1])
                    yield candidate
            refusals += [refusal for refusal in left if refusal not in refusals]

    def _matching(
        self, what: Any, program: Program, unit: GraphUnit, refusals: list[Refusal]
    ) -> Iterator[tuple[str, str, str]]:
        if is_of_nodes(what):
            self._refuse_unread("nodes", ("index", None), ("at", "output"))
        if isinstance(what, str) and what.startswith("%"):
            yield from _node_targets([_node_named(unit, what.removeprefix("%"))])
        elif isinstance(what, str) and "::" in what:
            nodes = find_ops(unit, what)
            if not nodes:
                raise no_such_op(what, program, unit)
            yield from _node_targets(nodes)
        elif callable(what) and not isinstance(what, type):
            nodes = [node for node in unit.graph.nodes if node.op == "call_function" and _is_chosen(what, node)]
            if not nodes:
                raise nothing_matches("the predicate", program, unit)
            yield from _node_targets(nodes)
        else:
            calls = find_calls(unit.layers, what)
            if not calls:
                raise nothing_matches(what, program, unit)
            for call in calls:
                node, is_none = _call_value(unit, call, self.at, self.index)
                if node is None:
                    refusals.append(refuse(call.path, is_none))
                    continue
                name = call.path + (f"#{call.occurrence}" if call.occurrence else "")
                yield call.path, name + (".input" if self.at == "input" else ""), node


def _indices(selection: Any, count: int, option: str) -> list[int]:
    """A selection as positions in order; out of range is an error that names the range."""
    if selection is None or selection is True:
        return list(range(count))
    if selection is False:
        return []
    chosen = set()
    for index in (selection,) if isinstance(selection, int) else selection:
        if not -count <= index < count:
            raise OutOfRangeError(
                f"{option} has {index}, which is out of range",
                pass_name="tap-outputs",
                expected=f"{-count} to {count - 1}" if count else "nothing: there is no entry",
                found=str(index),
                do=f"choose among the {count} there are",
            )
        chosen.add(index % count)
    return sorted(chosen)


def _check_name(name: str, unit: GraphUnit) -> None:
    """Refuse a name under which something else is found in what the graph returns."""
    is_returned = name in unit.interface.outputs or is_occupied(unit.interface.template, (name,))
    if is_returned or name in reserved_names(unit.interface.template):
        raise InputError(
            f"the graph returns {name!r} already" if is_returned else f"{name!r} is a name that return values use",
            pass_name="tap-outputs",
            do="choose another name=",
        )


def _is_chosen(predicate: Callable[[torch.fx.Node], Any], node: torch.fx.Node) -> bool:
    try:
        return bool(predicate(node))
    except Exception as error:
        raise InputError(
            "the predicate fails",
            pass_name="tap-outputs",
            path=module_path(node),
            node=node.name,
            found=f"{type(error).__name__}: {error}"[:200],
            do="have it return True or False for every node; node.meta['val'] may be a tensor, a size or a tuple",
        ) from error


def _node_named(unit: GraphUnit, name: str) -> torch.fx.Node:
    if name not in unit.nodes:
        raise NotFoundError(
            f"no node %{name}",
            pass_name="tap-outputs",
            do="program.print() shows the nodes",
            shell="layergraph dump shows the nodes",
        )
    return unit.nodes[name]


def _node_targets(nodes: list[torch.fx.Node]) -> Iterator[tuple[str, str, str]]:
    for node in nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise InputError(
                "a tap returns tensors, and this node makes none",
                pass_name="tap-outputs",
                path=module_path(node),
                node=node.name,
                found="several values" if isinstance(value, (tuple, list)) else type(value).__name__,
                do="choose the getitem nodes behind it" if isinstance(value, (tuple, list)) else "choose other nodes",
            )
        yield module_path(node), f"%{node.name}", node.name


def _call_value(unit: GraphUnit, call: ModuleCall, at: str, index: int | None) -> tuple[str | None, bool]:
    """The chosen input or output of a module call, and whether that is None."""
    count = len(call.inputs) if at == "input" else call.n_outputs
    position = 0 if index is None else index
    if at == "output" and call.returns == "tensor":
        return call_output(unit.layers, call)
    if count == 0:
        return None, True
    if not -count <= position < count:
        raise OutOfRangeError(
            f"index {position} is out of range",
            pass_name="tap-outputs",
            path=call.path,
            expected=f"{-count} to {count - 1}",
            do="choose another index",
        )
    return (call.inputs[position][1], False) if at == "input" else call_output(unit.layers, call, position)


def _keep_only(taps: tuple[str, ...], edit: Edit) -> None:
    for name in list(edit.output_names):
        if not any(name == tap or name.startswith(f"{tap}.") for tap in taps):
            edit.remove_output(name)


Predicate = Callable[[torch.fx.Node], bool]

__all__ = ["Predicate", "TapOutputs"]
