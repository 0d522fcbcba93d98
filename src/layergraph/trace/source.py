"""A Hugging Face model made anew from what its program knows of it: class and configuration, without weights."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from layergraph.errors import LayerGraphError, NotSupportedError
from layergraph.ir.placement import on_device
from layergraph.ir.program import ModelInfo, Program
from layergraph.trace.export import Progress, trace


def find_class(qualified: str) -> Any:
    """The model or config class named ``module:qualname``: of transformers, or of a module that is imported already.

    Raises:
        NotSupportedError: there is none, or it is a class of another kind.
    """
    from transformers import PreTrainedConfig, PreTrainedModel

    module_name, _, name = qualified.partition(":")
    if module_name.partition(".")[0] == "transformers":
        found: Any = importlib.import_module(module_name)
    else:
        found = sys.modules.get(module_name)  # a damaged file must not choose imports
    for part in name.split("."):
        found = getattr(found, part, None)
    # Names come from files: one must not get to call anything else.
    if not (isinstance(found, type) and issubclass(found, (PreTrainedModel, PreTrainedConfig))):
        raise NotSupportedError(
            f"the model's class {qualified} is not there", do="import the module that defines it, then try again"
        )
    return found


def skeleton(info: ModelInfo) -> Any:
    """The model on the meta device, without weights.

    Raises:
        NotSupportedError: it is no Hugging Face model, its class cannot be found, or needs more than its config.
    """
    cls, config = _class_and_config(info)
    with _naming(info), torch.device("meta"), torch.random.fork_rng(devices=[]):
        return cls(config)


def retrace(source: Program, dtype: torch.dtype, *, progress: Progress | None = None) -> Program:
    """``source``, an untouched program, traced in another dtype over its weights cast, on the CPU.

    dtypes stand as literals all over a graph, and one that says float32 may mean "the model's own" or "always
    float32". So the model is loaded by transformers in that dtype, as from a checkpoint, and traced again. That it is
    the same model is checked by tracing it as it was, too.

    Raises:
        NotSupportedError: it cannot be made anew, or gives another graph: traced from example inputs, or its modules
            were changed after they were built.
    """
    say = progress or (lambda text: None)
    info = source.model
    cpu = on_device(source, torch.device("cpu"))
    options: dict[str, Any] = {"training": info.training, "cached": "step" in source.graphs}
    say(f"tracing {info.cls.rpartition(':')[2]} as it was")
    if trace(_loaded(cpu, None), **options).fingerprint != cpu.fingerprint:
        raise NotSupportedError(
            "the model's config alone does not lead to this program's graph",
            path=info.cls,
            expected="a model as its class builds it, traced without example inputs of one's own",
            do=f"trace model.to({dtype}) again",
        )
    fresh = trace(_loaded(cpu, dtype), progress=progress, **options)
    return fresh.evolve(model=replace(info, config=fresh.model.config))


def _loaded(source: Program, dtype: torch.dtype | None) -> Any:
    """The model over a program's weights, loaded in ``dtype``; None for each weight's own.

    Raises:
        NotSupportedError: a weight finds no place, or is lacking though no pass dropped it.
    """
    info = source.model
    cls, config = _class_and_config(info)
    state = {name: tensor.detach() for name, tensor in source.state_dict.items() if not tensor.is_meta}
    dropped = source.state_dict.keys() - state.keys()
    with _naming(info), torch.random.fork_rng(devices=[]), _quietly():
        model, told = cls.from_pretrained(
            None,
            config=config,
            state_dict=dict(state),
            dtype=dtype or next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), None),
            attn_implementation=info.attention,
            output_loading_info=True,
        )
    lost = {*told["missing_keys"], *told["unexpected_keys"]} - dropped
    if lost:
        raise NotSupportedError(
            f"{info.cls} cannot be built from its config alone", path=min(lost), found=f"{len(lost)} weights do not fit"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in state and dtype is None:
            tensor.data = state[name]
        if name in source.state_dict and isinstance(tensor, torch.nn.Parameter):
            tensor.requires_grad_(source.state_dict[name].requires_grad)
    return model.eval()


def _class_and_config(info: ModelInfo) -> tuple[Any, Any]:
    if info.config is None or info.config_class is None:
        raise NotSupportedError(
            "only a Hugging Face model can be made anew from its config", path=info.cls, do="go back to the model"
        )
    config = find_class(info.config_class).from_dict(json.loads(json.dumps(dict(info.config))))
    if info.attention is not None:
        config._attn_implementation = info.attention
    return find_class(info.cls), config


@contextmanager
def _naming(info: ModelInfo) -> Iterator[None]:
    """Whatever goes wrong within is told as a model that its config does not make."""
    try:
        yield
    except LayerGraphError:
        raise
    except Exception as error:
        raise NotSupportedError(
            f"{info.cls} cannot be built from its config alone", found=f"{type(error).__name__}: {error}"[:200]
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """transformers draws a bar for weights that are in memory already, and prints a table of those that do not fit."""
    from transformers.utils import logging

    was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_on:
            logging.enable_progress_bar()


__all__ = ["find_class", "retrace", "skeleton"]
