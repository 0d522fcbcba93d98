"""The ``hf-vision-grid`` prologue: what packed vision towers derive from the values of ``grid_thw``.

Mirrors ``transformers.vision_utils`` (5.17 to 5.24), in plain torch on the host and without the model, and drops the
limit of transformers' exporters to images of one size.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from layergraph.errors import InputError, NotSupportedError

# Helpers of transformers.vision_utils, and the derived inputs that each pops from the caller's keyword arguments.
_HELPERS = {
    "get_vision_attention_seqlens": "cu_seqlens",
    "get_vision_cu_seqlens": "cu_seqlens",
    "get_vision_position_ids": "position_ids",
    "get_vision_window_index": "window",
    "get_vision_interpolation_indices_and_weights": "interpolation",
    "get_vision_bilinear_indices_and_weights": "interpolation",
}
# Model-specific helpers on grid_thw that we have no host code for (kimi_k25, muse_glimmer).
_UNSUPPORTED = ("get_vision_frame_index", "get_vision_temporal_merge_index", "get_vision_pixel_shuffle_index")
_MAIN = ("hidden_states", "pixel_values")


def find(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the prologue must know of ``model``; None if its forward does not derive tensors from ``grid_thw``."""
    if inputs.get("grid_thw") is None or inputs.get("cu_seqlens") is not None:
        return None
    used = _names_used(model)
    derive = sorted({what for helper, what in _HELPERS.items() if helper in used})
    if not derive:
        return None
    if missing := [name for name in _UNSUPPORTED if name in used]:
        raise NotSupportedError(
            f"{type(model).__name__} derives inputs from grid_thw that no prologue makes",
            found=", ".join(missing),
            do="register a prologue for them with layergraph.trace.prologue.register_prologue",
            shell="name a module that registers a prologue for them: --import MODULE",
        )
    merge_size = _attribute(model, "spatial_merge_size")
    if merge_size is None:
        merge_size = _literal_merge(model)
    if merge_size is None:
        merge_size = getattr(getattr(model, "config", None), "spatial_merge_size", None)
    params: dict[str, Any] = {
        "derive": derive,
        "spatial_merge_size": None if merge_size is None and "merge_sizes" in inputs else int(merge_size or 1),
        # Attributes by 5.24; until then what the model's forward says in so many words.
        "merge_temporal": bool(getattr(model, "merge_temporal", False)) or _says(model, "merge_temporal"),
        "include_temporal": bool(getattr(model, "include_temporal", False)) or _says(model, "include_temporal"),
        "keep_grid": _reads_grid(model),
    }
    if "window" in derive:
        params["window_size"] = _number(model, "window_size")
        params["patch_size"] = _number(model, "patch_size")
    if "interpolation" in derive:
        params["num_grid_per_side"] = _number(model, "num_grid_per_side")
        params["interpolation_mode"] = _attribute(model, "interpolation_mode") or "bilinear"
        params["interpolation_padding"] = _attribute(model, "interpolation_padding") or "border"
        params["interpolation_align_corners"] = _attribute(model, "interpolation_align_corners") is True
    return params


