"""What a model adds to its return value when asked: which fields, and which module's values stand in them.

``_can_record_outputs`` tells what hooks of transformers collect. It does not tell what a model collects in code of its
own (``all_hidden_states += (hidden_states,)``), nor in which field a model around it returns that
(``vision_hidden_states``). So models of that kind are run once more, after the trace, on tensors without data and with
the flags on; every entry of a new tuple is then found again, by identity, among what modules took and gave.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from layergraph.ir.layers import LayerIndex, ModuleCall
from layergraph.trace.flatten import flatten_output
from layergraph.trace.hf_captures import captures, collectors
from layergraph.trace.marks import Recorder

Returned = dict[str, dict[str, tuple[tuple[str, ...], ...]]]

_FLAGS = ("hidden_states", "attentions", "router_logits")
# Modules that pass a value on without a change; more than these say nothing new.
_MOST = 6


def find_returned(
    model: nn.Module, arguments: Mapping[str, Any], layers: LayerIndex, context: AbstractContextManager[Any]
) -> Returned:
    """For each key (``hidden_states``), the fields it fills, and where each entry of a field comes from.

    A source is ``path#occurrence:key`` of a module call's output, or the same behind ``>`` of its input. Empty where
    one model alone collects, by its table: then the table says it all. Empty, too, where the run cannot be done
    without data.

    Args:
        model: the private copy that was traced.
        arguments: what the trace called it with.
        layers: what the trace recorded.
        context: what held during the trace.
    """
    by_hand = _flags_by_hand(model)
    tables = collectors(model)
    if not by_hand and len(tables) < 2:
        return {}
    keys = list(dict.fromkeys([*(item.key for item in captures(model) if tables), *by_hand]))
    with context:
        plain, _ = _run(model, arguments, ())
        if plain is None:
            return {}
        asked, seen = _run(model, arguments, keys)
        runs = [(keys, asked, seen)]
        if asked is None or any(_key_of(name, keys) is None and name not in plain for name in asked):
            # One flag at a time tells which of them fills a field that is called otherwise.
            runs = [([key], *_run(model, arguments, (key,))) for key in keys]
    found: Returned = {key: {} for key in by_hand}
    for flags, tensors, seen in runs:
        for name in tensors or ():
            field, position = _place(name)
            key = _key_of(name, keys) or (flags[0] if len(flags) == 1 else None)
            if position and key is not None and name not in plain:
                entries = found.setdefault(key, {}).get(field, ())
                entries += ((),) * (position[0] + 1 - len(entries))
                if len(position) == 1 and tensors is not None:
                    sources = tuple(seen.sources(tensors[name], layers))
                    entries = (*entries[: position[0]], sources, *entries[position[0] + 1 :])
                found[key][field] = entries
    return found


def _key_of(name: str, keys: Sequence[str]) -> str | None:
    """The key that a flat output name's field is called after: ``decoder_hidden_states.3``."""
    field = _place(name)[0].rpartition(".")[2]
    return max((key for key in keys if field.endswith(key)), key=len, default=None)


def _flags_by_hand(model: nn.Module) -> list[str]:
    """Keys whose flags some forward in ``model`` takes by name, to act on them itself."""
    taken: set[str] = set()
    for cls in {type(module) for module in model.modules()}:
        taken.update(inspect.signature(cls.forward).parameters)
    return [key for key in _FLAGS if f"output_{key}" in taken]


def _place(name: str) -> tuple[str, list[int]]:
    """A flat output name as field and position in it: ``encoder_hidden_states.3``."""
    parts = name.split(".")
    n_numbers = 0
    while n_numbers < len(parts) - 1 and parts[-1 - n_numbers].isdigit():
        n_numbers += 1
    fields = parts[: len(parts) - n_numbers]
    return ".".join(fields), [int(part) for part in parts[len(fields) :]]


