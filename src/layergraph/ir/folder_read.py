"""The reading half of :mod:`layergraph.ir.folder`: the manifest, parts by their hashes, graphs over their weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layergraph.errors import FormatError, LayerGraphError, MissingFileError
from layergraph.ir import exported as torch_side
from layergraph.ir import safetensors_io
from layergraph.ir.cache_geometry import CacheGeometry
from layergraph.ir.graph_json import load_graph
from layergraph.ir.interface import Interface
from layergraph.ir.layers import LayerIndex
from layergraph.ir.program import GraphUnit, Original, Provenance

SCHEMA = 1
KIND = "layergraph program"
MANIFEST, CONFIG, ADAPTER = "manifest.json", "config.json", "adapter_config.json"


def check_folder(root: Path) -> None:
    """Refuse what is no folder, or an empty one.

    Raises:
        MissingFileError: nothing is there, a file, or nothing in it.
    """
    if not root.exists():
        what = "no such folder"
    elif not root.is_dir():
        what = "this is a file, not a folder"
    elif not any(root.iterdir()):
        what = "the folder is empty"
    else:
        return
    raise MissingFileError(
        what,
        path=str(root),
        do="check the path; it is read on this machine only, never on a hub",
        shell="give a folder written by save_pretrained, or by layergraph",
    )


def kind_of(root: Path) -> str:
    """What a folder holds, by its files: ``program``, ``model``, ``adapter`` or ``something else``."""
    files = ((MANIFEST, "program"), (ADAPTER, "adapter"), (CONFIG, "model"))
    return next((kind for file, kind in files if (root / file).is_file()), "something else")


def _no_program(root: Path) -> MissingFileError:
    """The error for a folder without a manifest: what it holds instead, and what can be done with that."""
    found = ", ".join(sorted(item.name for item in root.iterdir())[:6])
    kind = kind_of(root)
    if kind == "model":
        return MissingFileError(
            "this folder holds a model, and no saved program",
            path=str(root),
            expected=f"{MANIFEST}, which program.save() writes",
            found=found,
            do="load the model with from_pretrained and make a program of it: layergraph.trace(model); or on the "
            f"command line: layergraph optimize {root} -o OUT",
            shell=f"layergraph optimize {root} -o OUT makes a program of it",
        )
    if kind == "adapter":
        return MissingFileError(
            "this folder holds an adapter, and no saved program",
            path=str(root),
            expected=f"{MANIFEST}, which program.save() writes",
            found=found,
            do="load the program or model it belongs to; program.apply(layergraph.WeaveShadow(folder)) weaves it in",
            shell="give the folder of its model, and this one with --adapter, or --pass weave-shadow:adapter=FOLDER",
        )
    return MissingFileError(
        "the folder holds no saved program",
        path=str(root),
        expected=f"{MANIFEST}, which program.save() writes",
        found=found,
        do="give a folder that program.save() wrote",
        shell="give a folder written by layergraph optimize",
    )


def read_manifest(root: Path) -> dict[str, Any]:
    """``manifest.json`` as data.

    Raises:
        MissingFileError: there is none; says what is there instead.
        FormatError: it is damaged, of something else, or of a newer version.
    """
    check_folder(root)
    path = root / MANIFEST
    if not path.is_file():
        raise _no_program(root)
    try:
        manifest = json.loads(path.read_bytes())
        schema, kind = manifest["schema"], manifest["kind"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(root, f"{type(error).__name__}: {error}") from error
    if kind != KIND:
        raise FormatError("this folder holds something else", path=str(root), expected=KIND, found=str(kind))
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise _damaged(root, f"schema {schema!r}")
    if schema > SCHEMA:
        raise FormatError(
            "the folder was written by a newer layergraph",
            path=str(root),
            expected=f"schema {SCHEMA} or older",
            found=f"schema {schema}",
            do="upgrade layergraph",
        )
    if manifest.pop("sha256", None) != digest(manifest):
        raise _damaged(root, "it is not as it was written: its hash is another")
    return manifest


def digest(manifest: Mapping[str, Any]) -> str:
    """The hash that a manifest carries of all else in it."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def well_formed(root: Path) -> Iterator[None]:
    """Whatever a manifest that lacks something, or holds another kind of thing, leads to within is told as that."""
    try:
        yield
    except LayerGraphError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(root, f"{type(error).__name__}: {error}") from error