def run(params: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """``inputs`` with the derived tensors added, and ``grid_thw`` None where the graph does not read it."""
    grid = _host_grid(inputs)
    anchor = next((inputs[name] for name in _MAIN if isinstance(inputs.get(name), torch.Tensor)), inputs["grid_thw"])
    n_patches = int(grid.prod(dim=1).sum())
    if anchor is not inputs["grid_thw"] and anchor.dim() == 2 and anchor.shape[0] != n_patches:
        raise InputError(
            "the patches do not match grid_thw",
            expected=f"{n_patches} patches, the sum of t*h*w over {len(grid)} images",
            found=f"{tuple(anchor.shape)}",
            do="pass pixel values and grids of the same images",
        )
    merge = params["spatial_merge_size"]
    merges = inputs["merge_sizes"].cpu().tolist() if merge is None else [merge] * len(grid)
    if any(h % m or w % m for (_, h, w), m in zip(grid.tolist(), merges, strict=True)):
        raise InputError(
            "grid_thw does not divide into merged patches",
            expected=f"height and width divisible by {merge or 'merge_sizes'}",
            found=str(grid.tolist()),
        )
    made: dict[str, torch.Tensor] = {}
    if "cu_seqlens" in params["derive"]:
        made["cu_seqlens"] = vision_cu_seqlens(grid, merge_temporal=params["merge_temporal"])
        if params["keep_grid"]:
            # glm4v broadcasts over segment lengths, and torch fixes a broadcast size of 1. An empty last segment
            # keeps it above 1 where there is one image, and nothing lies in it.
            made["cu_seqlens"] = torch.cat([made["cu_seqlens"], made["cu_seqlens"][-1:]])
    if "position_ids" in params["derive"]:
        made["position_ids"] = vision_position_ids(grid, merges, include_temporal=params["include_temporal"])
    if "window" in params["derive"]:
        made["window_index"], made["cu_window_seqlens"] = vision_windows(
            grid, merge, params["window_size"] // merge // params["patch_size"]
        )
    if "interpolation" in params["derive"]:
        made["interp_indices"], made["interp_weights"] = vision_interpolation(
            grid,
            params["num_grid_per_side"],
            mode=params["interpolation_mode"],
            align_corners=params["interpolation_align_corners"],
            padding=params["interpolation_padding"],
            merge=merge,
        )
    kept = dict(inputs)
    if not params["keep_grid"]:
        # The forward must be given it, but only hands it to helpers that are bypassed: as None, any other use raises.
        kept["grid_thw"] = None
    # What the caller derived already stands.
    return kept | {name: value.to(anchor.device) for name, value in made.items() if kept.get(name) is None}


def _host_grid(inputs: Mapping[str, Any]) -> torch.Tensor:
    grid = inputs.get("grid_thw")
    if not isinstance(grid, torch.Tensor) or grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point():
        found = f"{grid.dtype} {tuple(grid.shape)}" if isinstance(grid, torch.Tensor) else type(grid).__name__
        raise InputError("grid_thw is wrong", expected="an integer tensor (images, 3) of t, h, w", found=found)
    if grid.is_meta:
        raise InputError("grid_thw has no values on the meta device", do="pass it as a CPU tensor")
    return grid.detach().to("cpu", torch.long)


# ---- the derived tensors; grids are (images, 3) int64 on the host ----


def vision_cu_seqlens(grid: torch.Tensor, *, merge_temporal: bool) -> torch.Tensor:
    """Boundaries of attention segments, ``(segments + 1,)`` int32: one a frame, or (``merge_temporal``) a clip."""
    frame = grid[:, 1] * grid[:, 2]
    lengths = grid[:, 0] * frame if merge_temporal else frame.repeat_interleave(grid[:, 0])
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def vision_position_ids(grid: torch.Tensor, merges: list[int], *, include_temporal: bool) -> torch.Tensor:
    """``(patches, 2)`` int64 row and column of each patch, merge block by merge block; ``(patches, 3)`` with time."""
    parts = []
    for (frames, height, width), merge in zip(grid.tolist(), merges, strict=True):
        rows, columns = _block_order(height, width, merge)
        ids = torch.stack([rows, columns], dim=-1).repeat(frames, 1)
        if include_temporal:
            ids = torch.cat([torch.arange(frames).repeat_interleave(height * width)[:, None], ids], dim=1)
        parts.append(ids)
    return torch.cat(parts)


def vision_windows(grid: torch.Tensor, merge: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order of merged patches that puts windows of ``side`` by ``side`` together, and the windows' boundaries.

    Returns:
        ``window_index`` (merged patches,) int64 and ``cu_window_seqlens`` (windows + 1,) int32, in patches.
    """
    order, lengths, start = [], [], 0
    for frames, height, width in grid.tolist():
        rows, columns = height // merge, width // merge
        index = torch.arange(frames * rows * columns).view(frames, rows, columns)
        for frame in index:
            for strip in frame.split(side):
                for window in strip.split(side, dim=1):
                    order.append(window.reshape(-1) + start)
                    lengths.append(window.numel() * merge * merge)
        start += index.numel()
    return torch.cat(order), F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def vision_interpolation(
    grid: torch.Tensor, side: int, *, mode: str, align_corners: bool, padding: str, merge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps and weights that resample a learned ``side`` by ``side`` table to each image's grid.

    Returns:
        indices (patches, taps) int64 into the flat table, and weights (patches, taps) float32; 4 taps or 16.
    """
    indices, weights = [], []
    for frames, height, width in grid.tolist():
        rows, columns = _block_order(height, width, merge)
        row_taps, row_weights = _axis_taps(rows, height, side, mode, align_corners, padding)
        column_taps, column_weights = _axis_taps(columns, width, side, mode, align_corners, padding)
        taps = (row_taps[:, :, None] * side + column_taps[:, None, :]).flatten(1)
        indices.append(taps.repeat(frames, 1))
        weights.append((row_weights[:, :, None] * column_weights[:, None, :]).flatten(1).repeat(frames, 1))
    return torch.cat(indices), torch.cat(weights)


def _block_order(height: int, width: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each patch of one frame, in the order the processors write them."""
    blocks = (height // merge, merge, width // merge, merge)
    rows = torch.arange(height)[:, None].expand(height, width).reshape(blocks).transpose(1, 2).flatten()
    columns = torch.arange(width)[None, :].expand(height, width).reshape(blocks).transpose(1, 2).flatten()
    return rows, columns


def _axis_taps(
    index: torch.Tensor, size: int, side: int, mode: str, align_corners: bool, padding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    position = index.to(torch.float32)
    if align_corners:
        source = position * (side - 1) / max(size - 1, 1)
    else:
        source = (position + 0.5) * side / size - 0.5
    offsets = torch.arange(0, 2) if mode == "bilinear" else torch.arange(-1, 3)
    floor = source.floor()
    raw = floor.long()[:, None] + offsets
    distance = (source[:, None] - floor[:, None] - offsets).abs()
    if mode == "bilinear":
        weights = (1 - distance).clamp(min=0)
    else:  # Keys' cubic kernel, as F.interpolate's bicubic
        a = -0.75
        near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        weights = torch.where(distance <= 1, near, far)
    if padding == "zeros":
        weights = weights * ((raw >= 0) & (raw < side))
    return raw.clamp(0, side - 1), weights


# ---- reading a model's structure ----


def _attribute(model: nn.Module, name: str) -> Any | None:
    """First value of ``name`` on the model or a module inside it, as transformers' own preparer looks it up."""
    return next((value for module in model.modules() if (value := getattr(module, name, None)) is not None), None)


def _number(model: nn.Module, name: str) -> int:
    value = _attribute(model, name)
    if not isinstance(value, int):
        raise NotSupportedError(
            f"{type(model).__name__} derives inputs from grid_thw and its {name}, which it does not tell",
            expected=f"an attribute {name} that is a number",
            found=repr(value),
            do="register a prologue for it with layergraph.trace.prologue.register_prologue",
            shell="name a module that registers a prologue for it: --import MODULE",
        )
    return value


def _methods(model: nn.Module) -> Iterator[Any]:
    """Functions of the model's classes, unwrapped, torch's own left out."""
    seen = set()
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls in seen or cls.__module__.startswith(("torch.", "builtins", "transformers.modeling_utils")):
                continue
            seen.add(cls)
            for value in vars(cls).values():
                if inspect.isfunction(value):
                    yield inspect.unwrap(value)


def _names_used(model: nn.Module) -> set[str]:
    return {name for method in _methods(model) for name in method.__code__.co_names}


def _forward(model: nn.Module) -> ast.AST | None:
    return _parsed(inspect.unwrap(type(model).forward))


def _parsed(function: Any) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return None


def _helper_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _HELPERS:
            yield node


def _says(model: nn.Module, keyword: str) -> bool:
    """Whether the forward calls a helper with ``keyword=True``."""
    tree = _forward(model)
    given = [item for call in _helper_calls(tree) for item in call.keywords] if tree is not None else []
    return any(
        item.arg == keyword and isinstance(item.value, ast.Constant) and item.value.value is True for item in given
    )


def _literal_merge(model: nn.Module) -> int | None:
    """The merge size that code hands to a helper as a number: PaddleOCR-VL's 1, which merges in its projector.

    Its config speaks of the projector's.
    """
    for method in _methods(model):
        tree = _parsed(method) if not _HELPERS.keys().isdisjoint(method.__code__.co_names) else None
        for call in _helper_calls(tree) if tree is not None else ():
            given = [item.value for item in call.keywords if item.arg == "spatial_merge_size"]
            if isinstance(call.func, ast.Name) and call.func.id == "get_vision_position_ids":
                given += call.args[1:2]
            for value in given:
                if isinstance(value, ast.Constant) and isinstance(value.value, int):
                    return value.value
    return None


def _reads_grid(model: nn.Module) -> bool:
    """Whether the forward uses ``grid_thw`` other than as an argument of the helpers that a prologue bypasses."""
    tree = _forward(model)
    if tree is None:
        return True  # no source to read: keeping the input is always right
    bypassed = {id(leaf) for call in _helper_calls(tree) for leaf in ast.walk(call)}
    return any(isinstance(n, ast.Name) and n.id == "grid_thw" and id(n) not in bypassed for n in ast.walk(tree))


__all__ = [
    "find",
    "run",
    "vision_cu_seqlens",
    "vision_interpolation",
    "vision_position_ids",
    "vision_windows",
]
