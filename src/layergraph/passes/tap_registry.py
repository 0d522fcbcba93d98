"""Taps by registry key: which entries transformers' ``_can_record_outputs`` gives, in which order and field.

Follows ``transformers.utils.output_capturing``: a recorded module belongs to the innermost model around it, its value
goes to the innermost model whose forward collects, if that one records the key at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from layergraph.ir.layers import LayerIndex, ModuleCall
from layergraph.ir.program import Capture, GraphUnit, ModelInfo
from layergraph.ir.template import Template
from layergraph.passes.tap_returned import place_returned
from layergraph.passes.tap_values import SPARE, Entry, Recorded, call_output

_PRETRAINED = "transformers.modeling_utils:PreTrainedModel"
# Keys that upstream's output_attentions brings along, for models that record them.
_COMPANIONS = {"attentions": ("cross_attentions", "mask_decoder_attentions")}


def registry_keys(model: ModelInfo, layers: LayerIndex) -> tuple[str, ...]:
    """The keys the model can record, in its own order, and those that its own code collects."""
    recorded = [capture.key for capture in model.captures] if model.collectors else []
    return tuple(dict.fromkeys([*recorded, *layers.returned]))


def record(unit: GraphUnit, model: ModelInfo, key: str) -> list[Recorded]:
    """The tuples that key gives, one for each collecting model that has any entry."""
    companions = [other for other in _COMPANIONS.get(key, ()) if other in registry_keys(model, unit.layers)]
    found: list[Recorded] = []
    for name in (key, *companions):
        recorded = (_record_one(unit, model, name, collector) for collector in model.collectors)
        found += place_returned(unit, name, [item for item in recorded if item is not None])
    return found


def _record_one(unit: GraphUnit, model: ModelInfo, key: str, collector: str) -> Recorded | None:
    layers = unit.layers
    entries: list[Entry] = []
    n_none = 0
    for call, capture in _recorded_calls(layers, model, key, collector):
        # A list or an output class is no tuple: upstream appends it whole, of which the first tensor is what counts.
        value, is_none = call_output(layers, call, capture.index if call.returns == "tuple" else 0)
        given = call.first_input
        if key == "hidden_states":
            if capture.initial and not entries:
                entries.append(Entry(call.path, given, given, given, is_initial=True))
            if is_none:
                continue
        elif is_none:
            n_none += 1
            continue
        entries.append(Entry(call.path, value, value, given))
    if not entries and not n_none:
        return None
    if key == "hidden_states" and entries and model.collectors[collector]:
        last = _last_hidden_state(unit, collector)
        if last is not None:
            entries[-1] = Entry(entries[-1].path, last, entries[-1].own, entries[-1].given)
    return Recorded(key, collector, _field(unit, collector, key, model), tuple(entries), n_none)


def _recorded_calls(
    layers: LayerIndex, model: ModelInfo, key: str, collector: str
) -> Iterator[tuple[ModuleCall, Capture]]:
    """Calls of recorded modules in the order in which they return, each once per recorder that matches it."""
    is_called = collector == "" or collector in layers.by_path
    if not is_called or not any(capture.owner == collector and capture.key == key for capture in model.captures):
        return
    captures = [capture for capture in model.captures if capture.key == key]
    called = [path for path, calls in layers.by_path.items() if layers.is_a(calls[0], _PRETRAINED)]
    models = {*called, *(capture.owner for capture in model.captures)}
    # Hooks are installed once, by the outermost model that collects: names are matched from there.
    root = min((path for path in model.collectors if _inside(collector, path)), key=len)
    for call in sorted(layers.calls, key=lambda item: item.end):
        if _nearest(call.path, model.collectors, strict=True) != collector:
            continue
        owner = _nearest(call.path, models, strict=False) or ""
        for capture in captures:
            if capture.owner == owner and _matches(layers, call, capture, root):
                yield call, capture


def _matches(layers: LayerIndex, call: ModuleCall, capture: Capture, root: str) -> bool:
    dotted = "." + (call.path.removeprefix(root + ".") if root else call.path)
    by_class = capture.target_class is not None and layers.is_a(call, capture.target_class)
    by_name = capture.class_name is not None and dotted.endswith(capture.class_name)
    if not (by_class or by_name):
        return False
    return capture.layer_name is None or f".{capture.layer_name.strip('.')}." in dotted + "."


def _inside(path: str, model: str) -> bool:
    return model == "" or path == model or path.startswith(model + ".")


def _nearest(path: str, models: Iterable[str], *, strict: bool) -> str | None:
    """The innermost of ``models`` that ``path`` lies in (``strict``: not itself); "" is the whole model."""
    inside = [model for model in models if _inside(path, model) and not (strict and path == model)]
    return max(inside, key=len, default=None)


def _last_hidden_state(unit: GraphUnit, collector: str) -> str | None:
    """What the collecting model returned as ``vision_hidden_states`` or ``last_hidden_state``."""
    names = ("vision_hidden_states", "last_hidden_state")
    if collector == "":
        fields = _fields(unit.interface.template)
        leaves = [fields.get(name) for name in names]
        return next((_output_node(unit, leaf["$"]) for leaf in leaves if isinstance(leaf, dict) and "$" in leaf), None)
    calls = unit.layers.by_path.get(collector)
    if not calls:  # used by its parts, never called itself: then it collects nothing either
        return None
    call = calls[0]
    outputs = dict(call.outputs)
    for name in names:
        spare = unit.layers.spare.outputs.get(f"{collector}#{call.occurrence}:{name}")
        if outputs.get(name) is not None or spare:
            return outputs.get(name) or f"{SPARE}{spare}"
    return None


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
    leaves = {
        name: [
            _output_node(unit, leaf["$"]) for leaf in _fields(child).values() if isinstance(leaf, dict) and "$" in leaf
        ]
        for name, child in fields.items()
    }
    path = collector
    while path:
        own = {node for call in unit.layers.by_path.get(path, ()) for _, node in call.outputs if node is not None}
        # Code around the collecting model may have replaced some of its fields since (a pooled, projected state), or
        # a model around it (text_model around text_model.roberta) is what returned them.
        same = {name: sum(leaf in own for leaf in nodes) for name, nodes in leaves.items()}
        best = max(same, key=lambda name: same[name], default=None)
        if best is not None and same[best]:
            return best
        path = path.rpartition(".")[0]
    return None


__all__ = ["record", "registry_keys"]
