"""Weights of a checkpoint folder straight into a program's own layout, one tensor at a time.

For programs traced on the meta device, or with other weights than they should run with. Tensors are mapped, not read,
and a reshape of a mapped tensor is a view: what is in memory at once is the model plus the tensor at work.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from layergraph.errors import FormatError, InputError, MissingFileError
from layergraph.ir import exported as torch_side
from layergraph.ir.folder_read import check_folder
from layergraph.ir.paths import as_path
from layergraph.ir.program import GraphUnit, Program
from layergraph.ir.weights import Remap

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Progress = Callable[[str], None]


def load_weights(program: Program, folder: str | Path, *, progress: Progress | None = None) -> Program:
    """The program over the weights of a safetensors checkpoint (sharded or not) in the model's original layout.

    Raises:
        MissingFileError: no checkpoint there, or a shard is missing.
        InputError: a weight that the program needs is not in it, or has another shape.
        FormatError: a file is damaged.
    """
    say = progress or (lambda text: None)
    remaps = {name: remap for remap in program.weights for name in remap.original}
    several = [remap for remap in program.weights if len(remap.original) > 1]
    if several or len(remaps) < len(program.weights):
        raise InputError(
            "weights that a pass merged cannot be streamed",
            path=", ".join(several[0].original) if several else None,
            do="load them into the model with from_pretrained, and optimize that",
        )
    folder = as_path(folder)
    wanted = {name: tensor for name, tensor in program.state_dict.items() if name not in program.aliases}
    state: dict[str, torch.Tensor] = {}
    # Weights that a pass dropped and the caller kept, to undo it: the old ones would meet the new ones there.
    kept_before = program.original.kept if program.original is not None else {}
    kept: dict[str, torch.Tensor] = {}
    for path, names in _shards(folder):
        say(f"reading {path.name}")
        for name, tensor in _tensors(path, names):
            if name in kept_before:
                kept[name] = _like(kept_before[name], tensor, name)
            for target, value in _rewritten(name, tensor, remaps.get(name)):
                if target in wanted:
                    state[target] = _like(wanted[target], value, target)
    missing = [name for name in wanted if name not in state]
    for name in missing:
        source = next((alias for alias, kept in program.aliases.items() if kept == name and alias in state), None)
        if source is None:
            raise InputError(
                f"the checkpoint has no weight {name!r}",
                found=f"{len(missing)} missing of {len(wanted)}",
                do="give a checkpoint of this model; one in other names loads through from_pretrained",
            )
        state[name] = state[source]
    state.update({alias: state[kept] for alias, kept in program.aliases.items() if kept in state})
    units = {name: _over(unit, state) for name, unit in program.graphs.items()}
    original = dataclasses.replace(program.original, kept=kept) if program.original is not None else None
    return program.evolve(graphs=units, original=original)


def _over(unit: GraphUnit, state: dict[str, torch.Tensor]) -> GraphUnit:
    """The same graph over other weights, off the meta device if it was traced there.

    Raises:
        InputError: a constant was computed on the meta device, so its value was never known.
    """
    exported = torch_side.with_state(unit.exported, state)
    lost = [name for name, value in exported.constants.items() if getattr(value, "is_meta", False)]
    if lost:
        raise InputError(
            "a buffer that no checkpoint holds has no data: it was made on the meta device, or moved there",
            path=lost[0],
            do="build the model on the CPU, or under accelerate.init_empty_weights(), which leaves buffers with data; "
            "or take the program before to()",
        )
    values = [node.meta.get("val") for node in exported.graph.nodes]
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in values):
        exported = torch_side.on_device(exported, "cpu")
    return dataclasses.replace(unit, exported=exported)


def _shards(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Files and the names to take from each; None for all."""
    check_folder(folder)
    if (folder / INDEX).is_file():
        try:
            places = dict(json.loads((folder / INDEX).read_bytes())["weight_map"])
            if not all(isinstance(place, str) for place in places.values()):
                raise ValueError("weight_map names no files")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"{INDEX} is damaged", path=str(folder), found=str(error), do="copy it again") from error
        for file in dict.fromkeys(places.values()):
            if Path(file).name != file or not (folder / file).is_file():
                raise MissingFileError(f"{file} is missing", path=str(folder), do="copy the whole folder again")
            yield folder / file, [name for name, place in places.items() if place == file]
    elif (folder / SINGLE).is_file():
        yield folder / SINGLE, None
    else:
        raise MissingFileError(f"no {SINGLE} or {INDEX} in the folder", path=str(folder), do="give a checkpoint folder")


def _tensors(path: Path, names: list[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in names if names is not None else list(file.keys()):
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise FormatError(
            f"{path.name} is damaged", path=str(path.parent), found=str(error), do="copy it again"
        ) from error


def _rewritten(name: str, tensor: torch.Tensor, remap: Remap | None) -> Iterator[tuple[str, torch.Tensor]]:
    yield from zip(remap.rewritten, remap.forward([tensor]), strict=True) if remap is not None else [(name, tensor)]


def _like(wanted: torch.Tensor, value: torch.Tensor, name: str) -> torch.Tensor:
    if value.shape != wanted.shape:
        raise InputError(
            f"weight {name!r} has another shape than the program's",
            expected=str(list(wanted.shape)),
            found=str(list(value.shape)),
            do="give a checkpoint of this model",
        )
    if value.is_floating_point() != wanted.is_floating_point():
        raise InputError(
            f"weight {name!r} is of another kind than the program's",
            expected=str(wanted.dtype),
            found=str(value.dtype),
            do="give a checkpoint that is quantised as the program is, or not at all",
        )
    value = value.to(wanted.dtype)
    return torch.nn.Parameter(value, wanted.requires_grad) if isinstance(wanted, torch.nn.Parameter) else value


__all__ = ["load_weights"]
