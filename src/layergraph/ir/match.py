"""Patterns of ops: written as expressions, matched backwards from their last node, within one module if wanted.

    GATED = Op(ATEN.mul, Op(ATEN.silu, Op(ATEN.linear, Value("x"), Weight("gate"), name="gate_proj")),
                         Op(ATEN.linear, Value("x"), Weight("up"), name="up_proj"))
    for match in find(program[graph], GATED, inside="model.layers.*.mlp"):
        match["x"], match["gate"], match.root, match.path

An argument that a pattern does not name may be anything. Arguments are read through the op's schema, so it makes no
difference whether a graph gives them by position, by keyword, or leaves a default out.

torch has matchers of its own (``torch.fx.passes.utils.matcher_utils``, Inductor's): they match an example graph
literally, defaults and all, or bring a compiler along; neither knows modules or what a graph holds as a weight.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from layergraph.errors import InputTypeError, NotFoundError
from layergraph.ir.layers import module_path, path_pattern
from layergraph.ir.pattern import Either, Op, Pattern, Through, Value, Weight
from layergraph.ir.program import GraphUnit

ATEN = torch.ops.aten
# The first two arguments may stand in either order; for add only while nothing scales the second.
_COMMUTATIVE = (
    ATEN.add.Tensor,
    ATEN.mul.Tensor,
    ATEN.maximum.default,
    ATEN.minimum.default,
    operator.add,
    operator.mul,
)


@dataclass(frozen=True)
class Match:
    """One place where a pattern fits.

    Attributes:
        root: the node that the pattern's outermost op stands for.
        nodes: every op node of the pattern, root included, in graph order.
        values: what its named parts stand for.
    """

    root: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]
    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise NotFoundError(
                f"the pattern names nothing {name!r}",
                expected=", ".join(self.values) or "no name at all",
                do="give a part of the pattern that name",
            )
        return self.values[name]

    @property
    def path(self) -> str:
        """The module that made the root."""
        return module_path(self.root)

    @property
    def names(self) -> tuple[str, ...]:
        """Node names, for :class:`~layergraph.Site`."""
        return tuple(node.name for node in self.nodes)

    @property
    def leaks(self) -> tuple[torch.fx.Node, ...]:
        """Nodes other than the root that something outside of the match uses as well.

        A rewrite that replaces the root alone leaves these standing: mostly a reason to refuse.
        """
        inside = set(self.nodes)
        inner = (node for node in self.nodes if node is not self.root)
        return tuple(node for node in inner if any(user not in inside for user in node.users))


def arguments(node: torch.fx.Node) -> dict[str, Any]:
    """What an op is called with, by the names of its schema, defaults filled in.

    Functions without a schema (``operator.getitem``) have their arguments by position: ``"0"``, ``"1"``.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {**{str(place): value for place, value in enumerate(node.args)}, **node.kwargs}
    given = {**dict(zip((item.name for item in schema.arguments), node.args, strict=False)), **node.kwargs}
    return {item.name: given.get(item.name, item.default_value) for item in schema.arguments}


def find(unit: GraphUnit, pattern: Pattern, *, inside: str | None = None) -> Iterator[Match]:
    """All places of a graph where the pattern fits, in graph order, no node in two of them.

    Args:
        pattern: an :class:`Op`, or several as alternatives (``a | b``).
        inside: a module path or glob (``model.layers.*.mlp``, ``**`` across dots). Every op of a match lies within one
            call of one such module.

    Raises:
        InputTypeError: the outermost part of the pattern is no op, or ``inside`` no string.
    """
    searches = _Searches(unit, pattern, inside)
    return _without_overlaps(searches.at(node) for node in unit.graph.nodes)


def match_at(unit: GraphUnit, node: torch.fx.Node, pattern: Pattern, *, inside: str | None = None) -> Match | None:
    """The match whose root is ``node``, or None; see :func:`find`."""
    return _Searches(unit, pattern, inside).at(node)


