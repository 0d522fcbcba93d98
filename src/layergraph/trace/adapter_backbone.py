"""The base model's layout, and the shadow backbone built the way peft builds it (``peft.tuners.shadow.model``).

The base is known from its program alone: its class and configuration are enough for a skeleton without weights. So
an adapter can be woven into a program that was saved and loaded, too.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layergraph.errors import FormatError, InputError, NotFoundError, NotSupportedError
from layergraph.ir.program import Program
from layergraph.trace.adapter_config import ShadowSettings
from layergraph.trace.source import skeleton as build_skeleton

_PASS = "weave-shadow"
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_INNER = ("intermediate_size", "ffn_dim", "n_inner")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_PROJECTED = "causal_lm_with_hidden_projection"


@dataclass(frozen=True)
class BaseLayout:
    """What is known of the base model.

    Attributes:
        skeleton: the model without weights (meta device).
        backbone: path of the module that holds the blocks.
        stack: paths of the blocks in order.
        embeddings, head: paths of input embeddings and output head, None where the model has none.
        width: of hidden states.
        dtype, device: of the first parameter, which is what peft goes by.
    """

    skeleton: Any
    backbone: str
    stack: tuple[str, ...]
    embeddings: str | None
    head: str | None
    width: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Backbone:
    """A shadow backbone.

    Attributes:
        module: with weights, in the base's dtype.
        projection: to the base's width, or None where the widths are equal.
        shares: whether it reads the base's embeddings.
        is_pretrained: whether its embeddings stay as they are in training.
    """

    module: Any
    projection: nn.Linear | None
    shares: bool
    is_pretrained: bool


def describe_base(program: Program) -> BaseLayout:
    """Layout of the model that ``program`` came from.

    Raises:
        NotSupportedError: not a Hugging Face decoder, or its class cannot be found.
    """
    info = program.model
    if info.config is None or info.config_class is None:
        raise NotSupportedError(
            "a shadow mirrors a Hugging Face decoder, and the traced model has no config",
            pass_name=_PASS,
            found=info.cls,
        )
    skeleton = build_skeleton(info)
    if isinstance(getattr(skeleton, "transformer_blocks", None), nn.ModuleList):
        raise NotSupportedError("shadows of diffusion transformers are not supported", pass_name=_PASS, found=info.cls)
    paths = {id(module): path for path, module in skeleton.named_modules()}
    backbone = _find_backbone(skeleton)
    layers = _find_layers(backbone)
    floats = [tensor for tensor in program.state_dict.values() if tensor.is_floating_point()]
    first = next((name for name, _ in skeleton.named_parameters()), "")
    parameter = program.state_dict.get(first, floats[0] if floats else torch.empty(0))
    return BaseLayout(
        skeleton=skeleton,
        backbone=paths[id(backbone)],
        stack=tuple(f"{paths[id(layers)]}.{index}" for index in range(len(layers))),
        embeddings=_path_of(skeleton, "get_input_embeddings", paths),
        head=_path_of(skeleton, "get_output_embeddings", paths),
        width=_width(skeleton.config),
        dtype=parameter.dtype,
        device=parameter.device,
    )


def build_backbone(
    base: BaseLayout, settings: ShadowSettings, *, has_weights: bool, keeps_embeddings: bool = False
) -> Backbone:
    """The shadow backbone, its weights random unless pretrained.

    Args:
        has_weights: the adapter brings all weights, so that those of a ``shadow_model`` need not be read.
        keeps_embeddings: leave it a table of its own where it reads the base's, to be filled in.

    Raises:
        NotSupportedError: the base's config has no such size.
        InputError: the projection of a pretrained checkpoint does not fit.
    """
    loaded: nn.Linear | None = None
    if settings.shadow_model == "mirror":
        module = _mirror(base, settings)
    else:
        module, loaded = _pretrained(base, settings.shadow_model, has_weights)
    width = _width(module.config)
    projection = loaded
    if loaded is not None and (loaded.in_features, loaded.out_features) != (width, base.width):
        raise InputError(
            "the projection of the shadow checkpoint does not fit",
            pass_name=_PASS,
            expected=f"shadow width {width} to base width {base.width}",
            found=f"{loaded.in_features} to {loaded.out_features}",
            do="use a shadow_model made for this base",
        )
    if loaded is None and width != base.width:
        projection = nn.Linear(width, base.width, bias=False)
    takes_embeddings = "inputs_embeds" in inspect.signature(module.forward).parameters
    shares = (
        settings.share_embeddings and settings.shadow_model == "mirror" and takes_embeddings and width == base.width
    )
    if shares and not keeps_embeddings and isinstance(getattr(module, "embed_tokens", None), nn.Module):
        del module.embed_tokens
    # Asked for where it is wanted; some models fail with the cache that they would make by themselves.
    module.config.use_cache = False
    for part in (module, projection):
        if part is not None:
            part.to(device=base.device, dtype=base.dtype)
    return Backbone(module.eval(), projection, shares, settings.shadow_model != "mirror")


def _mirror(base: BaseLayout, settings: ShadowSettings) -> Any:
    """A fresh module of the base's own class, shallower and narrower."""
    source = base.skeleton.get_submodule(base.backbone) if base.backbone else base.skeleton
    config = deepcopy(source.config)
    _set(config, _DEPTH, settings.shadow_num_hidden_layers or 1)
    for names, value in (
        (_WIDTH, settings.shadow_hidden_size),
        (_INNER, settings.shadow_intermediate_size),
        (_HEADS, settings.shadow_num_attention_heads),
    ):
        if value is not None:
            _set(config, names, value)
    _fit_layer_lists(config)
    with torch.device("meta") if base.device.type == "meta" else contextlib.nullcontext():
        return type(source)(config)


