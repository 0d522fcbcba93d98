"""Text for people and for tests: by layer, equal layers folded, no file paths, stable across processes.

Inside a layer nodes are numbered from 0, the hidden state that enters is ``h``, weights are named relative to the
layer, and what comes from elsewhere is ``^name``: so layers that compute the same print the same.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from layergraph.errors import NotFoundError
from layergraph.ir.exported import one_at_a_time
from layergraph.ir.layers import module_path
from layergraph.ir.program import GraphUnit, Program

_SHORT = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}
_SYMBOL = re.compile(r"\b[suz]\d+\b")


@dataclass(frozen=True)
class Section:
    """A run of nodes that belong together: one repeated block, or one module outside of all blocks."""

    path: str
    nodes: tuple[torch.fx.Node, ...]
    is_layer: bool


class Printer:
    """Prints one graph."""

    def __init__(self, unit: GraphUnit) -> None:
        self.unit = unit
        self.symbols = size_names(unit)

    def sections(self) -> list[Section]:
        """The graph's operations, cut into runs; a layer is one section even if something stands between."""
        layers: dict[str, list[torch.fx.Node]] = {}
        order: list[tuple[str, bool, list[torch.fx.Node]]] = []
        for node in self.unit.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            path = module_path(node)
            layer = self.unit.layers.layer_of(path)
            if layer is not None:
                if layer not in layers:
                    layers[layer] = []
                    order.append((layer, True, layers[layer]))
                layers[layer].append(node)
                continue
            if not order or order[-1][1] or order[-1][0] != path:
                order.append((path, False, []))
            order[-1][2].append(node)
        return [Section(path, tuple(nodes), is_layer) for path, is_layer, nodes in order]

    def value(self, node: torch.fx.Node) -> str:
        """``f32[2,s,32]``, or what else the node computes."""
        return value_text(node.meta.get("val"), self.symbols)

    def body(self, section: Section) -> list[str]:
        """The section's lines, numbered from 0, indented by module."""
        numbers = {node: f"%{i}" for i, node in enumerate(section.nodes)}
        entry = self._entry(section)
        targets = self.unit.targets

        def name(node: torch.fx.Node) -> str:
            if node in numbers:
                return numbers[node]
            if node.name == entry:
                return "h"
            target = targets.get(node.name)
            if target is None:
                return f"^{node.name}"
            prefix = section.path + "."
            return target.removeprefix(prefix) if target.startswith(prefix) else f"^{target}"

        lines = []
        current = section.path
        for node in section.nodes:
            path = module_path(node)
            if section.is_layer and path != current:
                lines.append("  " + (path.removeprefix(section.path + ".") if path != section.path else "(block)"))
                current = path
            lines.append(f"    {self.line(node, numbers[node], name)}")
        return lines

    def line(self, node: torch.fx.Node, label: str, name: Any) -> str:
        """One node as ``%3 f32[2,s,32] = add(h, %2)``."""
        args = [self._arg(arg, name) for arg in node.args]
        args += [f"{key}={self._arg(value, name)}" for key, value in node.kwargs.items()]
        return f"{label} {self.value(node)} = {short_op(node.target)}({', '.join(args)})"

    def _entry(self, section: Section) -> str | None:
        calls = self.unit.layers.by_path.get(section.path, ())
        return calls[0].first_input if section.is_layer and calls else None

    def _arg(self, arg: Any, name: Any) -> str:
        if isinstance(arg, torch.fx.Node):
            return str(name(arg))
        if isinstance(arg, (list, tuple)):
            return "[" + ", ".join(self._arg(item, name) for item in arg) + "]"
        if isinstance(arg, torch.dtype):
            return _SHORT.get(str(arg).removeprefix("torch."), str(arg))
        return str(arg)


def size_names(unit: GraphUnit) -> dict[str, str]:
    """Symbol of torch -> name in the interface (``batch``, ``sequence``), from the graph's inputs."""
    names: dict[str, str] = {}
    nodes = unit.nodes
    for item, node in zip(unit.interface.inputs, unit.exported.graph_signature.user_inputs, strict=True):
        for label, size in zip(item.shape, nodes[str(node)].meta["val"].shape, strict=True):
            if isinstance(label, str) and _SYMBOL.fullmatch(str(size)):
                names.setdefault(str(size), label)
    return names


def value_text(value: Any, symbols: Mapping[str, str]) -> str:
    """A fake value as text, sizes by their names."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape = ",".join(str(size) for size in value.shape)
        return f"{_SHORT.get(dtype, dtype)}[{_SYMBOL.sub(lambda m: symbols.get(m[0], m[0]), shape)}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(value_text(item, symbols) for item in value) + ")"
    if isinstance(value, (torch.SymInt, int)):
        return "int"
    return "" if value is None else type(value).__name__


def short_op(target: Any) -> str:
    """``aten.linear.default`` -> ``linear``; ops of other namespaces keep theirs."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


