"""Which kernel with which block sizes: one table, keyed by architecture, rows T, bottleneck r and weight bytes.

:func:`choose` reads the table; what :func:`autotune` found, or :func:`load` read from a file, goes before it. Nothing
is tuned behind the caller's back.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from layergraph.errors import FormatError, InputError, MissingFileError

Family = Literal["tile", "split", "row"]
OPS = ("shadow_inject", "shadow_update", "shadow_update_inject")

#: Wider bottlenecks than this run as plain matmuls: the products then dominate the traffic that fusion saves.
MAX_RANK = 64

#: Architectures whose configurations the compile test checks, with the shared memory one block may use, in bytes.
#: Triton does not check this limit itself.
SHARED_MEMORY_LIMITS = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}

# More slices than this and the sum over partials outweighs what another program would gain.
MAX_SLICES = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """How one op is launched.

    Args:
        family: ``tile``: one kernel over row tiles. ``row``: the same kernel with one row a program, without matrix
            instructions. ``split``: several kernels over slices of d, partial sums between them.
        block_t: rows a program takes; 1, or a power of two from 16 (the least a matrix instruction takes).
        block_d: columns read at a time, a power of two from 16.
        slice_d: columns a program of the split family owns, a multiple of block_d; 0 for the others.
        warps, stages: Triton's ``num_warps`` and ``num_stages``.
    """

    family: Family
    block_t: int
    block_d: int
    slice_d: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        def power_of_two(value: int, least: int) -> bool:
            return value >= least and value & (value - 1) == 0

        faults = {
            "family": self.family not in get_args(Family),
            "block_t": not (self.block_t == 1 or power_of_two(self.block_t, 16)),
            "block_d": not power_of_two(self.block_d, 16),
            "slice_d": (self.slice_d == 0 or self.slice_d % self.block_d != 0)
            if self.family == "split"
            else self.slice_d != 0,
            "warps": not power_of_two(self.warps, 1) or self.warps > 32,
            "stages": not 1 <= self.stages <= 8,
        }
        for name, wrong in faults.items():
            if wrong:
                raise InputError(
                    f"kernel configuration: {name} has a value that cannot be launched",
                    expected="see layergraph.kernels.tuning.Config",
                    found=f"{name}={getattr(self, name)!r} in {self}",
                )


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a launch depends on.

    Args:
        op: one of :data:`OPS`.
        arch: such as ``sm_90`` or ``gfx942``.
        tokens: rows T; None where the graph leaves it open.
        d: width of the hidden states.
        rank: the larger of r and u.
        weight_bytes: 2 or 4.
        hidden_bytes: 2 or 4.
    """

    op: str
    arch: str
    tokens: int | None
    d: int
    rank: int
    weight_bytes: int
    hidden_bytes: int


class Row(NamedTuple):
    """One line of the table: it holds up to these bounds; the first line that fits is taken."""

    arch: str
    max_tokens: int | None
    max_d: int | None
    max_rank: int
    weight_bytes: int | None
    config: Config
    reason: str

    def fits(self, problem: Problem) -> bool:
        """True where this row serves the problem; an open T fits only rows that hold for every T or say so."""
        tokens = OPEN_TOKENS if problem.tokens is None else problem.tokens
        return (
            self.arch in (problem.arch, "*")
            and (self.max_tokens is None or tokens <= self.max_tokens)
            and (self.max_d is None or problem.d <= self.max_d)
            and problem.rank <= self.max_rank
            and self.weight_bytes in (problem.weight_bytes, None)
        )


#: An open T is served as if it were this many rows: split programs of 16 rows are near their best at T = 1, and at
#: T = 4,096 read h three times where a tile does once; a tile at T = 1 would leave all but one multiprocessor idle.
OPEN_TOKENS = 256

