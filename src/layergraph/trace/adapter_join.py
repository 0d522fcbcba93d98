"""One more adapter for a program that has a shadow woven in."""

from __future__ import annotations

import torch

from layergraph.errors import InputError, NotSupportedError
from layergraph.ir.adapter import Adapter, Shadow
from layergraph.trace.adapter_config import find_blocks
from layergraph.trace.adapter_read import AdapterSource

_PASS = "weave-shadow"
_PADDABLE = ("r", "update_hidden_size")


def join_adapter(shadow: Shadow, name: str, source: AdapterSource, *, training: bool, pad: bool = False) -> Adapter:
    """One more adapter for a program that has a shadow already.

    Args:
        pad: fill a smaller rank or update width up with zeros, which change nothing.

    Raises:
        InputError: it differs in what is part of the graph, or its tensors do not fit.
    """
    settings, known = source.settings, shadow.geometry
    blocks = find_blocks(settings, known["stack"], by_index=source.tensors is None)
    found = {
        "blocks": list(blocks),
        "r": settings.r,
        "update_hidden_size": settings.update_size,
        "shadow_hidden_size": settings.shadow_hidden_size or known["width"],
        "shadow_num_hidden_layers": settings.shadow_num_hidden_layers or 1,
        "modules_to_save": list(settings.modules_to_save or ()),
    }
    padded: dict[str, int] = {}
    for key, value in known.items():
        if key in ("stack", "width", "takes_embeddings"):
            continue  # these follow from the model and the others
        if (other := found.get(key, getattr(settings, key, None))) == value:
            continue
        is_smaller = key in _PADDABLE and other < value
        if is_smaller and pad:
            padded[key] = value
            continue
        raise InputError(
            f"adapter {name!r} differs from the program's adapters in {key}, which is part of the graph",
            pass_name=_PASS,
            expected=f"{key}={value!r}",
            found=f"{key}={other!r}",
            do="add it with pad=True, which fills it up with zeros" if is_smaller else "weave it into its own program",
            shell="generate with it alone: --adapter once, on the model's own folder",
        )
    if source.tensors is None:
        raise NotSupportedError(
            "a fresh adapter beside others", pass_name=_PASS, do="save it first, then add the folder"
        )
    tensors = source.tensors
    if padded:
        shapes = {slot.key: slot.shape for slot in shadow.slots}
        tensors = {key: _padded(tensor, shapes.get(key, ())) for key, tensor in tensors.items()}
    return shadow.fit(name, {**source.config, **padded}, tensors, training=training)


def _padded(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` in the corner of zeros: rows and columns of a product that add nothing (GELU of 0 is 0)."""
    if tensor.dim() != len(shape) or any(have > want for have, want in zip(tensor.shape, shape, strict=True)):
        return tensor  # fit() says what is wrong with it
    whole = tensor.new_zeros(shape)
    whole[tuple(slice(size) for size in tensor.shape)] = tensor.detach()
    return whole


__all__ = ["join_adapter"]
