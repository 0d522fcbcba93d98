"""A program as a folder: graphs as JSON, weights as safetensors, one manifest that names the live parts.

Parts are written under names of their own that carry their hash, then ``manifest.json`` is replaced atomically:
after a crash, a full disk or a kill there is the old program or the new one, complete. Leftovers are swept by the
next write. Weights in the original layout are also a checkpoint that transformers loads (``config.json``,
``model.safetensors.index.json``). Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from layergraph.errors import FormatError, InputError, StorageError
from layergraph.ir import safetensors_io
from layergraph.ir.adapter_folder import read_adapters, sweep_adapters, write_adapters
from layergraph.ir.folder_read import (
    KIND,
    MANIFEST,
    SCHEMA,
    build_units,
    digest,
    inside,
    load_original,
    read_manifest,
    read_units,
    well_formed,
)
from layergraph.ir.graph_json import dump_graph
from layergraph.ir.paths import as_path
from layergraph.ir.program import GraphUnit, ModelInfo, Original, PassRecord, Program
from layergraph.ir.weights import WeightMap

LAYOUTS = ("original", "graph")
_FOREIGN = ("model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json")
_LOCK = ".lock"
_PART = re.compile(r"(graph|original|weights|constants)-[\w.-]*[0-9a-f]{16}\.(json|safetensors)")
Progress = Callable[[str], None]


def save(
    program: Program,
    folder: str | Path,
    *,
    layout: str = "original",
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Path:
    """Write the program into ``folder``, replacing an older one there in one step.

    Raises:
        InputError: the layout is unknown, or weights have no data (meta device).
        StorageError: the folder is a file, cannot be written, or the disk is full; what was there is still there.
    """
    if layout not in LAYOUTS:
        raise InputError(f"unknown layout {layout!r}", expected=" or ".join(LAYOUTS), do="use one of these")
    say = progress or (lambda text: None)
    target = as_path(folder)
    with _scratch(target) as scratch:
        say("writing graphs")
        graphs = {name: _write_json_part(scratch, "graph", name, unit) for name, unit in program.graphs.items()}
        source = program.original.restore(program, missing="meta").graphs if program.original is not None else {}
        originals = {name: _write_json_part(scratch, "original", name, unit) for name, unit in source.items()}
        say("writing weights")
        weights = _write_weights(program, scratch, layout, max_shard_bytes)
        own = set(program.shadow.input_names) if program.shadow is not None else set()
        constants = _write_constants({"graph": program.graphs, "original": source}, scratch, own)
        manifest = {
            "schema": SCHEMA,
            "kind": KIND,
            "torch": torch.__version__,
            "layout": layout,
            "graphs": graphs,
            "original": originals,
            "original_parameters": _parameter_table(program.original),
            "original_aliases": dict(program.original.aliases) if program.original is not None else {},
            "weights": weights,
            "constants": constants,
            "aliases": dict(program.aliases),
            "remaps": program.weights.to_list(),
            "history": [record.to_dict() for record in program.history],
            "model": program.model.to_dict(),
            "shadow": write_adapters(program.shadow, scratch, target),
            "fingerprint": program.fingerprint,
        }
        extra = _checkpoint_files(program, weights) if layout == "original" else {}
        _publish(scratch, target, manifest, extra)
        sweep_adapters(target, manifest["shadow"])
    say(f"saved {target.name}")
    return target


def load(folder: str | Path, *, verify: str = "full", progress: Progress | None = None) -> Program:
    """The program saved in ``folder``; weights are mapped, not copied.

    ``verify="full"`` compares the hash of every file with the manifest; ``"graphs"`` leaves out the weights.

    Raises:
        MissingFileError, FormatError: a file is not there, damaged, or of a newer version.
    """
    if verify not in ("full", "graphs"):
        raise InputError(f"unknown verify {verify!r}", expected="full or graphs", do="use one of these")
    say = progress or (lambda text: None)
    root = as_path(folder)
    manifest = read_manifest(root)
    with well_formed(root):
        say("reading weights")
        tensors: dict[str, torch.Tensor] = {}
        for part in manifest["weights"]:
            path = inside(root, part["file"])
            tensors.update(safetensors_io.read(path, part["sha256"] if verify == "full" else None))
        held: dict[str, torch.Tensor] = {}
        if manifest["constants"]:
            part = manifest["constants"]
            held = safetensors_io.read(inside(root, part["file"]), part["sha256"])
        remaps = WeightMap.from_list(manifest["remaps"])
        state = remaps.to_rewritten(tensors) if manifest["layout"] == "original" else dict(tensors)
        model = ModelInfo.from_dict(manifest["model"])
        shadow = read_adapters(root, manifest.get("shadow"), verify=verify, training=model.training)
        say("reading graphs")
        saved = read_units(root, manifest["graphs"])
        if shadow is not None:
            for name, unit in saved.items():
                wanted = tuple(item["name"] for item in unit.index["interface"]["inputs"])
                examples = shadow.inputs(None, wanted, state).items()
                held.update({f"graph/{name}/example/{key}": tensor.detach() for key, tensor in examples})
        units = build_units(saved, "graph", state, held, manifest["aliases"])
        program = Program(
            units,
            remaps,
            model,
            history=tuple(PassRecord.from_dict(item) for item in manifest["history"]),
            original=load_original(root, manifest, held),
            aliases=manifest["aliases"],
            shadow=shadow,
        )
        if program.fingerprint != manifest["fingerprint"]:
            raise FormatError(
                "the loaded graph is not the one that was saved",
                path=str(root),
                expected=str(manifest["fingerprint"]),
                found=program.fingerprint,
                do=f"load with torch {manifest['torch']}, or make the program again",
            )
    return program


# Writing ----------------------------------------------------------------------------------------------------------


def _make_folder(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = error.strerror or str(error)
        if target.is_symlink():
            found = "a link that leads to no folder"
        elif target.exists():
            found = "a file of that name"
        raise StorageError(
            "cannot make the output folder", path=str(target), found=found, do="choose another"
        ) from error
    if not (target / MANIFEST).exists():
        for name in _FOREIGN:
            if (target / name).exists():
                # transformers would go on reading these, and not what is written here.
                raise StorageError(
                    "the folder holds another checkpoint", path=str(target), found=name, do="choose another folder"
                )


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder beside the parts, gone when the block ends. One writer at a time; leftovers of killed ones go first.

    Where nothing was, nothing is left by a writer that fails.
    """
    made = [folder for folder in (target, *target.parents) if not folder.exists()]
    try:
        with _lock(target):
            try:
                for leftover in target.glob(".writing-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=".writing-", dir=target) as scratch:
                    yield Path(scratch)
            except BaseException:
                if not (target / MANIFEST).exists():
                    with contextlib.suppress(OSError):
                        _clear(target, made)
                raise
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            "saving failed",
            path=str(target),
            found=error.strerror or str(error),
            do="free space or choose another folder; what was there before is still there",
        ) from error


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """The folder for this writer alone, made if it was not there."""
    while True:
        _make_folder(target)
        with open(target / _LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held = os.fstat(lock.fileno())
            # A writer that failed may have taken the folder away while this one waited.
            if (target / _LOCK).exists() and os.path.samestat(held, (target / _LOCK).stat()):
                yield
                return


def _clear(target: Path, made: list[Path]) -> None:
    """Take away what a writer that failed has left in a folder without a program, and the folders it made."""
    sweep_adapters(target, None)
    for path in target.iterdir():
        if _PART.fullmatch(path.name) or path.name == _LOCK:
            path.unlink()
    for folder in made:
        folder.rmdir()


def _write_json_part(scratch: Path, kind: str, name: str, unit: GraphUnit) -> dict[str, Any]:
    data = dump_graph(unit.exported)
    sha256 = hashlib.sha256(data).hexdigest()
    file = f"{kind}-{name}-{sha256[:16]}.json"
    (scratch / file).write_bytes(data)
    side = {
        "interface": unit.interface.to_dict(),
        "layers": unit.layers.to_dict(),
        "provenance": {node: [made.made_by, list(made.made_from)] for node, made in unit.provenance.items()},
        "constants": list(unit.exported.constants),
        "cache": unit.cache.to_dict() if unit.cache is not None else None,
    }
    text = json.dumps(side, separators=(",", ":")).encode()
    side_sha256 = hashlib.sha256(text).hexdigest()
    side_file = f"{kind}-{name}.index-{side_sha256[:16]}.json"
    (scratch / side_file).write_bytes(text)
    return {"file": file, "sha256": sha256, "index": side_file, "index_sha256": side_sha256}


def _write_weights(program: Program, scratch: Path, layout: str, max_shard_bytes: int) -> list[dict[str, Any]]:
    kept = {name: tensor for name, tensor in program.state_dict.items() if name not in program.aliases}
    tensors = program.weights.to_original(kept) if layout == "original" else kept
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        n_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + n_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += n_bytes
    parts = []
    for number, shard in enumerate(shards):
        raw = scratch / f"shard-{number}"
        sha256 = safetensors_io.write(raw, shard)
        file = f"weights-{number + 1:05d}-{sha256[:16]}.safetensors"
        raw.rename(scratch / file)
        size = sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
        parts.append({"file": file, "sha256": sha256, "names": list(shard), "bytes": size})
    return parts


def _write_constants(
    sources: Mapping[str, Mapping[str, GraphUnit]], scratch: Path, adapter_inputs: set[str]
) -> dict[str, Any] | None:
    """Buffers that are not part of the state dict, constants and example inputs, in one small file.

    Inputs that adapters fill have their examples with the adapters.
    """
    tensors: dict[str, torch.Tensor] = {}
    for kind, graphs in sources.items():
        for name, unit in graphs.items():
            for key, value in unit.exported.constants.items():
                if not isinstance(value, torch.Tensor):
                    raise InputError(f"a constant of type {type(value).__name__} cannot be saved", path=key)
                tensors[f"{kind}/{name}/constant/{key}"] = value
            for key, value in (unit.exported.example_inputs or ((), {}))[1].items():
                if value.device.type != "meta" and key not in adapter_inputs:
                    tensors[f"{kind}/{name}/example/{key}"] = value
    if not tensors:
        return None
    raw = scratch / "constants"
    sha256 = safetensors_io.write(raw, tensors)
    file = f"constants-{sha256[:16]}.safetensors"
    raw.rename(scratch / file)
    return {"file": file, "sha256": sha256}


def _parameter_table(original: Original | None) -> dict[str, Any]:
    if original is None:
        return {}
    return {
        name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in original.parameters.items()
    }


def _checkpoint_files(program: Program, weights: list[dict[str, Any]]) -> dict[str, Any]:
    """What makes the folder a checkpoint of the model's own kind as well."""
    index = {
        "metadata": {"total_size": sum(part["bytes"] for part in weights)},
        "weight_map": {name: part["file"] for part in weights for name in part["names"]},
    }
    files: dict[str, Any] = {"model.safetensors.index.json": index}
    if program.model.config is not None:
        config = dict(program.model.config)
        config.setdefault("architectures", [program.model.cls.rpartition(":")[2]])
        if not config["architectures"]:
            config["architectures"] = [program.model.cls.rpartition(":")[2]]
        files["config.json"] = config
    if program.model.generation_config is not None:
        files["generation_config.json"] = program.model.generation_config
    return files


def _publish(scratch: Path, target: Path, manifest: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    live = {path.name for path in scratch.iterdir()}
    # As it will be read: JSON knows neither tuples nor keys that are not text.
    plain = json.loads(json.dumps(manifest))
    files = {MANIFEST: {**plain, "sha256": digest(plain)}, **extra}
    for name, data in files.items():
        (scratch / name).write_text(json.dumps(data, indent=1, ensure_ascii=False))
    for name in (*live, *files):  # on the disk, every one, before the first takes its place
        _sync(scratch / name)
    for name in (*live, *files):
        os.replace(scratch / name, target / name)
    if not extra:
        for name in ("model.safetensors.index.json",):
            # An index of another layout would point transformers at weights that are gone.
            (target / name).unlink(missing_ok=True)
    for path in target.iterdir():
        if _PART.fullmatch(path.name) and path.name not in live:
            path.unlink()


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


__all__ = ["load", "save"]
