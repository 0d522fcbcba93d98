"""Adapters at the public face: read one, give the pass what it needs, choose one for a call."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch

from layergraph.errors import InputError, NotSupportedError
from layergraph.ir.adapter import Adapter, Shadow, no_shadow
from layergraph.ir.program import Program
from layergraph.passes.base import Pass
from layergraph.passes.weave_shadow import WeaveShadow
from layergraph.trace.adapter_join import join_adapter
from layergraph.trace.adapter_plan import plan_shadow
from layergraph.trace.adapter_read import AdapterSource, read_adapter
from layergraph.trace.peft_model import is_peft_model

# Programs (by id) whose adapters are off in this thread or task: `with program.disable_adapter()`.
_DISABLED: ContextVar[frozenset[int]] = ContextVar("layergraph_disabled_adapters", default=frozenset())
_LOCK = threading.Lock()
# "Whichever adapter is active": None already means the base model.
ACTIVE: Any = type("ActiveAdapter", (), {"__repr__": lambda self: "the active adapter"})()


class AdapterMethods:
    """What a program can do with its adapters, in peft's words.

    The graph is a value, the choice of adapter is not: as in peft, these methods change the program they are called
    on. A call that runs meanwhile goes on with what it began with. Programs made by ``apply`` and ``remove`` have a
    choice of their own. Threads that want different adapters name them per call, ``program(..., adapter="name")``, or
    make a session each.
    """

    ir: Program

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """By name; empty where no shadow is woven in."""
        return MappingProxyType(dict(self.ir.shadow.adapters) if self.ir.shadow is not None else {})

    @property
    def active_adapter(self) -> str | None:
        """The adapter that a call uses which names none; None for the base model."""
        return chosen_adapter(self)

    def add_adapter(self, folder: Any, name: str, *, pad: bool = False) -> None:
        """Hold one more adapter, ready to be chosen. Nothing is traced or compiled.

        Args:
            folder: what peft's ``save_pretrained`` wrote, a Hub id, or a PeftModel.
            name: what it is called from now on.
            pad: fill one of a smaller rank or update width up with zeros, which change nothing; it is saved so.

        Raises:
            InputError: it is of another kind, differs from the others in what is part of the graph, has a tensor too
                few or too many, or the name is taken. The program is unchanged then.
            MissingFileError, FormatError, NotSupportedError: see :class:`layergraph.WeaveShadow`.
        """
        self._change(lambda program: add_adapter(program, folder, name, pad=pad))

    def set_adapter(self, name: str) -> None:
        """Use another adapter from now on.

        Raises:
            NotFoundError: there is none of that name.
        """
        self._change(lambda program: program.evolve(shadow=_shadow(program).with_active(name)))

    def delete_adapter(self, name: str) -> None:
        """Drop an adapter. If it was active, the first one left becomes so; without any, the base model answers.

        Raises:
            NotFoundError: there is none of that name.
        """
        self._change(lambda program: program.evolve(shadow=_shadow(program).without_adapter(name)))

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Within the block, and in this thread only, the base model answers: outputs are bit-equal to its own."""
        _shadow(self.ir)
        token = _DISABLED.set(_DISABLED.get() | {id(self)})
        try:
            yield
        finally:
            _DISABLED.reset(token)

    def adapter_inputs(self, name: str | None = None, graph: str = "forward") -> dict[str, torch.Tensor]:
        """What to give ``exported``, compiled or packaged, beside the model's own inputs; a call fills it in itself.

        Args:
            name: of the adapter; None for the active one. Strength zero (``shadow_alpha``) is the base model.

        Raises:
            NotFoundError: no adapter of that name.
        """
        return self.ir.adapter_inputs(graph, name if name is not None else chosen_adapter(self))

    def detach_shadow(self, name: str | None = None, copy: bool = False) -> Any:
        """The shadow of an adapter as a Hugging Face model of its own, which generates without the base.

        It computes ``head(projection(backbone(x)))``, what the auxiliary loss trains. ``layergraph.trace`` makes a
        small program of it.

        Args:
            name: of the adapter; the active one by default.
            copy: give it its own tensors. False shares them with the program. Either way it is complete,
                embeddings included.

        Raises:
            NotSupportedError: no shadow is woven in. NotFoundError: no adapter of that name, or none at all.
        """
        from layergraph.trace.adapter_detach import detach

        shadow = _shadow(self.ir)
        return detach(self.ir, shadow[name if name is not None else shadow.active or ""].name, copy=copy)

    unload_shadow = detach_shadow  # peft's name for it

    def merge_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: what a shadow does depends on the input.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError(
            "a shadow adapter cannot be merged into the base's weights: it is a trajectory that depends on the input, "
            "not a change of weights",
            do="keep the program as it is, or take the shadow alone with unload_shadow()",
        )

    merge_and_unload = unmerge_adapter = merge_adapter

    def _change(self, how: Callable[[Program], Program]) -> None:
        with _LOCK:
            self.ir = how(self.ir)


def chosen_adapter(program: AdapterMethods, named: Any = ACTIVE) -> str | None:
    """The adapter that a call of ``program`` in this thread uses, if it names ``named``."""
    if named is not ACTIVE:
        return None if named is None else str(named)
    if program.ir.shadow is None or id(program) in _DISABLED.get():
        return None
    return program.ir.shadow.active


def preparer(held: Shadow | None = None, model: Any = None) -> Callable[[Pass, Program], Pass]:
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
        first = held.active or (item.name if item.name in held.adapters else next(iter(held.adapters)))
        order = sorted(held.adapters, key=lambda name: name != first)
        return {name: AdapterSource.of(held[name].config, held[name].tensors) for name in order}
    if is_peft_model(model):
        return _named(read_adapter(model), item.name)
    raise InputError(
        "weave-shadow has no adapter",
        pass_name=item.pass_name,
        expected="an adapter, a config, or a PeftModel with a SHADOW adapter as the model",
        do="write layergraph.WeaveShadow(folder), or WeaveShadow(config={}) for an untrained one",
        shell="say which: --pass weave-shadow:adapter=FOLDER",
    )


def _named(sources: dict[str, AdapterSource], name: str | None) -> dict[str, AdapterSource]:
    """``name`` is for the active one; others keep theirs."""
    first, *others = sources
    return {name or first: sources[first], **{other: sources[other] for other in others}}


def add_adapter(program: Program, source: Any, name: str, *, pad: bool = False) -> Program:
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
    adapter = join_adapter(shadow, name, chosen, training=program.model.training, pad=pad)
    shadow = shadow.with_adapter(adapter)
    return program.evolve(shadow=shadow if shadow.active is not None else shadow.with_active(name))


def _shadow(program: Program) -> Shadow:
    if program.shadow is None:
        raise no_shadow()
    return program.shadow


__all__ = ["ACTIVE", "AdapterMethods", "add_adapter", "chosen_adapter", "preparer"]
