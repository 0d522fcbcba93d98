"""The parts of a pattern of ops; :mod:`layergraph.ir.match` finds where one fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from layergraph.errors import InputError, InputTypeError

Target = Callable[..., Any]


class Pattern:
    """What an argument may be. ``a | b`` takes either."""

    def __or__(self, other: Any) -> Pattern:
        choices = [item.choices if isinstance(item, Either) else (item,) for item in (self, other)]
        return Either((*choices[0], *choices[1]))


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

    Raises:
        InputTypeError: the target is nothing that stands in an exported graph (``torch.mul``).
        InputError: no overload of the ops takes these arguments.
    """

    def __init__(
        self,
        target: Target | Sequence[Target],
        /,
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
        _check_arguments(self)

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


def _check_arguments(pattern: Op) -> None:
    """Refuse what could never fit: it would find nothing, and not say why."""
    schemas = []
    for target in pattern.targets:
        if isinstance(target, torch._ops.OpOverloadPacket):
            schemas += [getattr(target, overload)._schema for overload in target.overloads()]
        elif isinstance(target, torch._ops.OpOverload):
            schemas.append(target._schema)
        elif isinstance(target, torch._ops.HigherOrderOperator) or _stands_in_graphs(target):
            return
        else:
            raise _no_op(target)
    names = [[item.name for item in schema.arguments] for schema in schemas]
    if any(len(pattern.args) <= len(known) and set(pattern.kwargs) <= set(known) for known in names):
        return
    raise InputError(
        f"no overload of {' or '.join(map(str, pattern.targets))} takes what this pattern names",
        expected="; ".join(dict.fromkeys(", ".join(known) for known in names[:4])),
        found=", ".join([f"{len(pattern.args)} by position", *pattern.kwargs]),
        do="use the argument names of its schema",
    )


def _stands_in_graphs(target: Target) -> bool:
    """Whether it is plain arithmetic of Python, which torch.export uses on sizes."""
    module = getattr(target, "__module__", None)
    return module in ("_operator", "operator", "math", "builtins") or (
        module == "torch" and getattr(target, "__name__", "").startswith("sym_")
    )


def _no_op(target: Target) -> InputTypeError:
    name = getattr(target, "__name__", "")
    custom = getattr(target, "_qualname", None)  # of torch.library.custom_op
    instead = f"aten.{name}" if name and hasattr(torch.ops.aten, name) else str(custom or "").replace("::", ".")
    return InputTypeError(
        f"{name or custom or repr(target)[:60]} is no op of an exported graph",
        expected="an op of torch.ops, or a function of operator",
        do=f"write torch.ops.{instead}" if instead else "see what stands in the graph: program.print()",
    )


__all__ = ["Either", "Op", "Pattern", "Through", "Value", "Weight"]
