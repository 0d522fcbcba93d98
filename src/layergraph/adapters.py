"""Adapters at the public face: read one, give the pass what it needs, choose one for a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from layergraph.errors import InputError, NotSupportedError
from layergraph.ir.adapter import Shadow
from layergraph.ir.program import Program
from layergraph.passes.base import Pass
from layergraph.passes.weave_shadow import WeaveShadow
from layergraph.trace.adapter_plan import join_adapter, plan_shadow
from layergraph.trace.adapter_read import AdapterSource, read_adapter
from layergraph.trace.peft_model import is_peft_model

ACTIVE = object()
"""Stands for the adapter that is active, where a call names none."""


def preparer(held: Shadow | None = None, model: Any = None) -> Any:
    """A function that readies a pass for a program: reads adapters, traces the shadow backbone.

    Args:
        held: adapters to weave in again, where the pass names one of them (after ``remove`` of another pass).
        model: the PeftModel that the program was traced from, whose adapters a pass without its own takes.
    """

    def prepare(item: Pass, program: Program) -> Pass:
        if not isinstance(item, WeaveShadow) or item.plan is not None:
            return item
        return dataclasses.replace(item, plan=plan_shadow(program, _sources(item, held or program.shadow, model)))

    return prepare


def _sources(item: WeaveShadow, held: Shadow | None, model: Any) -> Mapping[str, AdapterSource]:
    if item.config is not None:
        return {item.name or "default": AdapterSource.of(item.config, None)}
    if item.adapter is not None:
        return _named(read_adapter(item.adapter), item.name)
    if held is not None and held.adapters:
        first = item.name if item.name in held.adapters else held.active or next(iter(held.adapters))
        order = sorted(held.adapters, key=lambda name: name != first)
        return {name: AdapterSource.of(held[name].config, held[name].tensors) for name in order}
    if is_peft_model(model):
        return _named(read_adapter(model), item.name)
    raise InputError(
        "weave-shadow has no adapter",
        pass_name=item.pass_name,
        expected="an adapter, a config, or a PeftModel with a SHADOW adapter as the model",
        do="write layergraph.WeaveShadow(folder), or WeaveShadow(config={}) for an untrained one",
    )


def _named(sources: dict[str, AdapterSource], name: str | None) -> dict[str, AdapterSource]:
    """``name`` is for the active one; others keep theirs."""
    first, *others = sources
    return {name or first: sources[first], **{other: sources[other] for other in others}}


def add_adapter(program: Program, source: Any, name: str) -> Program:
    """The program with one more adapter.

    Raises:
        NotSupportedError: no shadow is woven in. Otherwise as reading and fitting an adapter do.
    """
    shadow = _shadow(program)
    found = read_adapter(source)
    if name in found and len(found) > 1:
        chosen = found[name]
    else:
        chosen = next(iter(found.values()))
    adapter = join_adapter(shadow, name, chosen, training=program.model.training)
    shadow = shadow.with_adapter(adapter)
    return program.evolve(shadow=shadow if shadow.active is not None else shadow.with_active(name))


def choose(program: Program, name: str | None) -> Program:
    """The program with another adapter active; None for none."""
    return program.evolve(shadow=_shadow(program).with_active(name))


def delete_adapter(program: Program, name: str) -> Program:
    return program.evolve(shadow=_shadow(program).without_adapter(name))


def adapter_inputs(program: Program, wanted: tuple[str, ...], chosen: Any = ACTIVE) -> dict[str, torch.Tensor]:
    """Values of the graph inputs that belong to an adapter; none where no shadow is woven in.

    Args:
        wanted: input names of the graph.
        chosen: a name, None for the base model, :data:`ACTIVE` for the active one.

    Raises:
        NotFoundError: no such adapter. NotSupportedError: one is named, and no shadow is woven in.
    """
    if program.shadow is None:
        if chosen is not ACTIVE and chosen is not None:
            _shadow(program)
        return {}
    name = program.shadow.active if chosen is ACTIVE else chosen
    return program.shadow.inputs(name, wanted, program.state_dict)


def _shadow(program: Program) -> Shadow:
    if program.shadow is None:
        raise NotSupportedError(
            "no shadow is woven into this program",
            do="program.apply(layergraph.WeaveShadow(folder)) weaves one in; it has methods for more adapters then",
        )
    return program.shadow


__all__ = ["ACTIVE", "add_adapter", "adapter_inputs", "choose", "delete_adapter", "preparer"]
