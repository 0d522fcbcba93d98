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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from layergraph.errors import InputTypeError
from layergraph.ir.layers import module_path, path_pattern
from layergraph.ir.program import GraphUnit

ATEN = torch.ops.aten
Target = Callable[..., Any]
# The first two arguments may stand in either order; for add only while nothing scales the second.
_COMMUTATIVE = (
    ATEN.add.Tensor,
    ATEN.mul.Tensor,
    ATEN.maximum.default,
    ATEN.minimum.default,
    operator.add,
    operator.mul,
)


class Pattern:
    """What an argument may be. ``a | b`` takes either."""

    def __or__(self, other: Any) -> Pattern:
        return Either((self, other))


class Op(Pattern):
    """A node that calls one of some ops.

    Args:
        target: an op (``ATEN.linear`` for any overload, ``ATEN.linear.default`` for one), a function such as
            ``operator.getitem``, or several of these in a tuple.
        args: patterns of the arguments in the order of the schema.
        name: what the node is called in the match.
        where: a further test of the node.
        kwargs: patterns of arguments by their names in the schema.

    A pattern inside may be a :class:`Pattern`, a type (``float``: a plain value of that type), a node (that very one),
    or a plain value, which must be equal.
    """

    def __init__(
        self,
        target: Target | Sequence[Target],
        *args: Any,
        name: str | None = None,
        where: Callable[[torch.fx.Node], bool] | None = None,
        **kwargs: Any,
    ) -> None:
        self.targets = tuple(target) if isinstance(target, (tuple, list)) else (target,)
        if not self.targets or not all(callable(item) for item in self.targets):
            raise InputTypeError(
                "a pattern names no op", found=repr(target)[:80], do="write Op(torch.ops.aten.linear, ...)"
            )
        self.args, self.kwargs, self.name, self.where = args, kwargs, name, where

    def calls(self, node: torch.fx.Node) -> bool:
        """Whether the node calls one of the ops; its arguments are not looked at."""
        packet = getattr(node.target, "overloadpacket", None)
        return node.op == "call_function" and any(item is node.target or item is packet for item in self.targets)


class Value(Pattern):
    """Anything: a node or a plain value, None as well unless ``where`` says otherwise.

    Args:
        name: what it is called in the match. The same name twice must be the same thing twice.
        where: a further test.
    """

    def __init__(self, name: str | None = None, where: Callable[[Any], bool] | None = None) -> None:
        self.name, self.where = name, where


class Weight(Value):
    """A parameter, buffer or constant that the graph holds."""


class Through(Pattern):
    """A pattern behind any number of ops with one input each that a rewrite may look through: casts, views.

    Args:
        targets: these ops.
        inner: what stands behind them.
    """

    def __init__(self, targets: Target | Sequence[Target], inner: Any) -> None:
        self.op, self.inner = Op(targets), inner


class Either(Pattern):
    """One pattern or another, the first that fits."""

    def __init__(self, choices: tuple[Any, ...]) -> None:
        self.choices = choices


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


def find(unit: GraphUnit, pattern: Op, *, inside: str | None = None) -> Iterator[Match]:
    """All places of a graph where the pattern fits, in graph order, no node in two of them.

    Args:
        inside: a module path or glob (``model.layers.*.mlp``, ``**`` across dots). Every op of a match lies within one
            call of one such module.
    """
    taken: set[torch.fx.Node] = set()
    for node in unit.graph.nodes:
        match = match_at(unit, node, pattern, inside=inside)
        if match is not None and taken.isdisjoint(match.nodes):
            taken.update(match.nodes)
            yield match


def match_at(unit: GraphUnit, node: torch.fx.Node, pattern: Op, *, inside: str | None = None) -> Match | None:
    """The match whose root is ``node``, or None; see :func:`find`."""
    if not pattern.calls(node):
        return None
    for scope in _calls_around(node, inside):
        for bound in _Matcher(unit, scope).fit(pattern, node, _Bound()):
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
    """What a match, as far as it goes, has used and named."""

    ops: tuple[torch.fx.Node, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    def named(self, name: str | None, value: Any) -> _Bound | None:
        """With one more name, or None where the name stands for something else already."""
        if name is None:
            return self
        if name in self.values:
            return self if _same(self.values[name], value) else None
        return _Bound(self.ops, {**self.values, name: value})


class _Matcher:
    """Tries every way in which a pattern can fit, one after another."""

    def __init__(self, unit: GraphUnit, scope: str | None) -> None:
        self.unit, self.scope = unit, scope

    def fit(self, pattern: Any, value: Any, bound: _Bound) -> Iterator[_Bound]:
        """Each way in which ``value`` fits ``pattern``, given what is bound."""
        if isinstance(pattern, Op):
            yield from self._op(pattern, value, bound)
        elif isinstance(pattern, Through):
            yield from self._through(pattern, value, bound)
        elif isinstance(pattern, Either):
            for choice in pattern.choices:
                yield from self.fit(choice, value, bound)
        elif isinstance(pattern, Value):
            if isinstance(pattern, Weight) and not (
                isinstance(value, torch.fx.Node) and value.name in self.unit.targets
            ):
                return
            after = bound.named(pattern.name, value)
            if after is not None and (pattern.where is None or pattern.where(value)):
                yield after
        elif _is_plain(pattern, value):
            yield bound

    def _is_held(self, value: Any) -> bool:
        return isinstance(value, torch.fx.Node) and value.name in self.unit.targets

    def _op(self, pattern: Op, node: Any, bound: _Bound) -> Iterator[_Bound]:
        if not isinstance(node, torch.fx.Node) or not pattern.calls(node):
            return
        if self.scope is not None and self.scope not in _stack(node):
            return
        named = bound.named(pattern.name, node)
        if named is None or not (pattern.where is None or pattern.where(node)):
            return
        given = arguments(node)
        wanted = {**dict(zip(given, pattern.args, strict=False)), **pattern.kwargs}
        if len(pattern.args) > len(given) or any(name not in given for name in pattern.kwargs):
            return
        start = _Bound((*named.ops, *(() if node in named.ops else (node,))), named.values)
        yield from self._all(list(wanted.items()), given, start)
        if len(pattern.args) > 1 and node.target in _COMMUTATIVE and given.get("alpha", 1) == 1:
            first, second = list(given)[:2]
            swapped = {**given, first: given[second], second: given[first]}
            yield from self._all(list(wanted.items()), swapped, start)

    def _all(self, wanted: list[tuple[str, Any]], given: Mapping[str, Any], bound: _Bound) -> Iterator[_Bound]:
        if not wanted:
            yield bound
            return
        (name, pattern), *rest = wanted
        for after in self.fit(pattern, given[name], bound):
            yield from self._all(rest, given, after)

    def _through(self, pattern: Through, value: Any, bound: _Bound) -> Iterator[_Bound]:
        yield from self.fit(pattern.inner, value, bound)
        for passed in self._op(pattern.op, value, bound):
            yield from self._through(pattern, value.args[0], passed)


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
