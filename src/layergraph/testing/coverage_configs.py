"""The models that the coverage table checks: which class, and sizes to try until one builds and runs.

Names tell :func:`shrink_config` most sizes. Where they mislead it, :data:`OVERRIDES` knows better, and else a model as
its authors made it, with few layers, is small enough on most architectures.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layergraph.testing.coverage_overrides import OVERRIDES
from layergraph.testing.zoo import build_model, empty_model, modeling_module, tiny_config
from layergraph.testing.zoo_families import FAMILIES
from layergraph.testing.zoo_shrink import KINDS, shrink_only

# The tables name a part of these, which takes a part of the config.
_RECIPES = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}
# A process has 6 GiB, and a check holds some four copies of the weights.
MAX_PARAMETERS = 150_000_000


@dataclass(frozen=True)
class Sizes:
    """One way to shrink a config.

    Attributes:
        name: for the results, ``"tiny"``, ``"own widths"``, ``"own sizes"``.
        config: makes the config of a model type.
    """

    name: str
    config: Callable[[str], Any]


def list_sizes() -> tuple[Sizes, ...]:
    """Sizes to try, the smallest first."""
    return (
        Sizes("tiny", lambda model_type: tiny_config(model_type, **OVERRIDES.get(model_type, {}))),
        Sizes("own widths", lambda model_type: _shrunk(model_type, KINDS - {"widths"})),
        Sizes("own sizes", lambda model_type: _shrunk(model_type, frozenset({"depth"}))),
    )


def build_sized(model_type: str, sizes: Sizes) -> nn.Module:
    """The model of one type in these sizes.

    Raises:
        ValueError: it would have more than :data:`MAX_PARAMETERS`.
    """
    recipe = find_recipe(model_type)
    if sizes.name != "tiny":
        with torch.device("meta"):
            model = empty_model(sizes.config(model_type), recipe, "eager")
        count = sum(parameter.numel() for parameter in model.parameters())
        if count > MAX_PARAMETERS:
            raise ValueError(f"{count:,} parameters with {sizes.name}")
    return build_model(sizes.config(model_type), recipe, attn_implementation="eager")


def find_recipe(model_type: str) -> str:
    """The zoo's first kind where that is a whole model, the plain model, or the first head that transformers lists."""
    from transformers.models.auto import modeling_auto

    family = FAMILIES.get(model_type)
    if family is not None and ":" not in (recipe := next(iter(family.kinds.values()))):
        return recipe
    if model_type in _RECIPES:
        return _RECIPES[model_type]
    names = [n for n in dir(modeling_auto) if n.startswith("MODEL_") and n.endswith("_MAPPING_NAMES")]
    tables = {name: getattr(modeling_auto, name) for name in names}
    order = ["MODEL_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", *sorted(tables)]
    for name in order:
        entry = tables.get(name, {}).get(model_type)
        if entry is not None:
            return entry if isinstance(entry, str) else entry[0]
    return _unlisted(model_type)


def let_torchvision_load() -> None:
    """Let torchvision of PyPI load beside a CPU build of torch.

    It is built for CUDA, so its compiled operators do not load there, and its import ends at two whose names it needs
    declared. No model here calls them: what timm and transformers take of torchvision is written in Python.
    """
    with contextlib.suppress(ImportError):
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            for name in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            importlib.import_module("torchvision")


def _shrunk(model_type: str, kinds: frozenset[str]) -> Any:
    from transformers import CONFIG_MAPPING

    return shrink_only(kinds, CONFIG_MAPPING[model_type](), OVERRIDES.get(model_type, {}))


def _unlisted(model_type: str) -> str:
    """A model class that no table lists (parts of composite models): the one made for this config, plain ones first."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    found: list[str] = []
    for module in _modules(config):
        found = [name for name, cls in vars(module).items() if _is_for(cls, config)]
        if found:
            return min(found, key=lambda name: ("For" in name, not name.endswith("Model"), len(name)))
    raise LookupError("transformers has no model class for this config")


def _modules(config: type) -> Iterator[Any]:
    """Where the models of a config may be defined: beside it, or beside the config it is made from."""
    for base in config.__mro__:
        if base.__module__.startswith("transformers.models.") and ".configuration_" in base.__module__:
            with contextlib.suppress(ModuleNotFoundError):
                yield importlib.import_module(modeling_module(base))


def _is_for(cls: Any, config: type) -> bool:
    from transformers import PreTrainedModel

    is_model = (
        isinstance(cls, type) and issubclass(cls, PreTrainedModel) and not cls.__name__.endswith("PreTrainedModel")
    )
    made_for = getattr(cls, "config_class", None)
    return (
        is_model
        and isinstance(made_for, type)
        and issubclass(config, made_for)
        and made_for.__name__ != "PreTrainedConfig"
    )


__all__ = ["MAX_PARAMETERS", "Sizes", "build_sized", "find_recipe", "let_torchvision_load", "list_sizes"]
