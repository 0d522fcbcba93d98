"""A graph as canonical text: equal for equal computations, whatever its nodes and size symbols are called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from layergraph.ir.exported import one_at_a_time

_SYMBOL = re.compile(r"\b([suz]\d+)\b")


@one_at_a_time
def graph_text(exported: ExportedProgram) -> str:
    """Canonical text of graph and signature, one line a node, nodes and symbols numbered in order of appearance."""
    symbols: dict[str, str] = {}
    lines = _lines(exported.graph, symbols, exported.graph_module)
    signature = exported.graph_signature
    for spec, node in zip(signature.input_specs, exported.graph.find_nodes(op="placeholder"), strict=True):
        value = node.meta.get("val")
        # Parameters keep their names; user inputs are known by theirs.
        name = spec.target if spec.target is not None else node.target
        lines.append(f"in {spec.kind.name} {name} {spec.persistent} {_value_text(value, symbols)}")
    lines += [f"out {spec.kind.name} {spec.target}" for spec in signature.output_specs]
    lines.append(f"spec {exported.call_spec.in_spec} {exported.call_spec.out_spec}")
    return "\n".join(lines)


def _lines(graph: torch.fx.Graph, symbols: dict[str, str], owner: torch.fx.GraphModule) -> list[str]:
    numbers: dict[torch.fx.Node, int] = {}
    lines = []
    for number, node in enumerate(graph.nodes):
        numbers[node] = number

        def show(arg: Any) -> str:
            return _arg_text(arg, lambda item: f"%{numbers[item]}", symbols)

        target = "" if node.op == "placeholder" else str(node.target)
        args = ", ".join(map(show, node.args))
        kwargs = ", ".join(f"{key}={show(value)}" for key, value in sorted(node.kwargs.items()))
        # A loaded graph has values on its output node, a traced one has not.
        value = "" if node.op == "output" else _value_text(node.meta.get("val"), symbols)
        lines.append(f"%{number} {node.op} {target}({args}; {kwargs}) {value}")
        child = getattr(owner, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(child, torch.fx.GraphModule):
            lines += ["  " + line for line in _lines(child.graph, symbols, child)]
    return lines


def _arg_text(arg: Any, name: Callable[[torch.fx.Node], str], symbols: dict[str, str]) -> str:
    if isinstance(arg, torch.fx.Node):
        return name(arg)
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(_arg_text(item, name, symbols) for item in arg) + "]"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{key}: {_arg_text(item, name, symbols)}" for key, item in arg.items()) + "}"
    return _rename(repr(arg), symbols)


def _value_text(value: Any, symbols: dict[str, str]) -> str:
    if isinstance(value, torch.Tensor):
        shape = _rename(",".join(str(size) for size in value.shape), symbols)
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]@{value.device}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_value_text(item, symbols) for item in value) + ")"
    return _rename(str(value), symbols) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ""


def _rename(text: str, symbols: dict[str, str]) -> str:
    return _SYMBOL.sub(lambda match: symbols.setdefault(match[1], f"d{len(symbols)}"), text)


__all__ = ["graph_text"]
