"""The wiring: trace, optimize, load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from layergraph.adapters import preparer
from layergraph.compat import warn_if_untested
from layergraph.errors import InputError, NotSupportedError
from layergraph.ir import folder as folders
from layergraph.passes import pipeline
from layergraph.passes.base import Pass
from layergraph.passes.fuse_patch_embed import FusePatchEmbed
from layergraph.passes.weave_shadow import WeaveShadow
from layergraph.program import Program
from layergraph.progress import Progress, progress_line
from layergraph.trace.export import trace as trace_model
from layergraph.trace.peft_model import is_peft_model, unwrap_shadow
from layergraph.verification import checker

# What a model's ``fusion_config`` may ask for, and the pass that does it.
FUSIONS: dict[str, type[Pass]] = {"patch_embeddings": FusePatchEmbed}


def trace(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    dynamic: bool | Mapping[str, Mapping[int, str]] = True,
    training: bool = False,
    cached: bool | None = None,
    progress: Progress = None,
) -> Program:
    """The program of ``model``, untouched by any pass.

    Args:
        model: any ``nn.Module``. Hugging Face models need no example inputs.
        example_inputs: keyword arguments of forward as a mapping, positional ones as a tuple, or one tensor.
        dynamic: True finds out which sizes may vary (batch and sequence; patches and images for vision towers),
            False fixes all, a mapping names them: ``{"x": {0: "batch"}}``.
        training: keep dropout alive and gradients flowing, over copies of the weights.
        cached: trace a decoder's cached graph (``step``) too, so that it generates; None where that is possible.
        progress: None shows progress on a terminal, True always, False never; a function gets each line.

    The model is not changed; unless ``training``, its weights are shared.

    Raises:
        TraceError: the model cannot be exported; names the module and torch's reason.
        InputError, InputTypeError, NotSupportedError: the model or the inputs are of a kind that cannot be traced.
    """
    warn_if_untested()
    with progress_line(progress) as say:
        return Program(
            trace_model(model, example_inputs, dynamic=dynamic, training=training, cached=cached, progress=say)
        )


def optimize(
    model: nn.Module | Program,
    passes: Sequence[Pass | str] | None = None,
    *,
    example_inputs: Any = None,
    fusion_config: Mapping[str, Any] | None = None,
    verify: bool = False,
    strict: bool = False,
    progress: Progress = None,
) -> Program:
    """Trace ``model`` (unless it is a program) and run passes on it, in order.

    Args:
        passes: pass objects, or names where no options are needed. None runs what the model's config asks for.
        example_inputs: see :func:`trace`.
        fusion_config: as in transformers: ``{"patch_embeddings": True}``; instead of ``passes``.
        verify: run each pass's promise on the example inputs and report the largest error; keeps dropped weights.
        strict: raise where a pass finds nothing, or refuses a site.
        progress: see :func:`trace`.

    Raises:
        RefusedError: see ``strict``. PromiseError: see ``verify``. Otherwise as :func:`trace` and the passes do.
    """
    warn_if_untested()
    chosen = pipeline.resolve(passes) if passes is not None else None
    if fusion_config is not None:
        if chosen is not None:
            raise InputError("passes and fusion_config are two ways to say the same", do="give one of them")
        chosen = passes_of(fusion_config)
    if chosen is None:
        chosen = _passes_of_config(model)
    prepare = preparer(model=model)
    with progress_line(progress) as say:
        if isinstance(model, Program):
            program = model.ir
        else:
            # The shadow of a PeftModel is woven in by the pass: traced is the base under it.
            is_woven = is_peft_model(model) and any(isinstance(item, WeaveShadow) for item in chosen)
            program = trace_model(unwrap_shadow(model) if is_woven else model, example_inputs, progress=say)
        done = pipeline.run(
            program, chosen, check=checker(verify), strict=strict, keep_weights=verify, prepare=prepare, progress=say
        )
    return Program(done)


def load(folder: str | Path, *, verify: str = "full", progress: Progress = None) -> Program:
    """The program saved in ``folder``. Nothing is unpickled; weights are mapped, not copied.

    Args:
        verify: ``"full"`` compares every file with its recorded hash, ``"graphs"`` leaves out the weights.

    Raises:
        MissingFileError, FormatError: a file is not there, damaged, or written by a newer version.
    """
    warn_if_untested()
    with progress_line(progress) as say:
        return Program(folders.load(folder, verify=verify, progress=say))


def passes_of(fusion_config: Mapping[str, Any]) -> list[Pass]:
    """The passes a ``fusion_config`` asks for: values are True, False or a mapping of the pass's options.

    Raises:
        InputError: an unknown fusion, or another value.
    """
    if not isinstance(fusion_config, Mapping):
        raise InputError(
            "fusion_config is not a mapping", found=repr(fusion_config), do="write {'patch_embeddings': True}"
        )
    chosen: list[Pass] = []
    for name, value in fusion_config.items():
        if name not in FUSIONS:
            raise InputError(f"unknown fusion {name!r}", expected=", ".join(FUSIONS), do="use a name from this list")
        if not isinstance(value, (bool, Mapping)):
            raise InputError(
                f"fusion {name!r} is {value!r}", expected="True, False or a mapping of options", do="use one of these"
            )
        if value is not False:
            try:
                chosen.append(FUSIONS[name](**(value if isinstance(value, Mapping) else {})))
            except TypeError as error:
                raise InputError(
                    f"fusion {name!r} does not take these options",
                    expected=", ".join(item.name for item in dataclasses.fields(FUSIONS[name])),
                    found=repr(value)[:200],
                    do="use options from this list",
                ) from error
    return chosen


def _passes_of_config(model: nn.Module | Program) -> list[Pass]:
    config: Any = model.ir.model.config if isinstance(model, Program) else getattr(model, "config", None)
    read = config.get if isinstance(config, Mapping) else lambda key: getattr(config, key, None)
    if config is None:
        return []
    # On a config object per_layer_config is a view that every config has; only its saved form is absent without it.
    if read("per_layer_config" if isinstance(config, Mapping) else "is_heterogeneous"):
        raise NotSupportedError(
            "the config asks for per-layer shapes, and the pass for it is not part of this version",
            do="give passes=[...] to run others without it",
            shell="name the passes to run: --pass, --tap",
        )
    return passes_of(read("fusion_config") or {})


__all__ = ["FUSIONS", "load", "optimize", "passes_of", "trace"]