def _without_overlaps(matches: Iterable[Match | None]) -> Iterator[Match]:
    taken: set[torch.fx.Node] = set()
    for match in matches:
        if match is not None and taken.isdisjoint(match.nodes):
            taken.update(match.nodes)
            yield match


class _Searches:
    """The searches for one pattern, one for each module call that ``inside`` names."""

    def __init__(self, unit: GraphUnit, pattern: Any, inside: str | None) -> None:
        roots = pattern.choices if isinstance(pattern, Either) else (pattern,)
        if not all(isinstance(root, Op) for root in roots):
            raise InputTypeError(
                "a search starts from an op",
                expected="Op(...), or several as alternatives: a | b",
                found=type(next(root for root in roots if not isinstance(root, Op))).__name__,
                do="write it as an argument of the op that takes it",
            )
        if inside is not None and not isinstance(inside, str):
            raise InputTypeError(
                "inside is no module path", found=repr(inside)[:80], do='write inside="model.layers.*.mlp"'
            )
        self.unit, self.pattern, self.inside, self.roots = unit, pattern, inside, roots
        self._by_scope: dict[str | None, _Search] = {}

    def at(self, node: torch.fx.Node) -> Match | None:
        if not any(root.calls(node) for root in self.roots):
            return None
        for scope in _calls_around(node, self.inside):
            search = self._by_scope.setdefault(scope, _Search(self.unit, scope))
            for bound in search.ways(self.pattern, node):
                return Match(node, _in_graph_order(node, set(bound.ops)), bound.values)
        return None


def _calls_around(node: torch.fx.Node, inside: str | None) -> list[str | None]:
    """The module calls around a node that ``inside`` names, innermost first; None is the whole graph."""
    if inside is None:
        return [None]
    wanted = path_pattern(inside)
    return [call for call in reversed(_stack(node)) if wanted.fullmatch(call.partition("@")[0])]


def _stack(node: torch.fx.Node) -> list[str]:
    """Paths of the modules around a node, outermost first; a second call of one is marked ``@1``."""
    return [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]


def _in_graph_order(root: torch.fx.Node, wanted: set[torch.fx.Node]) -> tuple[torch.fx.Node, ...]:
    """Nodes that lie no later than the root."""
    found: list[torch.fx.Node] = []
    node = root
    while len(found) < len(wanted):
        if node in wanted:
            found.append(node)
        node = node.prev
    return tuple(reversed(found))