def _pretrained(base: BaseLayout, source: str, has_weights: bool) -> tuple[Any, nn.Linear | None]:
    from transformers import AutoConfig, AutoModel
    from transformers.utils import cached_file

    try:
        file = cached_file(source, "config.json")
        with open(file) as stream:
            raw = json.load(stream)
    except (OSError, ValueError) as error:
        raise NotFoundError(
            f"the shadow_model {source!r} cannot be read",
            pass_name=_PASS,
            found=str(error).strip().splitlines()[0][:200],
            do="check the path",
        ) from error
    if raw.get("model_type") == _PROJECTED:
        return _projected(source, raw)
    if has_weights:
        return AutoModel.from_config(AutoConfig.from_pretrained(source)), None
    return AutoModel.from_pretrained(source, use_safetensors=True), None


def _projected(source: str, raw: dict[str, Any]) -> tuple[Any, nn.Linear]:
    """A small backbone together with its trained projection to a larger base."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel
    from transformers.utils import cached_file

    inner = dict(raw["shadow_model_config"])
    module = AutoModel.from_config(AutoConfig.for_model(inner.pop("model_type"), **inner))
    weights = load_file(str(cached_file(source, "model.safetensors")))
    prefix = "shadow_model."
    state = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise FormatError(
            "the weights of the shadow checkpoint do not fit its own config", path=source, found=str(error)[:300]
        ) from error
    weight = weights.get("shadow_hidden_projection.weight")
    if weight is None:
        raise FormatError(
            "the projected shadow checkpoint has no projection",
            path=source,
            expected="shadow_hidden_projection.weight",
            found=f"{len(weights)} other tensors",
        )
    projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    projection.weight.data = weight.to(projection.weight.dtype)
    return module, projection


def _find_backbone(model: nn.Module) -> Any:
    for name in ("model", "transformer", "base_model", "decoder"):
        found = getattr(model, name, None)
        # HF's base_model is the model itself where there is none inside.
        if isinstance(found, nn.Module) and found is not model:
            nested = getattr(found, "decoder", None)
            return nested if isinstance(nested, nn.Module) and _has_layers(nested) else found
    if _has_layers(model):
        return model
    raise _no_blocks(model)


def _has_layers(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), nn.ModuleList) for name in ("layers", "h"))


def _find_layers(backbone: nn.Module) -> nn.ModuleList:
    for name in ("layers", "h"):
        found = getattr(backbone, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    raise _no_blocks(backbone)


def _no_blocks(module: nn.Module) -> NotSupportedError:
    return NotSupportedError(
        f"no list of decoder blocks is found in {type(module).__name__}",
        pass_name=_PASS,
        expected="a module list called layers or h in the model, or in its model, transformer or decoder",
    )


def _path_of(model: Any, getter: str, paths: dict[int, str]) -> str | None:
    with contextlib.suppress(NotImplementedError, AttributeError):
        return paths.get(id(getattr(model, getter)()))
    return None


def _width(config: Any) -> int:
    for name in _WIDTH:
        if hasattr(config, name):
            return int(getattr(config, name))
    raise NotSupportedError("the config has no hidden size", pass_name=_PASS, expected=" or ".join(_WIDTH))


def embedding_width(config: Any) -> int:
    """Features of a token's embedding, which is not the hidden size everywhere (OPT 350M)."""
    return int(getattr(config, "word_embed_proj_dim", None) or _width(config))


def _set(config: Any, names: tuple[str, ...], value: int) -> None:
    for name in names:
        if hasattr(config, name):
            setattr(config, name, int(value))
            return
    raise NotSupportedError(
        f"the base's config has none of {', '.join(names)}, so its shadow cannot have another size there",
        pass_name=_PASS,
        do="leave that field out, or give a pretrained shadow_model",
    )


def _fit_layer_lists(config: Any) -> None:
    """Lists with an entry for each layer follow the new depth."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return
    types = getattr(config, "layer_types", None)
    declared = getattr(type(config), getattr(config, "attribute_map", {}).get("layer_types", "layer_types"), None)
    # Where it is worked out from other fields (Mamba, Bamba, Jamba) it follows by itself; peft fails on those.
    if types is not None and not (isinstance(declared, property) and declared.fset is None):
        types = list(types) or ["full_attention"]
        config.layer_types = [*types[:count], *[types[-1]] * (count - len(types))]
    limit = getattr(config, "max_window_layers", None)
    if isinstance(limit, int) and limit > count:
        config.max_window_layers = count


__all__ = ["Backbone", "BaseLayout", "build_backbone", "describe_base", "embedding_width"]