class _Identities(Recorder):
    """A recorder of module calls that keeps the tensors themselves instead of marking them in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[torch.Tensor, int]] = []

    def _mark(self, value: Any, skip: int) -> list[tuple[str, int | None]]:
        marks: list[tuple[str, int | None]] = []
        for keys, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor) or leaf is None:
                text = ".".join(str(getattr(k, "idx", getattr(k, "key", getattr(k, "name", k)))) for k in keys[skip:])
                marks.append((text, None if leaf is None else len(self._kept)))
                if leaf is not None:
                    self._kept.append((leaf, leaf._version))
        return marks

    def sources(self, tensor: torch.Tensor, layers: LayerIndex) -> Iterator[str]:
        """Where ``tensor`` was seen, outputs first, as far as the trace has the same there."""
        places: list[str] = []
        for call in self.calls:
            traced = layers.by_path.get(call.path, ())
            same = traced[call.occurrence] if call.occurrence < len(traced) else None
            for sign, marks in (("", call.outputs), (">", call.inputs)):
                for key, mark in marks:
                    # What was written to since is another value now.
                    if mark is None or self._kept[mark][0] is not tensor or self._kept[mark][1] != tensor._version:
                        continue
                    if same is not None and (sign or _is_at_same_place(same, key, [name for name, _ in marks])):
                        places.append(f"{sign}{call.path}#{call.occurrence}:{key}")
        inner = {path for paths in layers.stacks.values() for path in paths}
        places.sort(key=lambda text: (text.startswith(">"), text.lstrip(">").partition("#")[0] not in inner))
        yield from places[:_MOST]


def _is_at_same_place(traced: ModuleCall, key: str, keys: list[str]) -> bool:
    """Whether ``key`` means the same in the trace.

    A flag may have put another value into the middle of a tuple, and other values at all into a list: feature maps of
    the stages that were asked for (timm).
    """
    if key == "" or traced.returns == "mapping" or [name for name, _ in traced.outputs] == keys:
        return True
    return key == "0" and traced.returns != "list"


def _run(
    model: nn.Module, arguments: Mapping[str, Any], keys: Sequence[str]
) -> tuple[dict[str, torch.Tensor] | None, _Identities]:
    """The tensors that ``model`` returns when asked for ``keys``, and all that its modules saw; None where it fails.

    Without data where that works; some code reads values on the host (sizes of feature maps as a tensor).
    """
    flags = {f"output_{key}": True for key in keys}
    has_data = not any(tensor.device.type == "meta" for tensor in model.parameters())
    for without_data in (True, False) if has_data else (True,):
        for passed, configured in ((flags, {}), ({}, flags)) if flags else ((flags, flags),):
            seen = _Identities()
            with (
                contextlib.suppress(Exception),
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                ExitStack() as held,
            ):
                given = dict(arguments)
                if without_data:
                    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
                    held.enter_context(_silent())
                    held.enter_context(mode)
                    given = pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
                else:
                    given = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, given)
                held.enter_context(_configured(model, configured))
                held.enter_context(_unhooked(model))
                held.enter_context(seen.watch(model))
                return flatten_output(model.forward(**given, **passed))[1], seen
    return None, seen


@contextmanager
def _unhooked(model: nn.Module) -> Iterator[None]:
    """Without the hooks that the block installs: transformers adds them twice where other models collect next time."""
    flag = "_output_capturing_hooks_installed"
    hooks = [(module, list(module._forward_hooks.items()), vars(module).get(flag)) for module in model.modules()]
    try:
        yield
    finally:
        for module, before, installed in hooks:
            module._forward_hooks.clear()
            module._forward_hooks.update(before)
            vars(module).pop(flag, None)
            if installed is not None:
                setattr(module, flag, installed)


@contextmanager
def _silent() -> Iterator[None]:
    """torch logs at length what an operator without data cannot do; here that is no error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _configured(model: nn.Module, flags: Mapping[str, Any]) -> Iterator[None]:
    """The flags set in every config of ``model``, for forwards that take no such argument."""
    before: list[tuple[Any, str, Any]] = []
    for config in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
        for name, value in flags.items():
            old = getattr(config, name, False)
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                setattr(config, name, value)
                before.append((config, name, old))
    try:
        yield
    finally:
        for config, name, old in before:
            setattr(config, name, old)


__all__ = ["Returned", "find_returned"]