@one_at_a_time
def listing(program: Program, graph: str = "forward") -> str:
    """The whole graph by layer, equal layers folded."""
    unit = program[graph]
    printer = Printer(unit)
    lines = [f"{program.model.cls.rpartition(':')[2]} / {graph}   {len(unit.nodes)} nodes   {program.fingerprint[:12]}"]
    for item in unit.interface.inputs:
        lines.append(f"  in   {item.name}: {_SHORT.get(item.dtype, item.dtype)}[{','.join(map(str, item.shape))}]")
    lines.append("")
    bodies: dict[str, str] = {}
    same: dict[str, list[str]] = {}
    printed: list[tuple[Section, list[str], str | None]] = []
    for section in printer.sections():
        body = printer.body(section)
        text = "\n".join(body)
        if section.is_layer and text in bodies:
            same[bodies[text]].append(section.path)
            continue
        if section.is_layer:
            bodies[text] = section.path
            same[section.path] = []
        printed.append((section, body, section.path if section.is_layer else None))
    for section, body, layer in printed:
        lines.append(_heading(printer, section, same[layer] if layer else []))
        lines += [*body, ""]
    flat = [spec.arg.name for spec in unit.exported.graph_signature.output_specs][-len(unit.interface.outputs) :]
    for name, node in zip(unit.interface.outputs, flat, strict=True):
        lines.append(f"  out  {name}: {printer.value(unit.nodes[node])} = ^{node}")
    return "\n".join(lines)


def _heading(printer: Printer, section: Section, same: list[str]) -> str:
    n = f"{len(section.nodes)} node{'s' if len(section.nodes) != 1 else ''}"
    if not section.is_layer:
        return f"{section.path or '(model)'}   {n}"
    entry = printer._entry(section)
    head = f"layer {section.path.rpartition('.')[2]} ({section.path})"
    if entry is not None:
        head += f"   h: {printer.value(printer.unit.nodes[entry])}"
    head += f"   {n}"
    return head + (f"   same text: {' '.join(path.rpartition('.')[2] for path in same)}" if same else "")


@one_at_a_time
def diff(before: Program, after: Program, graph: str = "forward", context: int = 1) -> str:
    """What changed, by layer: removed lines with ``-``, added ones with ``+``; equal changes folded."""
    old, new = _named_sections(before[graph]), _named_sections(after[graph])
    blocks: dict[str, list[str]] = {}
    for path in dict.fromkeys([*old, *new]):
        a, b = old.get(path, []), new.get(path, [])
        if a == b:
            continue
        changes = [
            line
            for line in difflib.unified_diff(a, b, lineterm="", n=context)
            if not line.startswith(("---", "+++", "@@"))
        ]
        removed = sum(line.startswith("-") for line in changes)
        added = sum(line.startswith("+") for line in changes)
        text = "\n".join(f"  {line[0]} {line[1:]}" for line in changes)
        blocks.setdefault(text, []).append(f"{path}   nodes -{removed} +{added}")
    if not blocks:
        return "no difference"
    return "\n\n".join("\n".join([*heads, text]) for text, heads in blocks.items())


def _named_sections(unit: GraphUnit) -> dict[str, list[str]]:
    printer = Printer(unit)
    targets = unit.targets
    sections: dict[str, list[str]] = {}

    def name(node: torch.fx.Node) -> str:
        return targets.get(node.name, f"%{node.name}")

    weights = [
        f"{targets[node.name]} {printer.value(node)}"
        for node in unit.graph.find_nodes(op="placeholder")
        if node.name in targets
    ]
    sections["weights"] = weights
    sections["inputs"] = [f"{item.name} {item.dtype}{list(item.shape)}" for item in unit.interface.inputs]
    for section in printer.sections():
        lines = [printer.line(node, f"%{node.name}", name) for node in section.nodes]
        sections.setdefault(section.path or "(model)", []).extend(lines)
    flat = [spec.arg.name for spec in unit.exported.graph_signature.output_specs][-len(unit.interface.outputs) :]
    sections["outputs"] = [f"{out} = %{node}" for out, node in zip(unit.interface.outputs, flat, strict=True)]
    return sections


