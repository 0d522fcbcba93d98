"""What ``layergraph bench kernels`` shows: the machine line, a table, JSON and a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layergraph.errors import InputError

if TYPE_CHECKING:
    from layergraph.kernels.bench import Result


def machine_line() -> dict[str, Any]:
    """What figures depend on: processor, threads, versions, GPU, how busy the machine is. No host names, no paths."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        )
        model = next(lines, model)
    line: dict[str, Any] = {
        "cpu": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if hasattr(os, "getloadavg"):
        line["load"] = round(os.getloadavg()[0], 1)
    if torch.cuda.is_available():
        line["gpu"] = torch.cuda.get_device_name()
    return line


def table(results: Sequence[Result]) -> str:
    """One line a result; the percentage is of medians."""
    lines = [
        f"{'op':<21}{'T':>6} {'variant':<9}{'median us':>11}{'quartiles us':>20}{'best us':>10}{'KiB':>8}{'GB/s':>8}"
        f"{'floor us':>10}{'% floor':>9}{'error':>9}"
    ]
    for result in results:
        spread = f"{result.lower_us:.1f} .. {result.upper_us:.1f}"
        lines.append(
            f"{result.op:<21}{result.tokens:>6} {result.variant:<9}{result.median_us:>11.1f}{spread:>20}"
            f"{result.best_us:>10.1f}{result.bytes / 1024:>8.0f}{result.gb_per_s:>8.1f}{result.floor_us:>10.1f}"
            f"{result.percent_of_floor:>9.1f}{result.error:>9.1g}"
        )
    return "\n".join(lines)


def write_json(results: Sequence[Result], path: str | Path) -> None:
    """Machine line and results."""
    document = {"machine": machine_line(), "results": [result.as_dict() for result in results]}
    Path(path).write_text(json.dumps(document, indent=1) + "\n")


def plot(results: Sequence[Result], path: str | Path) -> None:
    """Time against T for every variant, and the floor, as PNG. Needs matplotlib (the ``bench`` extra)."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("bench kernels: no plot without matplotlib", do="pip install layergraph[bench]") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(result.op for result in results))
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4), squeeze=False, layout="constrained")
    for name, axis in zip(names, axes[0], strict=True):
        chosen = [result for result in results if result.op == name]
        for variant in dict.fromkeys(result.variant for result in chosen):
            line = [result for result in chosen if result.variant == variant]
            spread = [
                [result.median_us - result.lower_us for result in line],
                [result.upper_us - result.median_us for result in line],
            ]
            axis.errorbar([x.tokens for x in line], [x.median_us for x in line], spread, marker="o", label=variant)
        floor = {result.tokens: result.floor_us for result in chosen}
        axis.plot(list(floor), list(floor.values()), "k--", label="floor (copy)")
        first = chosen[0]
        axis.set(xscale="log", yscale="log", xlabel="rows T", ylabel="us")
        axis.set_title(
            f"{name}, d {first.d}, r {first.r}, {first.hidden} with {first.weight}, {first.device}", fontsize=8
        )
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


__all__ = ["machine_line", "plot", "table", "write_json"]
