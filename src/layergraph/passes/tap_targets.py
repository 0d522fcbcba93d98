"""What a tap is asked for by name, turned into calls and nodes: module paths, globs, regexes, classes, ops."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from layergraph.errors import InputError, NotFoundError
from layergraph.ir.layers import LayerIndex, ModuleCall, module_path, path_pattern
from layergraph.ir.printing import short_op
from layergraph.ir.program import GraphUnit


def find_calls(layers: LayerIndex, what: str | type | re.Pattern[str]) -> list[ModuleCall]:
    """Module calls by exact path, glob (``*`` within a name, ``**`` across), regex, class or class name."""
    if isinstance(what, type):
        name = f"{what.__module__}:{what.__qualname__}"
        return [call for call in layers.calls if layers.is_a(call, name)]
    if isinstance(what, re.Pattern):
        return [call for call in layers.calls if what.fullmatch(call.path)]
    if what in layers.by_path:
        return list(layers.by_path[what])
    if any(char in what for char in "*?["):
        pattern = path_pattern(what)
        return [call for call in layers.calls if pattern.fullmatch(call.path)]
    return [call for call in layers.calls if layers.is_a(call, what)]


def find_ops(unit: GraphUnit, what: str) -> list[torch.fx.Node]:
    """Nodes by ``scope::op`` or ``scope::op#occurrence``; scope is a module path or glob, ``**`` for anywhere.

    Raises:
        NotFoundError: no such op there, or not as many.
    """
    scope, _, rest = what.partition("::")
    op, has_number, number = rest.partition("#")
    pattern = path_pattern(scope) if scope else re.compile("")
    found = [
        node
        for node in unit.graph.nodes
        if node.op == "call_function" and short_op(node.target) == op and _is_within(node, pattern)
    ]
    if not has_number or not found:
        return found
    try:
        return [found[int(number)]]
    except ValueError:
        raise InputError(f"{what!r} has no number after #", do="write scope::op#0 for the first one") from None
    except IndexError:
        raise NotFoundError(
            f"{what!r} matches {len(found)} nodes", expected=f"an occurrence from 0 to {len(found) - 1}"
        ) from None


def ops_within(unit: GraphUnit, scope: str) -> list[str]:
    """Names of the ops that run in modules of that path or glob, in graph order, without sizes and picks of tuples."""
    pattern = path_pattern(scope) if scope else re.compile("")
    ops = [
        short_op(node.target)
        for node in unit.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and _is_within(node, pattern)
    ]
    return list(dict.fromkeys(ops))


def _is_within(node: torch.fx.Node, pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(prefix) for prefix in _prefixes(module_path(node)))


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".") if path else []
    for length in range(len(parts) + 1):
        yield ".".join(parts[:length])


__all__ = ["find_calls", "find_ops", "ops_within"]
