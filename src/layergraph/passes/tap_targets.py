"""What a tap is asked for, turned into nodes: registry keys, module paths, classes, ops.

The registry is transformers' ``_can_record_outputs``; which entries it gives, and in which order, follows
``transformers.utils.output_capturing``: a recorded module belongs to the innermost model around it, its value goes to
the innermost model whose forward collects.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from layergraph.errors import InputError, NotFoundError
from layergraph.ir.interface import Template
from layergraph.ir.layers import LayerIndex, ModuleCall, module_path
from layergraph.ir.printing import short_op
from layergraph.ir.program import Capture, GraphUnit, ModelInfo

_PRETRAINED = "transformers.modeling_utils:PreTrainedModel"
# Keys that upstream's output_attentions brings along, for models that record them.
_COMPANIONS = {"attentions": ("cross_attentions", "mask_decoder_attentions")}


@dataclass(frozen=True)
class Entry:
    """One entry of the tuple that a registry key gives.

    Attributes:
        path: the module it was recorded on.
        node: the node, or None where the module returned None or the value was unused in the graph.
        is_initial: whether it is the input of the first recorded module.
        block: position among the recorded modules, None for the initial entry.
        own: the module's own value where the entry was replaced by the last hidden state, else the same as node.
    """

    path: str
    node: str | None
    is_initial: bool
    block: int | None
    own: str | None


@dataclass(frozen=True)
class Recorded:
    """All entries of one key for one collecting model, and the field of the return value they stand in."""

    key: str
    collector: str
    field: tuple[str, ...]
    entries: tuple[Entry, ...]
    n_none: int


def registry_keys(model: ModelInfo) -> tuple[str, ...]:
    """The keys the model can record, in its own order."""
    return tuple(dict.fromkeys(capture.key for capture in model.captures)) if model.collectors else ()


def record(unit: GraphUnit, model: ModelInfo, key: str) -> list[Recorded]:
    """The tuples that key gives, one for each collecting model that has any entry."""
    companions = [other for other in _COMPANIONS.get(key, ()) if other in registry_keys(model)]
    found = []
    for name in (key, *companions):
        for collector in model.collectors:
            recorded = _record_one(unit, model, name, collector)
            if recorded is not None:
                found.append(recorded)
    return found


def _record_one(unit: GraphUnit, model: ModelInfo, key: str, collector: str) -> Recorded | None:
    layers = unit.layers
    entries: list[Entry] = []
    n_none, block = 0, 0
    for call, capture in _recorded_calls(layers, model, key, collector):
        node, is_none = _value(call, capture.index)
        if key == "hidden_states":
            if capture.initial and not entries:
                entries.append(Entry(call.path, call.first_input, True, None, call.first_input))
            if is_none:
                continue
        elif is_none:
            n_none += 1
            block += 1
            continue
        entries.append(Entry(call.path, node, False, block, node))
        block += 1
    if not entries and not n_none:
        return None
    if key == "hidden_states" and entries and model.collectors[collector]:
        last = _last_hidden_state(unit, collector)
        if last is not None:
            entries[-1] = Entry(entries[-1].path, last, False, entries[-1].block, entries[-1].own)
    return Recorded(key, collector, _field(unit, collector, key, model), tuple(entries), n_none)


def _recorded_calls(
    layers: LayerIndex, model: ModelInfo, key: str, collector: str
) -> Iterator[tuple[ModuleCall, Capture]]:
    """Calls of recorded modules in the order in which they return, each once per recorder that matches it."""
    models = [path for path, calls in layers.by_path.items() if layers.is_a(calls[0], _PRETRAINED)]
    for call in sorted(layers.calls, key=lambda item: item.end):
        if _nearest(call.path, model.collectors, strict=True) != collector:
            continue
        owner = _nearest(call.path, models, strict=False) or ""
        for capture in model.captures:
            if capture.owner == owner and capture.key == key and _matches(layers, call, capture):
                yield call, capture


def _matches(layers: LayerIndex, call: ModuleCall, capture: Capture) -> bool:
    dotted = "." + call.path
    by_class = capture.target_class is not None and layers.is_a(call, capture.target_class)
    by_name = capture.class_name is not None and dotted.endswith(capture.class_name)
    if not (by_class or by_name):
        return False
    return capture.layer_name is None or f".{capture.layer_name.strip('.')}." in dotted + "."


def _value(call: ModuleCall, index: int) -> tuple[str | None, bool]:
    """Node of the recorded output, and whether the module returned None there."""
    if call.returns != "tuple":
        node = call.outputs[0][1] if call.outputs else None
        return node, False
    node = call.output(index)
    return node, node is None


def _nearest(path: str, models: Sequence[str] | dict[str, bool] | object, *, strict: bool) -> str | None:
    """The innermost of ``models`` that ``path`` lies in (``strict``: not itself); "" is the whole model."""
    best: str | None = None
    for candidate in models:  # type: ignore[attr-defined]
        inside = candidate == "" or path.startswith(candidate + ".") or (not strict and path == candidate)
        if inside and (best is None or len(candidate) > len(best)):
            best = candidate
    return best


def _last_hidden_state(unit: GraphUnit, collector: str) -> str | None:
    """What the collecting model returned as ``vision_hidden_states`` or ``last_hidden_state``."""
    if collector == "":
        fields = _fields(unit.interface.template)
        for name in ("vision_hidden_states", "last_hidden_state"):
            leaf = fields.get(name)
            if isinstance(leaf, dict) and "$" in leaf:
                return _output_node(unit, leaf["$"])
        return None
    outputs = dict(unit.layers.by_path[collector][0].outputs)
    return outputs.get("vision_hidden_states") or outputs.get("last_hidden_state")


def _output_node(unit: GraphUnit, name: str) -> str:
    specs = unit.exported.graph_signature.output_specs
    flat = [spec.arg.name for spec in specs][-len(unit.interface.outputs) :]
    return str(flat[unit.interface.outputs.index(name)])


def _fields(template: Template) -> dict[str, Template]:
    if isinstance(template, dict):
        return template.get("fields") or template.get("dict") or {}
    return {}


def _field(unit: GraphUnit, collector: str, key: str, model: ModelInfo) -> tuple[str, ...]:
    """Where the tuple stands in the return value: as the model itself would put it, else under the path's name."""
    fields = _fields(unit.interface.template)
    part = collector.rpartition(".")[2]
    with_key = {c for c in model.collectors if any(True for _ in _recorded_calls(unit.layers, model, key, c))}
    if collector and part in ("encoder", "decoder") and f"{part}_{key}" in fields:
        return (f"{part}_{key}",)
    if collector == "" or len(with_key) == 1 or (part == "decoder" and key in fields):
        return (key,)
    nested = _nested_field(unit, collector, fields)
    return (nested, key) if nested else (f"{collector}.{key}",)