# What the reasons rest on: the compile test's tables (registers, spills, shared memory) and counted traffic. None is a
# GPU timing yet; benchmarks/gpu.sh measures every row that a machine's architecture can take.
TABLE: tuple[Row, ...] = (
    Row("*", 1, 1024, 16, None, Config("row", 1, 256, 0, 8, 2), "one launch instead of three; 64 registers"),
    Row("*", 4, None, 16, None, Config("split", 1, 128, 128, 4, 1), "d / 128 programs a row fill a chip; 64 registers"),
    Row("*", 16, None, 16, None, Config("split", 16, 32, 128, 4, 1), "one row tile, so d / 128 programs"),
    Row("*", 256, None, 16, None, Config("split", 16, 32, 256, 4, 1), "T d / 4,096 programs; BD = 64 spills on sm_90"),
    Row("*", 2048, None, 16, None, Config("split", 16, 32, 1024, 4, 1), "T d / 16,384 programs, fewer partial sums"),
    Row("*", None, None, 16, 2, Config("tile", 16, 64, 0, 4, 2), "BT >= 0.6 r bytes = 10 at r = 8 hides weight reads"),
    Row("*", None, None, 16, 4, Config("tile", 32, 32, 0, 4, 2), "BT >= 0.6 r bytes = 20 at r = 8; BD = 64 spills"),
    Row("*", 256, None, 64, None, Config("split", 16, 32, 128, 4, 1), "few rows: d cut small; BT = 1 spills"),
    Row("sm_90", None, None, 64, None, Config("split", 64, 32, 1024, 8, 2), "a warp group's HGMMA needs 64 rows"),
    Row("sm_100", None, None, 64, None, Config("split", 64, 64, 1024, 8, 1), "as sm_90, for UTCHMMA; BD = 32 spills"),
    Row("sm_80", None, None, 64, None, Config("split", 32, 64, 1024, 8, 1), "BT = 64 spills, as do two stages"),
    Row("gfx942", None, None, 64, None, Config("split", 64, 32, 1024, 4, 1), "spills with 8 warps or two stages"),
    Row("*", None, None, 64, None, Config("split", 16, 32, 1024, 4, 1), "fits every target's registers and 64 KiB"),
)

_tuned: dict[Problem, Config] = {}
_lock = threading.Lock()


def choose(problem: Problem) -> Config:
    """The configuration for a problem: a tuned one if there is one, else the table's.

    A tuned entry serves every T of its bucket (:func:`bucket`), so that tuning a few sizes covers all.
    """
    tuned = _tuned.get(dataclasses.replace(problem, tokens=bucket(problem.tokens)))
    if tuned is not None:
        return tuned
    for row in TABLE:
        if row.fits(problem):
            return row.config
    raise InputError(
        f"no kernel configuration for {problem.op}",
        expected=f"r and u up to {MAX_RANK}",
        found=str(problem),
        do="run the reference (layergraph.kernels.DECOMPOSITIONS)",
    )


def bucket(tokens: int | None) -> int | None:
    """T rounded up to the bucket that shares a tuned entry: 1, 4, 16, 64, and on by fours; None stays None."""
    if tokens is None:
        return None
    size = 1
    while size < tokens:
        size *= 4
    return size


def precision(arch: str, hidden_bytes: int) -> str:
    """Triton's ``input_precision`` for products with float32 weights.

    Half-precision states carry 8 to 11 bits, so three bfloat16 products (error about 2**-16) lose nothing that the
    rounding of the result keeps; ``ieee`` would leave the matrix unit. Float32 states need float32 products: three tf32
    ones on NVIDIA, the native ones on AMD.
    """
    if hidden_bytes == 2:
        return "bf16x3"
    return "ieee" if arch.startswith("gfx") else "tf32x3"


def shipped(arch: str) -> list[tuple[Row, Config]]:
    """Every row of the table that can serve an architecture: what the compile test goes through."""
    return [(row, row.config) for row in TABLE if row.arch in (arch, "*")]


