"""Compiler-style graph rewriting for Hugging Face and peft models, on ``torch.export``."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layergraph import testing
    from layergraph.api import load, optimize, trace
    from layergraph.errors import LayerGraphError
    from layergraph.ir.edit import Edit
    from layergraph.ir.weights import Remap, RemapKind, WeightMap, register_remap
    from layergraph.passes import (
        Findings,
        FusePatchEmbed,
        Pass,
        Refusal,
        Site,
        TapOutputs,
        WeaveShadow,
        register_pass,
    )
    from layergraph.program import Program
    from layergraph.runtime.cache import DualCache
    from layergraph.trace.adapter_detach import DetachedShadow

__version__ = "0.1.0"

# Where each public name lives. Loaded when first asked for: the command line answers --help without importing torch.
_HOMES = {
    "DetachedShadow": "layergraph.trace.adapter_detach",
    "DualCache": "layergraph.runtime.cache",
    "Edit": "layergraph.ir.edit",
    "Findings": "layergraph.passes",
    "FusePatchEmbed": "layergraph.passes",
    "LayerGraphError": "layergraph.errors",
    "Pass": "layergraph.passes",
    "Program": "layergraph.program",
    "Refusal": "layergraph.passes",
    "Remap": "layergraph.ir.weights",
    "RemapKind": "layergraph.ir.weights",
    "Site": "layergraph.passes",
    "TapOutputs": "layergraph.passes",
    "WeaveShadow": "layergraph.passes",
    "WeightMap": "layergraph.ir.weights",
    "load": "layergraph.api",
    "optimize": "layergraph.api",
    "register_pass": "layergraph.passes",
    "register_remap": "layergraph.ir.weights",
    "trace": "layergraph.api",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name == "testing":
        return importlib.import_module("layergraph.testing")
    raise AttributeError(f"module 'layergraph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``layergraph.trace`` the function: importing the sub-package of that name would take its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

__all__ = [
    "DetachedShadow",
    "DualCache",
    "Edit",
    "Findings",
    "FusePatchEmbed",
    "LayerGraphError",
    "Pass",
    "Program",
    "Refusal",
    "Remap",
    "RemapKind",
    "Site",
    "TapOutputs",
    "WeaveShadow",
    "WeightMap",
    "__version__",
    "load",
    "optimize",
    "register_pass",
    "register_remap",
    "testing",
    "trace",
]
