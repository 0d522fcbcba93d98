"""Timing of alternatives side by side: interleaved, so that a busy or throttled machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Runs of one alternative, in seconds.

    Attributes:
        runs: one per round.
        ratio: median over rounds of this one's time by the first one's in the same round.
    """

    runs: tuple[float, ...]
    ratio: float

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a fraction of the median."""
        low, _, high = statistics.quantiles(self.runs, n=4)
        return (high - low) / self.median


def interleaved(
    alternatives: Mapping[str, Callable[[], object]], *, rounds: int = 15, warmup: int = 2
) -> dict[str, Timing]:
    """Time each alternative once a round, in turns whose order is reversed every other round."""
    runs: dict[str, list[float]] = {name: [] for name in alternatives}
    for number in range(-warmup, rounds):
        order = list(alternatives) if number % 2 else list(alternatives)[::-1]
        for name in order:
            start = time.perf_counter()
            alternatives[name]()
            elapsed = time.perf_counter() - start
            if number >= 0:
                runs[name].append(elapsed)
    first = next(iter(runs.values()))
    return {
        name: Timing(tuple(times), statistics.median(a / b for a, b in zip(times, first, strict=True)))
        for name, times in runs.items()
    }


__all__ = ["Timing", "interleaved"]
