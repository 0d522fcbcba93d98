"""What a pass is: a frozen dataclass that finds sites without writing, and rewrites them through Edit."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from layergraph.errors import InputError, InputTypeError
from layergraph.ir.edit import Edit
from layergraph.ir.program import Program
from layergraph.passes.option_types import fits, fitted, option_types, spelled

Promise = Literal["exact", "additive", "defined"]


@dataclass(frozen=True)
class Site:
    """One place a pass will rewrite.

    Attributes:
        path: module path, for people.
        nodes: names of the graph nodes concerned; the pass decides what each stands for.
        detail: one line saying what will be done.
        data: plain data for ``rewrite``.
    """

    path: str
    nodes: tuple[str, ...] = ()
    detail: str = ""
    data: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, (tuple, list)) or not all(type(name) is str for name in self.nodes):
            raise InputTypeError(
                "a site's nodes are not names",
                path=self.path,
                expected="a tuple of str, for rewrite() works on a copy of the graph",
                found=repr(self.nodes)[:80],
                do="write nodes=(node.name,)",
            )

    def __str__(self) -> str:
        path = self.path or "(model)"
        return f"{path}: {self.detail}" if self.detail else path


@dataclass(frozen=True)
class Refusal:
    """One place that looks like a target and is left alone.

    Attributes:
        path: module path.
        code: the numbered rule in the pass's docstring (``R2``).
        expected, found: what the rule wants, and what is there.
    """

    path: str
    code: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path or '(model)'}: {self.code}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Findings:
    """What ``find`` returns.

    Attributes:
        sites: places to rewrite, in graph order.
        refusals: places left alone, with reasons.
        notes: lines for the report: what was decided and why.
    """

    sites: tuple[Site, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of graphs. Subclasses are frozen dataclasses whose fields are the pass's options.

    Options are checked against the types of their fields when a pass is made; lists become tuples where the field is
    one. A subclass with a ``__post_init__`` of its own calls this one's first.

    Class attributes:
        pass_name: kebab-case, what ``passes=["..."]`` and the command line call it.
        promise: ``exact`` (same outputs), ``additive`` (same outputs plus new ones), or ``defined`` (changes them as
            documented; overrides :meth:`reference`).
        after: names of passes that must not run later than this one.
        moves_inputs: whether another value enters a module afterwards. Taps that were chosen before are chosen again,
            so that the order of passes makes no difference.
    """

    pass_name: ClassVar[str] = ""
    promise: ClassVar[Promise] = "exact"
    after: ClassVar[tuple[str, ...]] = ()
    moves_inputs: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.promise not in get_args(Promise):
            raise InputError(f"{cls.__name__}.promise is {cls.promise!r}", expected=" or ".join(get_args(Promise)))

    def __post_init__(self) -> None:
        kinds = option_types(type(self))
        for item in dataclasses.fields(self):
            kind = kinds.get(item.name, Any)
            value = fitted(getattr(self, item.name), kind)
            if not fits(value, kind):
                raise InputTypeError(
                    f"option {item.name} of {self.pass_name or type(self).__name__} is of another type",
                    expected=spelled(kind),
                    found=f"{value!r}, {type(value).__name__}"[:80],
                    do="change that option",
                    shell=f"write {item.name}=VALUE; several values are {item.name}=A,B",
                )
            object.__setattr__(self, item.name, value)

    def promises(self) -> Promise:
        """The promise with these options; by default the class's."""
        return self.promise

    def keeps(self, program: Program, graph: str) -> bool:
        """Whether a graph of the program is still of use afterwards; the others are dropped before ``find``."""
        return True

    @abstractmethod
    def find(self, program: Program, graph: str) -> Findings:
        """Where the pass applies in one graph. Pure: nothing is written, the same program gives the same findings."""

    @abstractmethod
    def rewrite(self, site: Site, edit: Edit) -> None:
        """Rewrite one site; ``edit.node(name)`` gives its nodes."""

    def reference(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """For *defined* passes: what the outputs before the pass make the outputs after it, by name."""
        return outputs

    def options(self) -> dict[str, Any]:
        """Fields as plain data, from which :meth:`from_options` makes the pass again."""
        return {item.name: plain(getattr(self, item.name)) for item in dataclasses.fields(self)}

    def resolved_options(self, findings: Findings) -> dict[str, Any]:
        """Options to remember after a run: like :meth:`options`, what cannot be saved replaced by what it chose."""
        return self.options()

    def left(self, options: dict[str, Any]) -> bool:
        """Whether a run that is remembered by these options was a run of this very pass."""
        return options == self.options()

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Pass:
        return cls(**options)

    def describe(self) -> str:
        """``name{option=value}`` with the options that differ from their defaults."""
        shown = []
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                shown.append(f"{item.name}={value}")
        return self.pass_name + (f"{{{', '.join(shown)}}}" if shown else "")


def plain(value: Any) -> Any:
    """JSON data: tuples and sets as sorted or ordered lists, the rest as it is."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def freeze(value: Sequence[Any] | Any) -> Any:
    """Lists and ranges as tuples, so that options loaded from JSON equal those given in code."""
    return tuple(freeze(item) for item in value) if isinstance(value, (list, tuple, range)) else value


__all__ = ["Findings", "Pass", "Promise", "Refusal", "Site", "freeze", "plain"]
