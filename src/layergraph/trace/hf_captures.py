"""What transformers models can record (``_can_record_outputs``), read into data without touching class state.

Recorders are resolved to the classes that the model at hand really has. A patch mapping (``register_patch_mapping``)
may have replaced them; and since upstream writes replacements into class-level tables for good, a model of the
original classes may meet recorders that name a replacement of former days.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from layergraph.ir.program import Capture
from layergraph.trace.marks import qualified


def captures(model: nn.Module) -> Iterator[Capture]:
    """The ``_can_record_outputs`` of the model and of each model inside it, as data."""
    patches = patch_mapping()
    for path, module in model.named_modules():
        for key, recorders in (getattr(module, "_can_record_outputs", None) or {}).items():
            for recorder in recorders if isinstance(recorders, list) else [recorders]:
                for one in _one_class_each(recorder):
                    yield _capture(path, module, key.removeprefix("output_"), one, patches)


def collectors(model: nn.Module) -> dict[str, bool]:
    """Models whose forward carries upstream's ``capture_outputs``, and whether it ties the last hidden state."""
    found = {}
    for path, module in model.named_modules():
        tie = _tie_flag(type(module))
        if tie is not None:
            own = getattr(getattr(module, "config", None), "tie_last_hidden_states", None)
            found[path] = tie if own is None else bool(own)
    return found


def patch_mapping() -> Mapping[str, type]:
    """A copy of transformers' registered replacements: class name or regex -> class."""
    try:
        from transformers.monkey_patching import get_patch_mapping
    except ImportError:
        return {}
    return dict(get_patch_mapping())


def find_replacement(name: str, patches: Mapping[str, type]) -> type | None:
    """As upstream resolves it: the exact name first, else the first pattern found anywhere in it."""
    if name in patches:
        return patches[name]
    for pattern, replacement in patches.items():
        try:
            if re.search(pattern, name):
                return replacement
        except re.error:
            continue  # upstream takes what is no regex as a plain name
    return None


def _one_class_each(recorder: Any) -> Iterator[Any]:
    """A recorder of several classes as one of each; a class that another covers would record its modules twice."""
    classes = getattr(recorder, "target_class", None)
    if not isinstance(classes, tuple):
        yield recorder
        return
    for cls in classes:
        if not any(other is not cls and issubclass(cls, other) for other in classes):
            yield replace(recorder, target_class=cls)


def _capture(owner: str, module: nn.Module, key: str, recorder: Any, patches: Mapping[str, type]) -> Capture:
    index = 0 if "hidden_states" in key else 1
    layer_name, initial = None, True
    target, class_name = (None, recorder) if isinstance(recorder, str) else (recorder, None)
    if not isinstance(recorder, (str, type)):
        target, class_name = recorder.target_class, recorder.class_name
        index, layer_name = recorder.index, recorder.layer_name
        initial = recorder.capture_initial_hidden_state
    name = target.__name__ if isinstance(target, type) else class_name
    replacement = find_replacement(name, patches) if name else None
    if replacement is not None and _has(module, replacement):
        target, class_name = replacement, None
    elif isinstance(target, type):
        target = _present(module, target)
    return Capture(
        owner, key, qualified(target) if isinstance(target, type) else None, class_name, index, layer_name, initial
    )


def _has(model: nn.Module, cls: type) -> bool:
    return any(isinstance(module, cls) for module in model.modules())


def _present(model: nn.Module, cls: type) -> type:
    """``cls``, or where the model has none: the class it was made to replace, a base of it defined beside the model."""
    if _has(model, cls):
        return cls
    for base in cls.__mro__[1:]:
        if base.__module__ == type(model).__module__ and _has(model, base):
            return base
    return cls


def _tie_flag(cls: type) -> bool | None:
    """``tie_last_hidden_states`` as given to the decorator on forward, or None where forward does not carry it."""
    function = getattr(cls, "forward", None)
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "tie_last_hidden_states" in code.co_freevars:
            return bool(inspect.getclosurevars(function).nonlocals["tie_last_hidden_states"])
        function = getattr(function, "__wrapped__", None)
    return None


__all__ = ["captures", "collectors", "find_replacement", "patch_mapping"]