def _damaged(root: Path, found: str) -> FormatError:
    return FormatError(
        f"{MANIFEST} is damaged", path=str(root), found=found[:200], do="copy the folder again, or save again"
    )


def _read_part(root: Path, file: str, sha256: str) -> bytes:
    path = inside(root, file)
    safetensors_io.check_hash(path, sha256)
    return path.read_bytes()


def inside(root: Path, file: str) -> Path:
    """A part's path. Parts lie in the folder itself: a manifest that says otherwise is damaged, or worse."""
    if Path(file).name != file:
        raise FormatError(f"{MANIFEST} names a file outside of the folder", path=str(root), found=file)
    return root / file


@dataclass(frozen=True)
class SavedUnit:
    """A graph as it lies on disk, read but not built."""

    graph: bytes
    index: Mapping[str, Any]


def read_units(root: Path, parts: Mapping[str, Any]) -> dict[str, SavedUnit]:
    return {
        name: SavedUnit(
            _read_part(root, part["file"], part["sha256"]),
            json.loads(_read_part(root, part["index"], part["index_sha256"])),
        )
        for name, part in parts.items()
    }


def build_units(
    saved: Mapping[str, SavedUnit],
    kind: str,
    state: dict[str, torch.Tensor],
    held: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
) -> dict[str, GraphUnit]:
    tied = {alias: kept for alias, kept in aliases.items() if kept in state}
    # Twice: graphs may take a tied weight under each of its names, and all of them must be one Parameter in the end.
    state.update({alias: state[kept] for alias, kept in tied.items()})
    for unit in saved.values():
        _as_parameters(unit.graph, state)
    state.update({alias: state[kept] for alias, kept in tied.items()})
    units = {}
    for name, unit in saved.items():
        example_prefix = f"{kind}/{name}/example/"
        constants = {key: held[f"{kind}/{name}/constant/{key}"] for key in unit.index["constants"]}
        examples = {
            key.removeprefix(example_prefix): tensor for key, tensor in held.items() if key.startswith(example_prefix)
        }
        provenance = unit.index["provenance"].items()
        units[name] = GraphUnit(
            load_graph(unit.graph, state, constants, examples, name),
            Interface.from_dict(unit.index["interface"]),
            LayerIndex.from_dict(unit.index["layers"]),
            {node: Provenance(made_by, tuple(sources)) for node, (made_by, sources) in provenance},
            CacheGeometry.from_dict(unit.index["cache"]) if unit.index["cache"] else None,
        )
    return units


def _as_parameters(data: bytes, state: dict[str, torch.Tensor]) -> None:
    """Make Parameters of the tensors that the graph's signature calls so; torch checks for it."""
    for spec in json.loads(data)["graph_module"]["signature"]["input_specs"]:
        name = spec.get("parameter", {}).get("parameter_name")
        if name is None:
            continue
        if name not in state:
            raise FormatError(f"no weight {name!r} among those saved", do="copy the folder again, or save again")
        state[name] = torch_side.as_parameter(state[name])


def load_original(root: Path, manifest: Mapping[str, Any], held: Mapping[str, torch.Tensor]) -> Original | None:
    if not manifest["original"]:
        return None
    # Read now, built when asked for: the folder may be overwritten in between.
    saved = read_units(root, manifest["original"])
    aliases = manifest["original_aliases"]
    parameters = {
        name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in manifest["original_parameters"].items()
    }
    return Original(lambda state: build_units(saved, "original", state, held, aliases), parameters, aliases)


__all__ = [
    "KIND",
    "MANIFEST",
    "SCHEMA",
    "SavedUnit",
    "build_units",
    "check_folder",
    "digest",
    "inside",
    "kind_of",
    "load_original",
    "read_manifest",
    "read_units",
    "well_formed",
]