def candidates(problem: Problem) -> list[Config]:
    """Configurations worth timing for a problem: the table's for this bottleneck, and its neighbours in each number."""
    same = (row._replace(max_tokens=None).fits(problem) for row in TABLE)
    found: dict[Config, None] = dict.fromkeys(row.config for row, fits in zip(TABLE, same, strict=True) if fits)
    for config in list(found):
        wider = 2 * config.slice_d
        for changes in (
            {"warps": config.warps * 2},
            {"warps": max(1, config.warps // 2)},
            {"stages": config.stages % 3 + 1},
            {"block_d": config.block_d * 2, "slice_d": wider},
            {"slice_d": wider},
        ):
            found.setdefault(dataclasses.replace(config, **changes))  # type: ignore[arg-type]
    return [config for config in found if config.family != "row" or problem.tokens == 1]


def autotune(
    problem: Problem, measure: Callable[[Config], float], among: Iterable[Config] | None = None
) -> tuple[Config, float]:
    """Time configurations, keep the fastest for later calls of :func:`choose`, and return it with its time.

    Args:
        problem: what to tune for; its T stands for its whole bucket.
        measure: seconds (or any cost) of one configuration; may raise to say that it cannot run, which rules it out.
        among: what to try; :func:`candidates` if None.

    Raises:
        InputError: no configuration ran; the last failure is its cause.
    """
    best: tuple[Config, float] | None = None
    failure: Exception | None = None
    for config in candidates(problem) if among is None else among:
        try:
            cost = measure(config)
        except Exception as error:  # a candidate over a hardware limit fails in the compiler's or driver's own ways
            failure = error
            continue
        if best is None or cost < best[1]:
            best = config, cost
    if best is None:
        raise InputError(f"autotune: no configuration of {problem.op} ran", found=str(failure)) from failure
    _remember({problem: best[0]})
    return best


def forget() -> None:
    """Drop every tuned configuration; :func:`choose` goes by the table again."""
    global _tuned
    with _lock:
        _tuned = {}


def save(path: str | os.PathLike[str]) -> None:
    """Write the tuned configurations as JSON; :func:`load` reads them back."""
    entries = [
        {"problem": dataclasses.asdict(problem), "config": dataclasses.asdict(config)}
        for problem, config in sorted(_tuned.items(), key=lambda item: str(item[0]))
    ]
    Path(path).write_text(
        json.dumps({"format": "layergraph-kernel-tuning", "version": 1, "entries": entries}, indent=1)
    )


def load(path: str | os.PathLike[str]) -> int:
    """Add the configurations that :func:`save` wrote, and return how many; nothing is added if any is unreadable.

    Raises:
        MissingFileError: there is no such file.
        FormatError: the file is damaged, of another kind, or of a newer version.
    """
    name = os.fspath(path)
    try:
        document = json.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise MissingFileError("no kernel tuning file", path=name, do="tuning.save(path) writes one") from error
    except (OSError, ValueError) as error:
        raise FormatError("kernel tuning file cannot be read", path=name, found=str(error)) from error
    if not isinstance(document, dict) or document.get("format") != "layergraph-kernel-tuning":
        raise FormatError("not a kernel tuning file", path=name, expected='"format": "layergraph-kernel-tuning"')
    if document.get("version") != 1:
        raise FormatError(
            "kernel tuning file of another version", path=name, expected="1", found=str(document.get("version"))
        )
    entries = document.get("entries")
    if not isinstance(entries, list):
        raise FormatError("kernel tuning file without entries", path=name, expected="a list", found=repr(entries))
    found: dict[Problem, Config] = {}
    for index, entry in enumerate(entries):
        try:
            problem = _from_fields(Problem, entry["problem"])
            found[problem] = _from_fields(Config, entry["config"])
        except (TypeError, KeyError, ValueError) as error:
            raise FormatError(f"kernel tuning file: entry {index} is damaged", path=name, found=str(error)) from error
    _remember(found)
    return len(found)


def _remember(found: dict[Problem, Config]) -> None:
    global _tuned
    keyed = {dataclasses.replace(problem, tokens=bucket(problem.tokens)): config for problem, config in found.items()}
    with _lock:
        # A new dict each time: readers on other threads never see a half-written one.
        _tuned = {**_tuned, **keyed}


def _from_fields(kind: Any, values: Any) -> Any:
    """Build a dataclass from JSON, holding every field to its annotated type."""
    if not isinstance(values, dict):
        raise TypeError(f"expected an object, found {values!r}")
    types: dict[str, Any] = {"str": str, "int": int, "Family": str, "int | None": (int, type(None))}
    for field in dataclasses.fields(kind):
        value = values[field.name]
        if not isinstance(value, types[str(field.type)]) or isinstance(value, bool):
            raise TypeError(f"{field.name}: expected {field.type}, found {value!r}")
    return kind(**values)


__all__ = [
    "MAX_RANK",
    "MAX_SLICES",
    "OPEN_TOKENS",
    "OPS",
    "SHARED_MEMORY_LIMITS",
    "TABLE",
    "Config",
    "Problem",
    "Row",
    "autotune",
    "bucket",
    "candidates",
    "choose",
    "forget",
    "load",
    "precision",
    "save",
    "shipped",
]