@one_at_a_time
def window(unit: GraphUnit, node: torch.fx.Node, n_lines: int = 10) -> str:
    """A few lines of graph around a node, the node marked."""
    printer = Printer(unit)
    targets = unit.targets
    nodes = [other for other in unit.graph.nodes if other.op not in ("placeholder", "output")]
    at = nodes.index(node) if node in nodes else 0
    first = max(0, at - n_lines // 2)
    lines = []
    for other in nodes[first : first + n_lines]:
        text = printer.line(other, f"%{other.name}", lambda item: targets.get(item.name, f"%{item.name}"))
        lines.append(("> " if other is node else "  ") + text)
    return "\n".join(lines)


@one_at_a_time
def explain(program: Program, what: str, graph: str = "forward") -> str:
    """Where a node or a weight comes from, or what a module is made of."""
    unit = program[graph]
    name = what.lstrip("%^")
    if name in unit.nodes:
        return _explain_node(program, unit, unit.nodes[name])
    if name in unit.layers.by_path:
        return _explain_path(program, unit, name)
    placeholders = {target: node for node, target in unit.targets.items()}
    if name in placeholders:
        return _explain_node(program, unit, unit.nodes[placeholders[name]])
    near = difflib.get_close_matches(name, [*unit.layers.by_path, *unit.nodes, *placeholders], n=3)
    raise NotFoundError(
        f"{what!r} is neither a node nor a module path nor a weight of graph {graph!r}",
        found=f"nearest: {', '.join(near)}" if near else None,
        do="print the program to see its nodes and paths",
        shell="layergraph dump FOLDER shows nodes and paths",
    )


def _weight_changes(program: Program) -> list[tuple[set[str], str, str]]:
    """What passes did to weights, in order: the names concerned, the pass, and what was and became."""
    shapes = {name: list(tensor.shape) for name, tensor in program.state_dict.items()}
    before = {name: list(shape) for name, (shape, _) in program.original.parameters.items()} if program.original else {}
    changes = []
    remaps = list(program.weights)
    for number, remap in enumerate(remaps):
        # What stands between two passes has no record of its shape.
        was = {name for other in remaps[:number] for name in other.rewritten}
        becomes = {name for other in remaps[number + 1 :] for name in other.original}
        old = ", ".join(_sized(name, before, was) for name in remap.original)
        new = ", ".join(_sized(name, shapes, becomes) for name in remap.rewritten)
        if remap.original == remap.rewritten and len(remap.original) == 1:
            new = new.removeprefix(remap.original[0]).strip() or "the same name"
        names = {*remap.original, *remap.rewritten}
        changes.append((names, remap.made_by or "a pass", f"{old} -> {new} ({remap.kind})"))
    return changes


def _sized(name: str, shapes: Mapping[str, list[int]], unknown: set[str]) -> str:
    return f"{name} {shapes[name]}" if name in shapes and name not in unknown else name


def _explain_node(program: Program, unit: GraphUnit, node: torch.fx.Node) -> str:
    target = unit.targets.get(node.name, "")
    made = unit.provenance.get(node.name)
    rows = [
        ("node", f"%{node.name} {Printer(unit).value(node)} = {short_op(node.target)}"),
        ("module", module_path(node) or "(model)"),
        ("layer", unit.layers.layer_of(module_path(node)) or "none"),
        ("made by", made.made_by if made else "the trace"),
        ("made from", ", ".join(f"%{item}" for item in made.made_from) if made else ""),
        ("state", target),
        *(("changed", f"by {made_by}: {text}") for names, made_by, text in _weight_changes(program) if target in names),
        ("reads", ", ".join(f"%{item.name}" for item in node.all_input_nodes)),
        ("used by", ", ".join(f"%{item.name}" for item in node.users) or "nothing"),
    ]
    text = "\n".join(f"{label:<10}{value}" for label, value in rows if value)
    return text if node.op in ("placeholder", "output") else text + "\n\n" + window(unit, node)


def _explain_path(program: Program, unit: GraphUnit, path: str) -> str:
    calls = unit.layers.by_path[path]
    inside = [node for node in unit.graph.nodes if _is_under(module_path(node), path)]
    makers = {unit.provenance[node.name].made_by for node in inside if node.name in unit.provenance}
    weights = [target for target in unit.targets.values() if _is_under(target, path)]
    changes = [item for item in _weight_changes(program) if any(_is_under(name, path) for name in item[0])]
    makers |= {made_by for _, made_by, _ in changes}
    lines = [
        f"module    {path}",
        f"class     {calls[0].cls.replace(':', '.')}",
        f"called    {len(calls)} time{'s' if len(calls) > 1 else ''}",
        f"nodes     {len(inside)}",
        f"weights   {', '.join(weights) or 'none'}",
        f"changed   {', '.join(sorted(makers)) or 'by no pass'}",
    ]
    lines += [f"weight    {text}, by {made_by}" for _, made_by, text in changes]
    for call in calls:
        lines.append(f"in        {', '.join(f'{key or 0} = %{node}' for key, node in call.inputs) or 'no tensor'}")
        outputs = (f"{key or 'tensor'} = {'None' if node is None else '%' + node}" for key, node in call.outputs)
        lines.append(f"out       {', '.join(outputs)}")
    return "\n".join(lines)


def _is_under(path: str, parent: str) -> bool:
    return path == parent or path.startswith(parent + ".")


__all__ = ["Printer", "Section", "diff", "explain", "listing", "short_op", "size_names", "value_text", "window"]
