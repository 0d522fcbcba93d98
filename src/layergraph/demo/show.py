"""Tables of the demo, and the part of a listing that it shows."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.table import Table
from rich.text import Text

import layergraph as lg
from layergraph.demo.timing import Timing


def one_layer(program: lg.Program) -> str:
    """The first repeated block of a program's listing."""
    sections = str(program).split("\n\n")
    return next((section for section in sections if section.startswith("layer ")), sections[0])


def errors_table(title: str, errors: Mapping[str, float]) -> Table:
    """The largest difference of each output, or that there is none."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("output")
    table.add_column("largest difference", justify="right")
    for name, error in errors.items():
        table.add_row(name, "bit-equal" if error == 0.0 else f"{error:.1e}")
    return table


def texts_table(title: str, texts: Mapping[str, str]) -> Table:
    """Texts as they were written, line breaks and all, below each other."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_lines=True)
    table.add_column("by")
    table.add_column("text")
    for name, text in texts.items():
        table.add_row(name, Text(text))
    return table


def timings_table(title: str, timings: Mapping[str, Timing]) -> Table:
    """Median, spread, and the time in terms of the first alternative's."""
    first = next(iter(timings))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("what")
    for head in ("median", "spread", f"time / {first}"):
        table.add_column(head, justify="right")
    for name, timing in timings.items():
        ratio = "1" if name == first else f"{timing.ratio:.2f}"
        table.add_row(name, f"{timing.median * 1e3:.2f} ms", f"±{timing.spread / 2:.0%}", ratio)
    return table


__all__ = ["errors_table", "one_layer", "texts_table", "timings_table"]
