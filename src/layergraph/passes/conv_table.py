"""Whether a Conv2d is faster as Linear: a measured table, kept as plain data, looked up by dtype and size.

``FusePatchEmbed(conv2d=...)`` takes a table as a path to JSON, as that JSON's data, or as rows; it is read when the
pass is made, so that ``find`` stays pure and a saved program remembers it. :func:`measure` makes one for the machine
it runs on (``layergraph bench``).
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from layergraph.errors import FormatError, InputError, MissingFileError

KIND = "layergraph conv2d table"
# (dtype, patch length, features, time of the convolution over that of Linear with its permute)
Row = tuple[str, int, int, float]
# Channels, image side, patch side, features: ViT-B/16, CLIP-B/32, CLIP-L/14, SigLIP-SO400M/14
SHAPES = ((3, 224, 16, 768), (3, 224, 32, 768), (3, 224, 14, 1024), (3, 384, 14, 1152))


def read_table(value: Any) -> tuple[Row, ...]:
    """Rows from a path, from a file's data, or from rows.

    Raises:
        MissingFileError: no file there. FormatError: it holds something else.
    """
    where = None
    if isinstance(value, (str, Path)):
        where = Path(value).name
        if not Path(value).is_file():
            raise MissingFileError(
                f"no conv2d table {where}",
                pass_name="fuse-patch-embed",
                expected='True, False, "auto", or a table that layergraph bench wrote',
                do="check the path",
            )
        try:
            value = json.loads(Path(value).read_bytes())
        except ValueError as error:
            raise _not_a_table(where, str(error)) from error
    if isinstance(value, Mapping):
        if value.get("kind") != KIND:
            raise _not_a_table(where, f"kind {value.get('kind')!r}")
        value = value.get("rows")
    try:
        rows = tuple((str(dtype), int(length), int(features), float(ratio)) for dtype, length, features, ratio in value)
    except (TypeError, ValueError) as error:
        raise _not_a_table(where, str(error)) from error
    if not rows or not all(length > 0 and features > 0 and ratio > 0 for _, length, features, ratio in rows):
        raise _not_a_table(where, "no rows, or sizes below 1")
    return rows


def _not_a_table(where: str | None, found: str) -> FormatError:
    return FormatError(
        "this is no conv2d table",
        pass_name="fuse-patch-embed",
        path=where,
        expected=f'{{"kind": "{KIND}", "rows": [[dtype, patch length, features, ratio], ...]}}',
        found=found,
        do='make one with layergraph bench, or use conv2d="auto"',
        shell="make one with layergraph bench conv2d, or use conv2d=auto",
    )


def nearest(rows: Sequence[Row], dtype: str, length: int, features: int) -> Row | None:
    """The row of that dtype whose sizes are nearest, as ratios; None if the dtype was not measured."""

    def distance(row: Row) -> float:
        return abs(math.log(row[1] / length)) + abs(math.log(row[2] / features))

    return min((row for row in rows if row[0] == dtype), key=distance, default=None)


def measure(
    shapes: Sequence[tuple[int, int, int, int]] = SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    *,
    batch: int = 4,
    repeats: int = 9,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time both forms on this machine, interleaved, and return a table as data for JSON.

    Raises:
        InputError: an image side is smaller than its patch.
    """
    say = progress or (lambda text: None)
    rows = []
    for dtype in dtypes:
        for channels, side, patch, features in shapes:
            if side < patch:
                raise InputError(f"an image of {side} has no patch of {patch}", do="give larger images")
            forms = _forms(channels, side, patch, features, dtype, batch, device)
            times: list[list[float]] = [[], []]
            with torch.no_grad():
                for _ in range(repeats + 1):
                    for form, taken in zip(forms, times, strict=True):
                        taken.append(_time(form, device))
            conv, linear = (statistics.median(taken[1:]) for taken in times)
            name = str(dtype).removeprefix("torch.")
            rows.append([name, channels * patch * patch, features, round(conv / linear, 3)])
            say(f"{name} patch {patch} to {features}: convolution {conv / linear:.2f} times the time of linear")
    machine = {"cpu": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    return {"kind": KIND, "device": device, "batch": batch, "machine": machine, "rows": rows}


def _forms(
    channels: int, side: int, patch: int, features: int, dtype: torch.dtype, batch: int, device: str
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    image = torch.randn(batch, channels, side, side, dtype=dtype, device=device)
    weight = torch.randn(features, channels, patch, patch, dtype=dtype, device=device)
    matrix, count = weight.reshape(features, -1), side // patch

    def conv() -> torch.Tensor:
        return functional.conv2d(image, weight, stride=patch).flatten(2).transpose(1, 2)

    def linear() -> torch.Tensor:
        cut = image[:, :, : count * patch, : count * patch].reshape(batch, channels, count, patch, count, patch)
        rows = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, count * count, -1)
        return functional.linear(rows, matrix)

    return conv, linear


def _time(form: Callable[[], torch.Tensor], device: str) -> float:
    started = time.perf_counter()
    form()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


__all__ = ["KIND", "SHAPES", "measure", "nearest", "read_table"]