@dataclass(frozen=True)
class _Bound:
    """One way in which a pattern fits: the op nodes it takes (an ordered set), and what its names stand for."""

    ops: Mapping[torch.fx.Node, None] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def joined(self, other: _Bound) -> _Bound | None:
        """Both at once, or None where a name would stand for two things."""
        if any(name in self.values and not _same(self.values[name], value) for name, value in other.values.items()):
            return None
        return _Bound({**self.ops, **other.ops}, {**self.values, **other.values})

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other ways: two that name the same things are alike to the rest of a pattern."""
        named = sorted(self.values.items(), key=lambda item: item[0])
        return tuple((name, value if isinstance(value, torch.fx.Node) else repr(value)) for name, value in named)


class _Ways:
    """Ways to fit, worked out as they are asked for, kept for the next who asks, none twice."""

    def __init__(self, source: Iterator[_Bound]) -> None:
        self._source = source
        self._found: dict[tuple[Any, ...], _Bound] = {}
        self._order: list[_Bound] = []

    def __iter__(self) -> Iterator[_Bound]:
        place = 0
        while place < len(self._order) or self._advance():
            yield self._order[place]
            place += 1

    def _advance(self) -> bool:
        for bound in self._source:
            if bound.key not in self._found:
                self._found[bound.key] = bound
                self._order.append(bound)
                return True
        return False


class _Search:
    """How patterns fit nodes within one module call.

    Each pair of a pattern and a node is worked out once, however many ways lead to it: chains of ops that commute, or
    of alternatives, would take exponential time otherwise.
    """

    def __init__(self, unit: GraphUnit, scope: str | None) -> None:
        self.unit, self.scope = unit, scope
        self._known: dict[tuple[int, torch.fx.Node], _Ways] = {}

    def ways(self, pattern: Any, value: Any) -> Iterable[_Bound]:
        """Each way in which ``value`` fits ``pattern``."""
        if not isinstance(pattern, (Op, Through, Either)):
            return self._leaf(pattern, value)
        if not isinstance(value, torch.fx.Node):
            return self._compound(pattern, value)
        key = (id(pattern), value)
        if key not in self._known:
            self._known[key] = _Ways(self._compound(pattern, value))
        return self._known[key]

    def _leaf(self, pattern: Any, value: Any) -> list[_Bound]:
        if not isinstance(pattern, Value):
            return [_Bound()] if _is_plain(pattern, value) else []
        if isinstance(pattern, Weight) and not (isinstance(value, torch.fx.Node) and value.name in self.unit.targets):
            return []
        if pattern.where is not None and not pattern.where(value):
            return []
        return [_Bound(values={pattern.name: value} if pattern.name is not None else {})]

    def _compound(self, pattern: Op | Through | Either, value: Any) -> Iterator[_Bound]:
        if isinstance(pattern, Op):
            yield from self._op(pattern, value)
        elif isinstance(pattern, Either):
            for choice in pattern.choices:
                yield from self.ways(choice, value)
        else:
            yield from self._through(pattern, value)

    def _through(self, pattern: Through, value: Any) -> Iterator[_Bound]:
        passed: dict[torch.fx.Node, None] = {}
        while True:
            for bound in self.ways(pattern.inner, value):
                yield _Bound({**passed, **bound.ops}, bound.values)
            if not self._is_here(pattern.op, value):
                return
            passed[value] = None
            value = value.args[0]

    def _is_here(self, pattern: Op, node: Any) -> bool:
        """Whether the node calls the op, in this module call; its arguments are not looked at."""
        if not isinstance(node, torch.fx.Node) or not pattern.calls(node):
            return False
        return (self.scope is None or self.scope in _stack(node)) and (pattern.where is None or pattern.where(node))

    def _op(self, pattern: Op, node: Any) -> Iterator[_Bound]:
        if not self._is_here(pattern, node):
            return
        given = arguments(node)
        if len(pattern.args) > len(given) or any(name not in given for name in pattern.kwargs):
            return
        wanted = list({**dict(zip(given, pattern.args, strict=False)), **pattern.kwargs}.items())
        start = _Bound({node: None}, {pattern.name: node} if pattern.name is not None else {})
        yield from self._all(wanted, given, start)
        if len(pattern.args) > 1 and node.target in _COMMUTATIVE and given.get("alpha", 1) == 1:
            first, second = list(given)[:2]
            yield from self._all(wanted, {**given, first: given[second], second: given[first]}, start)

    def _all(self, wanted: list[tuple[str, Any]], given: Mapping[str, Any], bound: _Bound) -> Iterator[_Bound]:
        if not wanted:
            yield bound
            return
        (name, pattern), *rest = wanted
        for way in self.ways(pattern, given[name]):
            both = bound.joined(way)
            if both is not None:
                yield from self._all(rest, given, both)


def _is_plain(pattern: Any, value: Any) -> bool:
    """Whether a plain pattern (a type, a node, a value) fits."""
    if isinstance(pattern, type):
        return isinstance(value, pattern) and not (isinstance(value, bool) and pattern is not bool)
    if isinstance(pattern, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(pattern) == len(value) and all(map(_is_plain, pattern, value))
    return _same(pattern, value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.fx.Node) or isinstance(b, torch.fx.Node):
        return a is b
    return type(a) is type(b) and bool(a == b)


__all__ = ["Either", "Match", "Op", "Pattern", "Through", "Value", "Weight", "arguments", "find", "match_at"]
