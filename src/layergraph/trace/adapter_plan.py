"""From a program and its adapters to a plan for weaving: blocks, slots, graph inputs, the traced backbone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from layergraph.errors import LayerGraphError, NotSupportedError
from layergraph.ir.adapter import AdapterSlot, SavedModule, Shadow, ShadowPlan
from layergraph.ir.cache_geometry import SHADOW
from layergraph.ir.program import GraphUnit, Program
from layergraph.trace.adapter_backbone import Backbone, BaseLayout, build_backbone, describe_base, embedding_width
from layergraph.trace.adapter_config import ShadowSettings, find_blocks
from layergraph.trace.adapter_join import join_adapter
from layergraph.trace.adapter_read import AdapterSource
from layergraph.trace.export import trace_cached
from layergraph.trace.span import trace_span

_PASS = "weave-shadow"
_ROOT = "base_model"
_TOKENS = ("input_ids", "inputs_embeds")
# Arguments of the shadow ops, and where peft keeps each.
_PLACES = {
    "down_weight": "shadow_down.default.weight",
    "up_weight": "shadow_up.default.weight",
    **{
        f"{letter}{number}_{kind}": f"shadow_update_{part}.default.{2 * number - 2}.{kind}"
        for letter, part in (("t", "transform"), ("g", "gate"))
        for number in (1, 2)
        for kind in ("weight", "bias")
    },
}


def plan_shadow(program: Program, sources: Mapping[str, AdapterSource]) -> ShadowPlan:
    """How to weave the adapters in ``sources`` (the first becomes active) into ``program``.

    Raises:
        NotFoundError, InputError: blocks that are not there or not contiguous, tensors that do not fit.
        NotSupportedError: a base without a decoder's layout.
    """
    (name, first), *others = sources.items()
    settings = first.settings
    base = describe_base(program)
    blocks = find_blocks(settings, base.stack, by_index=first.tensors is None)
    backbone = build_backbone(base, settings, has_weights=first.tensors is not None)
    backbones, because = _trace_backbones(program, base, backbone)
    held = set(backbone.module.state_dict())
    used = {
        target
        for unit in backbones.values()
        for name, target in unit.targets.items()
        if unit.nodes[name].users and target in held
    }
    saved, saved_slots = _saved_modules(program, settings)
    fresh = _fresh_tensors(program, base, settings, blocks, backbone, saved_slots)
    slots = list(_slots(fresh, blocks, backbone, used, saved_slots, has_loss(program)))
    geometry = describe_geometry(settings, base, blocks, training=program.model.training)
    geometry["takes_embeddings"] = backbone.shares or _fits_embeddings(base, backbone)
    shadow = Shadow(tuple(slots), geometry)
    training = program.model.training
    tensors = fresh if first.tensors is None else first.tensors
    config = first.config if first.tensors is not None else _exact(first.config, blocks)
    shadow = shadow.with_adapter(shadow.fit(name, config, tensors, training=training)).with_active(name)
    for other, source in others:
        shadow = shadow.with_adapter(join_adapter(shadow, other, source, training=training))
    inputs = {slot.key: slot.input for slot in slots}
    return ShadowPlan(
        shadow=shadow,
        blocks=blocks,
        roles=tuple({role: inputs[_layer_key(path, role)] for role in _PLACES} for path in blocks),
        backbones=backbones,
        backbone_state={target: str(inputs[_backbone_key(target)]) for target in sorted(used)},
        embeddings=base.embeddings if backbone.shares else None,
        projection=inputs.get(_projection_key("weight")),
        saved=saved,
        head=_head_path(base, settings),
        head_state=_head_state(inputs) if _is_trained_head(settings) else {},
        task=settings.task_type,
        dropout=settings.shadow_dropout,
        fresh=first.tensors is None and settings.init_weights,
        uncached_because=because,
    )


def has_loss(program: Program) -> bool:
    """Whether the graph takes labels and returns a loss, to which the auxiliary one is added."""
    interface = program.forward.interface
    return "labels" in interface.input_names and "loss" in interface.outputs


def describe_geometry(
    settings: ShadowSettings, base: BaseLayout, blocks: tuple[str, ...], *, training: bool
) -> dict[str, Any]:
    """What is part of the graph, so that all adapters of one program have to agree on it."""
    geometry: dict[str, Any] = {
        "stack": list(base.stack),
        "width": base.width,
        "blocks": list(blocks),
        "r": settings.r,
        "update_hidden_size": settings.update_size,
        "shadow_model": settings.shadow_model,
        "shadow_num_hidden_layers": settings.shadow_num_hidden_layers or 1,
        "shadow_hidden_size": settings.shadow_hidden_size or base.width,
        "shadow_num_attention_heads": settings.shadow_num_attention_heads,
        "shadow_intermediate_size": settings.shadow_intermediate_size,
        "share_embeddings": settings.share_embeddings,
        "modules_to_save": list(settings.modules_to_save or ()),
        "task_type": settings.task_type,
    }
    return {**geometry, "shadow_dropout": settings.shadow_dropout} if training else geometry


def _slots(
    fresh: Mapping[str, torch.Tensor],
    blocks: tuple[str, ...],
    backbone: Backbone,
    used: set[str],
    saved: Mapping[str, tuple[str, str]],
    has_loss: bool,
) -> Any:
    read = {_backbone_key(target) for target in used}
    last = blocks[-1]
    frozen = _frozen_keys(backbone)
    taken: set[str] = set()
    for key, tensor in fresh.items():
        # What the update after the last block makes is read by nothing, and the head only by the auxiliary loss.
        is_read = key in read or not (
            key.startswith((_backbone_key(""), f"{_ROOT}.model.{last}.shadow_update_"))
            or (key.startswith(_head_key("")) and not has_loss)
        )
        name = _input_name(key) if is_read else None
        if name in taken:
            raise NotSupportedError("two adapter tensors would have one input name", pass_name=_PASS, found=name)
        if name is not None:
            taken.add(name)
        base = saved[key][1] if key in saved else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield AdapterSlot(key, tuple(tensor.shape), dtype, name, base, key in frozen)


def _input_name(key: str) -> str:
    """``base_model.model.model.layers.0.shadow_down.default.weight`` -> ``shadow_layers_0_down_weight``."""
    for role, place in _PLACES.items():
        if key.endswith("." + place):
            block = key.removeprefix(f"{_ROOT}.model.").removesuffix("." + place)
            return f"shadow_layers_{block.rpartition('.')[2]}_{role}"
    short = key.removeprefix(f"{_ROOT}.").replace("shadow_backbone.default", "shadow_backbone")
    short = short.replace("shadow_projection.default", "shadow_projection").replace(
        "shadow_head.default", "shadow_head"
    )
    short = short if short.startswith("shadow_") else "shadow_saved_" + short.removeprefix("model.")
    return re.sub(r"\W", "_", short)


def _layer_key(path: str, role: str) -> str:
    return f"{_ROOT}.model.{path}.{_PLACES[role]}"


def _backbone_key(target: str) -> str:
    return f"{_ROOT}.shadow_backbone.default.{target}"


def _projection_key(parameter: str) -> str:
    return f"{_ROOT}.shadow_projection.default.{parameter}"


def _head_key(parameter: str) -> str:
    return f"{_ROOT}.shadow_head.default.{parameter}"


def _frozen_keys(backbone: Backbone) -> set[str]:
    """A pretrained backbone keeps its embeddings, as in peft."""
    if not backbone.is_pretrained:
        return set()
    embeddings = backbone.module.get_input_embeddings()
    paths = [path for path, module in backbone.module.named_modules() if module is embeddings]
    return {_backbone_key(f"{path}.{name}") for path in paths for name, _ in embeddings.named_parameters()}


def _fresh_tensors(
    program: Program,
    base: BaseLayout,
    settings: ShadowSettings,
    blocks: tuple[str, ...],
    backbone: Backbone,
    saved: Mapping[str, tuple[str, str]],
) -> dict[str, torch.Tensor]:
    """Every tensor of an untrained adapter, by key, in the order of peft's checkpoints."""
    # peft keeps these in float32 on half-precision bases, and in float32 on float64 ones too.
    made: dict[str, torch.Tensor] = {}
    for key, (_, target) in saved.items():
        made[key] = program.state_dict[target].detach().clone()
    for path in blocks:
        for role, tensor in _fresh_layer(base, settings).items():
            made[_layer_key(path, role)] = tensor
    for target, tensor in backbone.module.state_dict().items():
        made[_backbone_key(target)] = tensor.detach()
    if backbone.projection is not None:
        made[_projection_key("weight")] = backbone.projection.weight.detach()
    if _is_trained_head(settings):
        path = _classifier(base)
        for parameter, _ in base.skeleton.get_submodule(path).named_parameters():
            made[_head_key(parameter)] = program.state_dict[f"{path}.{parameter}"].detach().clone()
    return made


