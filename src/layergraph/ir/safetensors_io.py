"""Safetensors files, written one tensor at a time with a hash of what went in, and read back mapped.

The library's own writer wants every tensor in memory at once and gives no hash; reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from layergraph.errors import FormatError, InputError, MissingFileError, StorageError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_CHUNK = 1 << 24


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write ``tensors`` and return the file's sha256. One tensor at a time is brought to the CPU.

    Raises:
        InputError: a dtype that the format does not have, or a tensor without data.
        StorageError: the disk is full, or the place cannot be written. The file may be there in part.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"safetensors cannot hold {tensor.dtype}", path=name, do="convert it first")
        if tensor.device.type == "meta":
            raise InputError(
                "a tensor on the meta device has no data to save",
                path=name,
                do="fill them first: program.load_weights(folder)",
            )
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    try:
        with open(path, "wb") as file:
            for part in _parts(text, tensors):
                file.write(part)
                digest.update(part)
    except OSError as error:
        raise StorageError(
            f"cannot write {path.name}",
            path=str(path.parent),
            found=error.strerror or str(error),
            do="free space or choose another folder; what was there before is still there",
        ) from error
    return digest.hexdigest()


def _parts(header: bytes, tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield struct.pack("<Q", len(header))
    yield header
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            data = memoryview(flat.view(torch.uint8).numpy())
            for start in range(0, len(data), _CHUNK):
                yield data[start : start + _CHUNK]


def read(path: Path, sha256: str | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a file, mapped into memory rather than read.

    Raises:
        MissingFileError, FormatError: it is not there, is damaged, or its hash is not ``sha256``.
    """
    check_hash(path, sha256)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _damaged(path, str(error)) from error


def check_hash(path: Path, sha256: str | None) -> None:
    """Compare a file with its recorded hash; ``None`` only checks that it is there.

    Raises:
        MissingFileError, FormatError, StorageError.
    """
    if not path.is_file():
        raise MissingFileError(
            f"{path.name} is missing", path=str(path.parent), do="copy the whole folder again, or save again"
        )
    if sha256 is None:
        return
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise StorageError(f"cannot read {path.name}", path=str(path.parent), found=str(error)) from error
    if digest.hexdigest() != sha256:
        raise _damaged(path, f"sha256 {digest.hexdigest()[:16]}..., recorded {sha256[:16]}...")


def _damaged(path: Path, found: str) -> FormatError:
    return FormatError(
        f"{path.name} is damaged", path=str(path.parent), found=found, do="copy the folder again, or save again"
    )


__all__ = ["check_hash", "read", "write"]