def _nested_field(unit: GraphUnit, collector: str, fields: dict[str, Template]) -> str | None:
    """The field that holds the collecting model's own output (``text_model_output`` of CLIP)."""
    nodes = {node for _, node in unit.layers.by_path[collector][0].outputs if node is not None}
    for name, child in fields.items():
        inner = _fields(child)
        leaves = [_output_node(unit, leaf["$"]) for leaf in inner.values() if isinstance(leaf, dict) and "$" in leaf]
        if leaves and all(leaf in nodes for leaf in leaves):
            return name
    return None


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
        pattern = _glob(what)
        return [call for call in layers.calls if pattern.fullmatch(call.path)]
    return [call for call in layers.calls if layers.is_a(call, what)]


def _glob(pattern: str) -> re.Pattern[str]:
    text = fnmatch.translate(pattern.replace("**", "\0").replace("*", "\1"))
    body = text.removeprefix("(?s:").removesuffix(")\\Z").removesuffix(")\\z")
    return re.compile(body.replace("\\\0", ".*").replace("\0", ".*").replace("\\\1", r"[^.]*").replace("\1", r"[^.]*"))


def find_ops(unit: GraphUnit, what: str) -> list[torch.fx.Node]:
    """Nodes by ``scope::op`` or ``scope::op#occurrence``; scope is a module path or glob, ``**`` for anywhere.

    Raises:
        NotFoundError: no such op there, or not as many.
    """
    scope, _, rest = what.partition("::")
    op, has_number, number = rest.partition("#")
    pattern = _glob(scope) if scope else re.compile("")
    found = [
        node
        for node in unit.graph.nodes
        if node.op == "call_function"
        and short_op(node.target) == op
        and any(pattern.fullmatch(prefix) for prefix in _prefixes(module_path(node)))
    ]
    if not has_number:
        return found
    try:
        return [found[int(number)]]
    except ValueError:
        raise InputError(f"{what!r} has no number after #", do="write scope::op#0 for the first one") from None
    except IndexError:
        raise NotFoundError(
            f"{what!r} matches {len(found)} nodes", expected=f"an occurrence from 0 to {len(found) - 1}"
        ) from None


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".") if path else []
    for length in range(len(parts) + 1):
        yield ".".join(parts[:length])


__all__ = ["Entry", "Recorded", "find_calls", "find_ops", "record", "registry_keys"]
