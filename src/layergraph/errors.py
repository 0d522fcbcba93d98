"""The error family: every error answers what failed, where, what was expected and found, and what to do.

Each class is a :class:`LayerGraphError` *and* the builtin kind a caller would catch for that fault, so
``except IndexError`` and ``except LayerGraphError`` both work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

_LABEL_WIDTH = 11


class LayerGraphError(Exception):
    """Base of all errors this package raises on purpose.

    Args:
        what: one sentence naming what failed.
        pass_name: kebab-case name of the pass at work, if one was.
        path: module path in the model (``model.layers.3.mlp``), or the file concerned.
        node: name of the graph node concerned.
        expected: what would have been right.
        found: what was there instead.
        do: the remedy, as an instruction to someone who writes Python.
        shell: the remedy on the command line, where it is another; told by :meth:`message`.
        ran: names of the passes that ran before, in order.
        window: a few lines of graph text around the fault.
    """

    default_shell: ClassVar[str | None] = None
    """What ``shell`` is where an error of this class does not say."""

    def __init__(
        self,
        what: str,
        *,
        pass_name: str | None = None,
        path: str | None = None,
        node: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        do: str | None = None,
        shell: str | None = None,
        ran: Sequence[str] = (),
        window: str | None = None,
    ) -> None:
        self.what = what
        self.pass_name = pass_name
        self.path = path
        self.node = node
        self.expected = expected
        self.found = found
        self.do = do
        self.shell = shell or self.default_shell
        self.ran = tuple(ran)
        self.window = window
        super().__init__(what)

    def __str__(self) -> str:
        return self.message()

    def message(self, *, shell: bool = False) -> str:
        """The text with its parts, one a line; with ``shell``, the remedy is that of the command line."""
        where = ", ".join(
            part
            for part in (
                f"pass {self.pass_name}" if self.pass_name else "",
                self.path or "",
                f"node {self.node}" if self.node else "",
            )
            if part
        )
        rows = (
            ("where", where),
            ("expected", self.expected),
            ("found", self.found),
            ("do", self.shell if shell and self.shell else self.do),
            ("ran before", ", ".join(self.ran)),
        )
        lines = [self.what]
        lines += [f"  {label:<{_LABEL_WIDTH}}{text}" for label, text in rows if text]
        if self.window:
            lines += [f"  | {line}" for line in self.window.splitlines()]
        return "\n".join(lines)


class InputError(LayerGraphError, ValueError):
    """A value given by the caller is not one that can be worked with."""


class InputTypeError(LayerGraphError, TypeError):
    """A value given by the caller is of the wrong type."""


class OutOfRangeError(LayerGraphError, IndexError):
    """An index given by the caller lies outside its range."""


class NotFoundError(LayerGraphError, LookupError):
    """A name given by the caller matches nothing."""


class NotSupportedError(LayerGraphError, NotImplementedError):
    """Understood, and refused by name."""


class TraceError(LayerGraphError, RuntimeError):
    """The model could not be turned into a graph."""


class EditError(LayerGraphError, RuntimeError):
    """An edit would leave the graph, its signature and its state out of step."""


class PassError(LayerGraphError, RuntimeError):
    """The code of a pass failed, or broke the contract of passes. What it raised itself is the cause."""


class RefusedError(LayerGraphError, ValueError):
    """Under ``strict=True``: a pass found a target it must leave alone, or none at all."""

    default_shell = "nothing if that is meant; without --strict the rest is done, and the report says what was left"


class PromiseError(LayerGraphError, AssertionError):
    """A pass changed something that its promise (exact, additive, defined) rules out."""


class StructureError(LayerGraphError, AssertionError):
    """A structural check of a program failed."""


class FormatError(LayerGraphError, ValueError):
    """A saved file is damaged, of another kind, or written by a newer version."""


class MissingFileError(LayerGraphError, FileNotFoundError):
    """A file that a saved program needs is not there."""


class StorageError(LayerGraphError, OSError):
    """Reading or writing a folder failed; what was there before is still there."""


__all__ = [
    "EditError",
    "FormatError",
    "InputError",
    "InputTypeError",
    "LayerGraphError",
    "MissingFileError",
    "NotFoundError",
    "NotSupportedError",
    "OutOfRangeError",
    "PassError",
    "PromiseError",
    "RefusedError",
    "StorageError",
    "StructureError",
    "TraceError",
]
