"""Benchmark cases by name, measured interleaved: every form once a round, so that drift meets all alike."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Forms = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """One row of the speed table.

    Attributes:
        name: group and variant, ``patch-embed/qwen2_vl-bfloat16``.
        build: makes the forms to compare.
        ratios: pairs of forms; the first over the second is what the goal speaks of.
        goal: the goal in words.
        repeats: rounds; one more is run first and not counted.
    """

    name: str
    build: Callable[[], Forms]
    ratios: tuple[tuple[str, str], ...]
    goal: str
    repeats: int = 15


CASES: dict[str, Case] = {}


def register(case: Case) -> Case:
    CASES[case.name] = case
    return case


def measure(case: Case) -> dict[str, Any]:
    """Median and quartiles of each form in milliseconds, on the wall and in CPU time of this process.

    CPU time is what to read on a machine that others use too: with one thread it leaves out the time of others.
    """
    forms = case.build()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    with torch.no_grad():
        names = list(forms)
        for number in range(case.repeats + 1):
            # In another order each round: who runs second finds what the first left in the caches.
            order = names if number == 0 else [*names[number % len(names) :], *names[: number % len(names)]]
            if number % 2:
                order = order[::-1]
            for name in order:
                form = forms[name]
                wall, cpu = time.perf_counter(), time.process_time()
                form()
                taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    clocks = {
        clock: {name: _summary([pair[i] * 1e3 for pair in pairs[1:]]) for name, pairs in taken.items()}
        for i, clock in enumerate(("wall_ms", "cpu_ms"))
    }
    ratios = {}
    for first, second in case.ratios:
        each = [a[1] / b[1] for a, b in zip(taken[first][1:], taken[second][1:], strict=True) if b[1] > 0]
        ratios[f"{first} / {second}"] = _summary(each)
    return {"name": case.name, "goal": case.goal, "repeats": case.repeats, **clocks, "cpu_ratios": ratios}


def _summary(values: list[float]) -> dict[str, float]:
    """Median, and the quartiles as spread."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": round(median, 4), "low": round(low, 4), "high": round(high, 4)}


def machine() -> dict[str, Any]:
    """What the figures were measured on: no names of hosts, no paths."""
    import transformers

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _cpu_model() -> str:
    """Model name, and whether it has the matrix units that decide how fast bfloat16 is."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}{' AMX' if 'amx_bf16' in text else ''}"


__all__ = ["CASES", "Case", "machine", "measure", "register"]
