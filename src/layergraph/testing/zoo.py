"""A zoo of tiny Hugging Face models with weights in which errors show, for tests of passes.

Everything comes from the models' own config classes, shrunk by :func:`shrink_config`; a family adds one line where
its sizes are tied together in ways that names do not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from layergraph.errors import NotFoundError
from layergraph.testing.zoo_families import DECODERS, FAMILIES, Family
from layergraph.testing.zoo_shrink import shrink_config


def list_model_types() -> tuple[str, ...]:
    """Model types that the zoo names; :func:`tiny_model` builds any other that transformers knows on a best effort."""
    return tuple(sorted(FAMILIES))


def list_kinds(model_type: str) -> tuple[str, ...]:
    """Kinds of model that the zoo names for ``model_type``, the default first."""
    return tuple(_family(model_type).kinds)


def tiny_model(
    model_type: str,
    kind: str | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    **config: Any,
) -> nn.Module:
    """A tiny model with random weights, in eval mode, on the CPU.

    Args:
        model_type: as in a config, ``"llama"``, ``"qwen2_vl"``.
        kind: which model of the family: ``"lm"``, ``"base"``, ``"classifier"``, ``"vision"`` (the tower), ``"vlm"``,
            ``"encoder"``, ``"seq2seq"``; None for the first of :func:`list_kinds`.
        seed: of the weights. Zeros and ones that initialisation leaves (norms, biases, gates) become random too.
        dtype: of the weights.
        attn_implementation: ``"eager"`` or ``"sdpa"``; None for the model's default.
        config: config fields to set; a mapping for a nested config.

    Raises:
        NotFoundError: transformers has no such model type, or the family no such kind.
    """
    family = _family(model_type)
    kind = kind or next(iter(family.kinds))
    if kind not in family.kinds:
        raise NotFoundError(f"{model_type} has no kind {kind!r}", expected=", ".join(family.kinds))
    return build_model(tiny_config(model_type, **config), family.kinds[kind], seed, dtype, attn_implementation)


def tiny_config(model_type: str, **config: Any) -> Any:
    """The family's config, shrunk. Further arguments as for :func:`tiny_model`."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise NotFoundError(f"transformers has no model type {model_type!r}", do="see list_model_types()")
    return shrink_config(CONFIG_MAPPING[model_type](), **_merge(_family(model_type).config, config))


def build_model(
    config: Any,
    recipe: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
) -> nn.Module:
    """Build ``recipe`` from ``config`` with random weights.

    Args:
        config: the family's whole config.
        recipe: an auto class (``"AutoModelForCausalLM"``) or ``"ClassName"`` of transformers or of the family's
            modeling module; ``"ClassName:vision_config"`` builds it from that part of the config.
        seed, dtype, attn_implementation: as for :func:`tiny_model`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = empty_model(config, recipe, attn_implementation)
        randomise(model, seed)
    return model.to(dtype).eval()


def empty_model(config: Any, recipe: str, attn_implementation: str | None = None) -> nn.Module:
    """As :func:`build_model`, with the weights as the constructor leaves them."""
    name, _, part = recipe.partition(":")
    for step in part.split(".") if part else ():
        config = getattr(config, step)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    cls = _model_class(name, config)
    return cls.from_config(config) if hasattr(cls, "from_config") else cls(config)


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter random values that keep activations of order one, tied weights kept tied.

    Vectors keep their initial value (one for norms, zero for biases) with noise of 0.2 around it. Running statistics
    of batch norms become random too.
    """
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.2 * noise.to(parameter.dtype))
            else:
                # Convolutions sum over all but the first axis; stacked experts and linears over one of two.
                is_conv = isinstance(module, nn.modules.conv._ConvNd)
                fan_in = parameter[0].numel() if is_conv or parameter.dim() == 2 else parameter.shape[-1]
                parameter.copy_(noise / max(fan_in, 1) ** 0.5)
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_var is not None:
            module.running_mean.add_(0.2 * torch.randn(module.running_mean.shape, generator=generator))
            module.running_var.mul_(1 + 0.5 * torch.rand(module.running_var.shape, generator=generator))


def _family(model_type: str) -> Family:
    return FAMILIES.get(model_type) or DECODERS.get(model_type) or Family({"base": "AutoModel"})


def _model_class(name: str, config: Any) -> Any:
    import importlib

    import transformers

    if hasattr(transformers, name):
        return getattr(transformers, name)
    return getattr(importlib.import_module(modeling_module(type(config))), name)


def modeling_module(config_class: type) -> str:
    """Where the models of a config are defined: beside it, in the file of the same name."""
    return config_class.__module__.replace(".configuration_", ".modeling_")


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged


__all__ = [
    "build_model",
    "empty_model",
    "list_kinds",
    "list_model_types",
    "modeling_module",
    "randomise",
    "shrink_config",
    "tiny_config",
    "tiny_model",
]
