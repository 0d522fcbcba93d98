"""Recipes for vision towers and vision-language models that take patches of images of any size."""

from __future__ import annotations

from typing import Any

import torch

from layergraph.errors import InputError
from layergraph.trace.hf_inputs_text import text_inputs
from layergraph.trace.hf_request import Request, padded_mask, token_ids

# Grids (t, h, w) in merged patches: different sizes, a video among them where there are three
_GRIDS = ((1, 2, 3), (1, 4, 2), (2, 1, 3), (1, 3, 3))


def packed_patches(request: Request) -> dict[str, Any] | None:
    """Towers that take flat patches of images of any size: ``hidden_states`` or ``pixel_values`` and ``grid_thw``."""
    if "grid_thw" not in request.accepts:
        return None
    name = next((n for n in ("hidden_states", "pixel_values") if n in request.accepts), None)
    if name is None:
        return None
    grids = _grids(request, request.config)
    n_patches = int(grids.prod(dim=1).sum())
    made = {
        name: request.normal(n_patches, _patch_features(request, request.config)),
        "grid_thw": _placed(request, grids),
    }
    if "merge_sizes" in request.accepts:
        made["merge_sizes"] = _placed(request, torch.full((len(grids),), _merge(request, request.config)))
    return made


def padded_patches(request: Request) -> dict[str, Any] | None:
    """Towers that take the patches of each image in a row of their own, shorter images padded."""
    if not {"pixel_values", "spatial_shapes"} <= request.accepts:
        return None
    vision = request.get("vision_config") or request.config
    batch = request.size("batch")
    shapes = torch.tensor([(_GRIDS[i % len(_GRIDS)][1] + 1, _GRIDS[i % len(_GRIDS)][2] + 1) for i in range(batch)])
    lengths = shapes.prod(dim=1)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    patches = request.normal(*mask.shape, _patch_features(request, vision))
    return (text_inputs(request) if "input_ids" in request.accepts else {}) | {
        "pixel_values": patches * mask[:, :, None].to(patches),
        "pixel_attention_mask": mask.to(request.device),
        "spatial_shapes": _placed(request, shapes),
    }


def flattened_patches(request: Request) -> dict[str, Any] | None:
    """Rows of patches that say where they were: row and column before the pixels, zeros for padding."""
    vision = request.get("vision_config") or request.config
    width = request.get("patch_embed_hidden_size", config=vision)
    if "flattened_patches" not in request.accepts or "input_ids" in request.accepts or width is None:
        return None
    batch, rows, columns = request.size("batch"), 2, 3
    places = torch.cartesian_prod(torch.arange(1, rows + 1), torch.arange(1, columns + 1)).to(request.device)
    pixels = request.normal(batch, rows * columns, width)
    patches = torch.cat([places.to(pixels).expand(batch, -1, -1), pixels], dim=-1)
    mask = padded_mask(request, batch, rows * columns)
    made = {"flattened_patches": patches * mask[:, :, None].to(patches), "attention_mask": mask}
    if "decoder_input_ids" in request.accepts:
        made["decoder_input_ids"] = token_ids(request, batch, request.size("decoder_sequence"))
    return made


def images_in_text(request: Request) -> dict[str, Any] | None:
    """Vision-language models that take flat patches: text with one run of image tokens a row, and padding."""
    if not {"input_ids", "pixel_values", "image_grid_thw"} <= request.accepts:
        return None
    vision = request.get("vision_config")
    if vision is None:
        return None
    batch = request.size("batch", request.size("images"))
    if request.size("images", batch) != batch:
        raise InputError("images and batch differ", do="ask for as many images as rows: each row holds one")
    grids = _grids(request, vision, batch)
    n_tokens = [int(grid.prod()) // _merge(request, vision) ** 2 for grid in grids]
    length = request.size("sequence", max(n_tokens) + 6)
    if length < max(n_tokens) + 4:
        raise InputError(f"sequence of {length} is too short for the images", expected=f"{max(n_tokens) + 4} or more")
    image = request.get("image_token_id", "image_token_index")
    start = request.get("vision_start_token_id", "image_start_token_id")
    end = request.get("vision_end_token_id", "image_end_token_id")
    ids, types = token_ids(request, batch, length).cpu(), torch.zeros(batch, length, dtype=torch.int32)
    for row, n in enumerate(n_tokens):
        ids[row, 2 : 2 + n] = image
        types[row, 2 : 2 + n] = 1
        for place, token in ((1, start), (2 + n, end)):
            if isinstance(token, int):
                ids[row, place] = token
    made = {"input_ids": ids.to(request.device), "attention_mask": torch.ones_like(ids).to(request.device)}
    if "mm_token_type_ids" in request.accepts:
        made["mm_token_type_ids"] = types.to(request.device)
    made["pixel_values"] = request.normal(int(grids.prod(dim=1).sum()), _patch_features(request, vision))
    made["image_grid_thw"] = _placed(request, grids)
    if "image_merge_sizes" in request.accepts:
        made["image_merge_sizes"] = _placed(request, torch.full((len(grids),), _merge(request, vision)))
    return made


def _merge(request: Request, config: Any) -> int:
    merge = request.get("spatial_merge_size", "merge_kernel_size", "merge_size", config=config) or 1
    return merge[0] if isinstance(merge, (list, tuple)) else merge


def _patch_features(request: Request, config: Any) -> int:
    """Channels x frames x height x width of one patch."""
    channels = request.get("in_channels", "num_channels", "in_chans", config=config) or 3
    patch = request.get("patch_size", config=config) or 1
    frames = request.get("temporal_patch_size", "patch_temporal", config=config) or 1
    side = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    return channels * (frames[0] if isinstance(frames, (list, tuple)) else frames) * side[0] * side[1]


def _grids(request: Request, config: Any, n_images: int | None = None) -> torch.Tensor:
    """(images, 3) of t, h, w in patches, of different sizes unless ``patches`` leaves no choice."""
    merge = _merge(request, config)
    n_images = n_images if n_images is not None else request.size("images")
    grids = torch.tensor([_GRIDS[i % len(_GRIDS)] for i in range(n_images)])
    grids[:, 0] = 1 if not _takes_videos(request) else grids[:, 0]
    if request.asked("patches"):
        # One merged patch for each image but the last, which takes the rest in one row
        n_merged, rest = divmod(request.size("patches"), merge**2)
        if rest or n_merged < n_images:
            raise InputError(
                f"{request.size('patches')} patches are no {n_images} images",
                expected=f"a multiple of {merge**2}, at least {n_images * merge**2}",
            )
        grids = torch.ones(n_images, 3, dtype=torch.long)
        grids[-1, 2] = n_merged - n_images + 1
    request.used.add("patches")
    return grids * torch.tensor([1, merge, merge])


def _takes_videos(request: Request) -> bool:
    """Towers that look a grid up by segment take images only, one frame each (glm4v)."""
    return not any(hasattr(m, "interpolated_method") for m in request.model.modules())


def _placed(request: Request, grids: torch.Tensor) -> torch.Tensor:
    # Its values are read on the host, so it never goes to the meta device
    return grids if request.device.type == "meta" else grids.to(request.device)


__all__ = ["flattened_patches", "images_in_text", "packed_patches", "padded_patches"]