def _fresh_layer(base: BaseLayout, settings: ShadowSettings) -> dict[str, torch.Tensor]:
    width, rank, inner = base.width, settings.r, settings.update_size
    device = base.device
    modules = {
        "down": nn.Linear(width, rank, bias=False, device=device),
        "up": nn.Linear(rank, width, bias=False, device=device),
        "t1": nn.Linear(width, inner, device=device),
        "t2": nn.Linear(inner, width, device=device),
        "g1": nn.Linear(width, inner, device=device),
        "g2": nn.Linear(inner, width, device=device),
    }
    if settings.init_weights:
        nn.init.zeros_(modules["up"].weight)
    return {
        f"{name}_{kind}": tensor.detach().float()
        for name, module in modules.items()
        for kind, tensor in module.named_parameters()
    }


def _trace_backbones(program: Program, base: BaseLayout, backbone: Backbone) -> tuple[dict[str, GraphUnit], str | None]:
    """The backbone for each graph of the program, and why there is none for the cached one."""
    units = {"forward": _trace_backbone(program, backbone)}
    if "step" not in program.graphs:
        return units, program.model.uncached_because
    embeddings = "only" if backbone.shares else "either" if _fits_embeddings(base, backbone) else "never"
    width = embedding_width(backbone.module.config)
    try:
        units["step"] = trace_cached(backbone.module, half=SHADOW, embeddings=embeddings, width=width)
    except LayerGraphError as error:
        return units, f"the shadow backbone has no cached graph: {error.found or error.what}"
    return units, None


