"""Why a tap finds nothing, or leaves a value alone, in words that help."""

from __future__ import annotations

import difflib
from typing import Any

from layergraph.errors import InputError, LayerGraphError, NotFoundError
from layergraph.ir.program import GraphUnit, Program
from layergraph.passes.base import Refusal
from layergraph.passes.tap_registry import registry_keys
from layergraph.passes.tap_targets import ops_within
from layergraph.passes.tap_values import Entry, Recorded

_EAGER = 'load the model with attn_implementation="eager" and trace again'
_EAGER_SHELL = "optimize the model's folder with --attention eager"
_PATHS = "tap a module path instead; program.print() shows them"
_PATHS_SHELL = "tap a module path instead; layergraph dump shows them"


def nothing_recorded(key: str, tuples: list[Recorded], program: Program, unit: GraphUnit) -> LayerGraphError:
    """Why a key of the model gives no entries: it is returned already, modules return None, or none is traced."""
    if any(name.startswith(f"{key}.") for name in unit.interface.outputs):
        return InputError(
            f"the graph returns {key} already",
            pass_name="tap-outputs",
            do=f"read .{key} of what the program returns",
            shell="leave that tap out",
        )
    if any(item.key == key and item.n_none for item in tuples) or unit.layers.returned.get(key) == {}:
        attention = program.model.attention if program.model.attention != "eager" else None
        return InputError(
            f"no {key} to tap: the recorded modules return None there",
            pass_name="tap-outputs",
            expected="attention weights" if "attention" in key else "tensors",
            found=f"traced with {attention} attention, which does not compute weights" if attention else "None",
            do=_EAGER if attention else _PATHS,
            shell=_EAGER_SHELL if attention else _PATHS_SHELL,
        )
    return NotFoundError(
        f"the model records {key!r}, but no module of the traced graph matches",
        pass_name="tap-outputs",
        do=_PATHS,
        shell=_PATHS_SHELL,
    )


def nothing_matches(what: Any, program: Program, unit: GraphUnit) -> LayerGraphError:
    """Why a name matches nothing: it is a key in a list, an output of the graph, or not there."""
    text = getattr(what, "pattern", getattr(what, "__qualname__", what))
    known = registry_keys(program.model, unit.layers)
    if text in known:  # in a list; alone it is a tuple with entries of its own
        return NotFoundError(
            f"{text!r} is a key of the model, which a list does not take",
            pass_name="tap-outputs",
            expected="module paths, globs, regexes, classes, ops or nodes",
            do=f"tap it by itself, with one more TapOutputs({text!r})",
            shell=f"tap it by itself: --tap {text}",
        )
    if text in unit.interface.outputs:
        return InputError(
            f"the graph returns {text} already",
            pass_name="tap-outputs",
            do=f"read .{text} of what the program returns",
            shell="leave that tap out",
        )
    near = difflib.get_close_matches(str(text), [*known, *unit.layers.by_path], n=3, cutoff=0.5)
    keys = ", ".join(known) or "none"
    return NotFoundError(
        f"{text!r} matches nothing to tap",
        pass_name="tap-outputs",
        expected=f"a key the model records ({keys}), a module path, glob, regex or class, an op (PATH::softmax#0), "
        "or a node (%add_9)",
        found=f"nearest: {', '.join(near)}" if near else None,
        do="program.print() shows the module paths",
        shell="layergraph dump shows the module paths",
    )


def no_such_op(what: str, program: Program, unit: GraphUnit) -> LayerGraphError:
    """Why ``scope::op`` matches nothing, and which ops there are instead."""
    scope, _, rest = what.partition("::")
    ops = ops_within(unit, scope)
    if not ops:
        return nothing_matches(scope, program, unit)
    attention = program.model.attention
    is_fused = rest.partition("#")[0] == "softmax" and attention not in (None, "eager")
    return NotFoundError(
        f"{what!r} matches nothing to tap",
        pass_name="tap-outputs",
        path=scope,
        expected=f"an op that runs there: {', '.join(ops)}",
        found=f"traced with {attention} attention, which is one op" if is_fused else None,
        do=_EAGER if is_fused else "name one of these",
        shell=_EAGER_SHELL if is_fused else None,
    )


def refuse(path: str, is_none: bool) -> Refusal:
    if is_none:
        return Refusal(path, "R1", "a tensor", "None")
    return Refusal(
        path, "R2", "a value that plain ops compute", "one that nothing used, and that needs more than those"
    )


def refuse_between(entry: Entry) -> Refusal:
    return Refusal(entry.path, "R2", "a value that a module takes or gives", "one that code between modules makes")


__all__ = ["no_such_op", "nothing_matches", "nothing_recorded", "refuse", "refuse_between"]
