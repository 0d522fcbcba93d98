"""Example inputs for Hugging Face models, from a model's own signature and config, and what of their sizes may vary.

A recipe is chosen by what the forward takes, not by model type. Sizes are small, and none is 0 or 1: torch.export
fixes such sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from layergraph.errors import InputError, TraceError
from layergraph.trace.hf_inputs import RECIPES
from layergraph.trace.hf_request import NEEDS_PYTHON, Request

# Labels of dimensions, by input name, where the input has that rank.
_TEXT = {2: {0: "batch", 1: "sequence"}, 3: {0: "batch", 1: "sequence"}}
_DECODER_TEXT = {2: {0: "batch", 1: "decoder_sequence"}, 3: {0: "batch", 1: "decoder_sequence"}}
_DIMS: dict[str, dict[int, dict[int, str]]] = {
    "input_ids": _TEXT,
    "inputs_embeds": _TEXT,
    "attention_mask": _TEXT,
    "token_type_ids": _TEXT,
    "position_ids": _TEXT,
    "mm_token_type_ids": _TEXT,
    "decoder_input_ids": _DECODER_TEXT,
    "decoder_attention_mask": _DECODER_TEXT,
    "decoder_inputs_embeds": _DECODER_TEXT,
    "pixel_values": {4: {0: "batch"}, 5: {0: "batch"}, 2: {0: "patches"}},
    "pixel_values_videos": {5: {0: "batch"}, 2: {0: "patches"}},
    "image_grid_thw": {2: {0: "images"}},
    "input_values": {2: {0: "batch", 1: "length"}, 3: {0: "batch"}},
    "input_features": {3: {0: "batch", 1: "length"}},
    "input_features_mask": {2: {0: "batch", 1: "length"}},
    "spectrogram": {3: {0: "batch", 1: "length"}},
    "bbox": _TEXT,
    "visual_feats": {3: {0: "batch"}},
    "visual_pos": {3: {0: "batch"}},
    "pixel_attention_mask": {2: {0: "batch"}},
    "flattened_patches": {3: {0: "batch"}},
    "past_values": {2: {0: "batch"}, 3: {0: "batch"}},
    "past_values_padding": {2: {0: "batch"}},
    "freq": {2: {0: "batch"}},
    "hidden_states": {3: {0: "batch", 1: "sequence"}},
    "inputs": {3: {0: "batch", 1: "sequence"}},
}
# Inputs of packed towers, the ones that a prologue derives included.
PACKED_DIMS: dict[str, str] = {
    "hidden_states": "patches",
    "pixel_values": "patches",
    "grid_thw": "images",
    "cu_seqlens": "segments+1",
    "position_ids": "patches",
    "window_index": "merged_patches",
    "cu_window_seqlens": "windows+1",
    "interp_indices": "patches",
    "interp_weights": "patches",
}


def make_example_inputs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments for ``model.forward``: random, valid, small, on the model's device and in its dtype.

    For a model on the meta device they are meta tensors, except grids, whose values a prologue reads.

    Raises:
        TraceError: no recipe fits the forward, or it needs an argument that none makes.
    """
    return _make(model, {}, seed=0)


def batch_like(
    model: nn.Module, inputs: Mapping[str, Any], sizes: Mapping[str, int], *, seed: int = 1
) -> dict[str, Any]:
    """Fresh valid inputs of the same names as ``inputs`` in other sizes.

    Args:
        model: as for :func:`make_example_inputs`.
        inputs: from :func:`make_example_inputs`; says which names to make.
        sizes: labels of :func:`dynamic_dims` to sizes, ``{"batch": 3, "sequence": 13}``. Packed towers take
            ``images`` and ``patches``, which must be enough for the images in merged patches.
        seed: of the values.

    Raises:
        InputError: the sizes do not fit together, or a label means nothing to this model.
    """
    made = _make(model, sizes, seed)
    if missing := [name for name in inputs if name not in made]:
        raise InputError(
            f"no way to make other sizes of {', '.join(missing)}", do="pass inputs that make_example_inputs made"
        )
    return {name: made[name] for name in inputs}


def dynamic_dims(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Which dimensions of ``inputs`` may vary, with a label; equal labels are equal sizes.

    Accepts a model's own inputs and those that a prologue made. Dimensions that the architecture fixes (channels, the
    image size of learned positions, frames) are absent, and so are inputs of one fixed shape.
    """
    packed = isinstance(inputs.get("cu_seqlens"), torch.Tensor) or isinstance(inputs.get("grid_thw"), torch.Tensor)
    found: dict[str, dict[int, str]] = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            continue
        if packed and name in PACKED_DIMS:
            dims = {_packed_dim(value): PACKED_DIMS[name]}
        elif name == "pixel_values" and "image_grid_thw" in inputs:
            dims = {_packed_dim(value): "patches"}
        else:
            dims = dict(_DIMS.get(name, {}).get(value.dim(), {}))
        fixed = Request(model, {}, 0).fixed_labels()
        dims = {dim: label for dim, label in dims.items() if label not in fixed}
        if dims:
            found[name] = dims
    return found


def _packed_dim(value: torch.Tensor) -> int:
    """Where the patches are counted: some towers take them as small images, and some of these in one row."""
    return 1 if value.dim() == 5 else 0


def _make(model: nn.Module, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    if getattr(model, "config", None) is None:
        raise TraceError(
            f"{type(model).__name__} has no config to make example inputs from",
            do="pass example_inputs=",
            shell=NEEDS_PYTHON,
        )
    request = Request(model, sizes, seed)
    for recipe in RECIPES:
        made = recipe(request)
        if made is not None:
            break
    else:
        if type(model).forward is nn.Module.forward:
            raise TraceError(
                f"{type(model).__name__} has no forward of its own",
                do="trace one of its parts: model.get_submodule(path)",
                shell="take one of its parts: --submodule PATH",
            )
        raise _unknown(model, "no recipe fits what its forward takes")
    missing = [name for name in request.required() if name not in made]
    if missing:
        raise _unknown(model, f"its forward needs {', '.join(missing)}")
    if unused := [label for label in sizes if label not in request.used]:
        raise InputError(
            f"{type(model).__name__} has no size named {', '.join(map(repr, unused))}",
            expected=", ".join(sorted(request.used)),
        )
    return made


def _unknown(model: nn.Module, reason: str) -> TraceError:
    return TraceError(
        f"example inputs for {type(model).__name__} cannot be made",
        found=f"{reason}: {inspect.signature(model.forward)}"[:400],
        do="pass example_inputs={...}, the keyword arguments of its forward",
        shell=NEEDS_PYTHON,
    )


__all__ = ["PACKED_DIMS", "batch_like", "dynamic_dims", "make_example_inputs"]