def _fits_embeddings(base: BaseLayout, backbone: Backbone) -> bool:
    """Whether a backbone with a table of its own can take the base's embeddings in place of ids."""
    return "inputs_embeds" in inspect.signature(backbone.module.forward).parameters and (
        embedding_width(backbone.module.config) == base.width
    )


def _trace_backbone(program: Program, backbone: Backbone) -> GraphUnit:
    """The backbone over the inputs that the program's own graph takes."""
    unit = program.forward
    given = {item.name: item for item in unit.interface.inputs}
    generator = torch.Generator().manual_seed(0)
    config = backbone.module.config
    parameter = next(backbone.module.parameters())
    device = parameter.device
    main = "inputs_embeds" if backbone.shares or "input_ids" not in given else "input_ids"
    # As long as what the base was traced with: models that cut text into chunks need more than one.
    shown: Mapping[str, torch.Tensor] = (unit.exported.example_inputs or ((), {}))[1]
    batch, length = next((tensor.shape[:2] for name, tensor in shown.items() if name in _TOKENS), (2, 7))
    if main == "inputs_embeds":
        if not backbone.shares and "inputs_embeds" not in given:
            raise NotSupportedError(
                "the shadow has nothing to start from",
                pass_name=_PASS,
                expected="an input called input_ids or inputs_embeds",
                found=", ".join(given),
            )
        width = embedding_width(config)
        examples = {main: torch.randn(batch, length, width, generator=generator).to(device, parameter.dtype)}
    else:
        vocabulary = int(config.vocab_size)
        examples = {main: torch.randint(1, vocabulary, (batch, length), generator=generator).to(device)}
    mask = given.get("attention_mask")
    if mask is not None:
        if len(mask.shape) != 2:
            raise NotSupportedError(
                "the shadow needs a mask over tokens",
                pass_name=_PASS,
                expected="[batch, sequence]",
                found=str(mask.shape),
            )
        examples["attention_mask"] = torch.ones(batch, length, dtype=getattr(torch, mask.dtype), device=device)
        examples["attention_mask"][-1, :2] = 0
    if "position_ids" in given:
        examples["position_ids"] = torch.arange(length, device=device).expand(batch, -1).contiguous()
    dims = {name: {0: "batch", 1: "sequence"} for name in examples}
    return trace_span(backbone.module, examples, dims, training=program.model.training)


def _saved_modules(
    program: Program, settings: ShadowSettings
) -> tuple[tuple[SavedModule, ...], dict[str, tuple[str, str]]]:
    """Modules that adapters bring a copy of; and checkpoint key -> (path, base weight)."""
    modules, slots = [], {}
    aliases = program.aliases
    for path in program.forward.layers.by_path:
        if not any(path == name or path.endswith(name) for name in settings.modules_to_save or ()):
            continue
        inputs = {}
        names = [name for name in program.state_dict if name.startswith(path + ".")]
        for name in names:
            kept = aliases.get(name, name)
            key = f"{_ROOT}.model.{name}"
            slots[key] = (path, kept)
            inputs[kept] = _input_name(key)
        modules.append(SavedModule(path, inputs))
    return tuple(modules), slots


def _is_trained_head(settings: ShadowSettings) -> bool:
    return settings.task_type == "SEQ_CLS"


def _classifier(base: BaseLayout) -> str:
    for name in ("score", "classifier"):
        if isinstance(getattr(base.skeleton, name, None), nn.Module):
            return name
    raise NotSupportedError(
        "no classification head", pass_name=_PASS, expected="score or classifier", found=type(base.skeleton).__name__
    )


def _head_path(base: BaseLayout, settings: ShadowSettings) -> str | None:
    if _is_trained_head(settings):
        return _classifier(base)
    return base.head if settings.task_type == "CAUSAL_LM" else None


def _head_state(inputs: Mapping[str, str | None]) -> dict[str, str]:
    prefix = _head_key("")
    return {key.removeprefix(prefix): str(name) for key, name in inputs.items() if key.startswith(prefix)}


def _exact(config: Mapping[str, Any], blocks: tuple[str, ...]) -> dict[str, Any]:
    """A configuration that names its blocks in full, which every version of peft reads the same way."""
    plain = {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None}
    return {**config, **plain, "target_modules": list(blocks)}


__all__ = ["describe_geometry", "has_loss", "plan_shadow"]
