"""A program's adapters on disk, each in peft's own format: ``adapters/NAME-HASH/adapter_model.safetensors``.

A folder's name carries the hash of what is in it, so a new program's adapters stand beside an older one's until the
manifest names them; then the older ones are swept. peft loads each folder as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layergraph.errors import FormatError
from layergraph.ir import safetensors_io
from layergraph.ir.adapter import AdapterSlot, Shadow

FOLDER = "adapters"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def write_adapters(shadow: Shadow | None, scratch: Path, target: Path) -> dict[str, Any] | None:
    """Write each adapter into a folder of its own under ``target``; returns what the manifest says of them."""
    if shadow is None:
        return None
    (target / FOLDER).mkdir(exist_ok=True)
    parts = {}
    for name, adapter in shadow.adapters.items():
        made = scratch / f"adapter-{name}"
        made.mkdir()
        text = json.dumps(adapter.config, indent=2, sort_keys=True).encode()
        (made / CONFIG_FILE).write_bytes(text)
        weights = safetensors_io.write(made / WEIGHTS_FILE, adapter.tensors)
        config = hashlib.sha256(text).hexdigest()
        folder = f"{name}-{hashlib.sha256((weights + config).encode()).hexdigest()[:16]}"
        for path in made.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if (target / FOLDER / folder).exists():
            shutil.rmtree(made)  # the very same adapter: its name carries the hash
        else:
            os.replace(made, target / FOLDER / folder)
        parts[name] = {"folder": folder, "config_sha256": config, "weights_sha256": weights}
    return {
        "slots": [slot.to_dict() for slot in shadow.slots],
        "geometry": dict(shadow.geometry),
        "active": shadow.active,
        "adapters": parts,
    }


def sweep_adapters(target: Path, written: Mapping[str, Any] | None) -> None:
    """Remove adapters that the manifest in ``target`` does not name."""
    folder = target / FOLDER
    live = {part["folder"] for part in written["adapters"].values()} if written is not None else set()
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name not in live and (path / CONFIG_FILE).is_file():
                shutil.rmtree(path)
        if not any(folder.iterdir()):
            folder.rmdir()


def read_adapters(root: Path, written: Mapping[str, Any] | None, *, verify: str, training: bool) -> Shadow | None:
    """The adapters that a manifest names; weights are mapped, not copied.

    Raises:
        MissingFileError, FormatError: a file is not there or damaged.
    """
    if written is None:
        return None
    shadow = Shadow(tuple(AdapterSlot.from_dict(item) for item in written["slots"]), written["geometry"])
    for name, part in written["adapters"].items():
        folder = root / FOLDER / part["folder"]
        if Path(part["folder"]).name != part["folder"]:
            raise FormatError("the manifest names a folder outside of this one", path=str(root), found=part["folder"])
        safetensors_io.check_hash(folder / CONFIG_FILE, part["config_sha256"])
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        sha256 = part["weights_sha256"] if verify == "full" else None
        tensors = safetensors_io.read(folder / WEIGHTS_FILE, sha256)
        shadow = shadow.with_adapter(shadow.fit(name, config, tensors, training=training))
    return shadow.with_active(written["active"])


__all__ = ["CONFIG_FILE", "FOLDER", "WEIGHTS_FILE", "read_adapters", "sweep_adapters", "write_adapters"]
