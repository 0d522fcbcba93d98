"""Run benchmark cases: ``python benchmarks/run.py [NAME ...]``. Prints a table, writes JSON and a plot. Never fails."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import cases  # noqa: F401  registers them
from registry import CASES, machine, measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases, or beginnings of their names; all by default")
    parser.add_argument("--list", action="store_true", help="name the cases and their goals")
    parser.add_argument("--threads", type=int, default=1, help="1 leaves out what others do on the machine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    chosen = [case for name, case in CASES.items() if not given.names or name.startswith(tuple(given.names))]
    if given.list:
        print("\n".join(f"{case.name:36} {case.goal}" for case in chosen))
        return 0
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    for case in chosen:
        try:
            result = {"machine": machine(), **measure(case)}
        except Exception as error:  # a benchmark says so and goes on: it never fails a build
            print(f"{case.name:36} could not run: {type(error).__name__}: {str(error)[:120]}", flush=True)
            continue
        path = given.out / f"{case.name.replace('/', '-')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        for text, ratio in result["cpu_ratios"].items():
            spread = f"({ratio['low']:.3f} to {ratio['high']:.3f})"
            print(f"{case.name:36} {text:26} {ratio['median']:.3f} {spread:20} goal: {case.goal}", flush=True)
    plot(given.out)
    return 0


def plot(folder: Path) -> None:
    """All ratios of the folder in one picture, where matplotlib is there."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    rows: list[tuple[str, dict[str, Any]]] = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if isinstance(result, dict):
            rows += [(f"{result['name']}\n{text}", ratio) for text, ratio in result.get("cpu_ratios", {}).items()]
    if not rows:
        return
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1))
    for place, (_, ratio) in enumerate(rows):
        spread = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
        axes.barh(place, ratio["median"], xerr=spread, color="tab:blue", height=0.6)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    axes.set_xlabel("ratio of CPU times: median, bars between the quartiles")
    figure.tight_layout()
    figure.savefig(folder / "ratios.png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
