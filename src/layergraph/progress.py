"""Progress of long work: one line that says what is being done, and for how long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
Progress = bool | Say | None
"""None shows progress where stderr is a terminal; True always, False never; a function gets each line."""


@contextmanager
def progress_line(progress: Progress) -> Iterator[Say]:
    """Within the block, the function given back shows what is being done."""
    if callable(progress):
        yield progress
    elif progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda text: None
    else:
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda text: bar.update(task, description=text)


__all__ = ["Progress", "Say", "progress_line"]
