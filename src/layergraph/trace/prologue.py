"""Input prologues: host code, named and versioned, from a model's public inputs to the inputs of its graph.

Vision towers that take images of any size packed into one sequence read ``grid_thw`` *values*: how long each image
is, where each patch sits, which window it falls in. That cannot be traced. transformers lets a caller hand the
derived tensors in instead; a prologue derives them, from plain numbers captured at trace time, without the model.

    prologue = find_prologue(model, inputs)  # None: the graph takes the model's inputs as they are
    prepared = prologue(inputs)              # + cu_seqlens, position_ids ...; what the forward is traced with

Images of different sizes are the normal case here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from layergraph.errors import FormatError, InputError
from layergraph.trace import hf_vision_grid


@dataclass(frozen=True)
class PrologueKind:
    """How one kind of prologue is found, run and versioned.

    Attributes:
        name: kebab-case, stored in packages.
        version: raised when ``params`` or the result change meaning; older ones must stay readable.
        find: ``(model, inputs) -> params | None``; decides by structure, never by model type. Params are JSON data.
        run: ``(params, inputs) -> prepared inputs``; needs no model. Tensors among them are the graph's inputs; what
            the forward must be given and the graph does not need is None.
    """

    name: str
    version: int
    find: Callable[[nn.Module, Mapping[str, Any]], dict[str, Any] | None]
    run: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


_KINDS: dict[str, PrologueKind] = {}


def register_prologue(kind: PrologueKind) -> PrologueKind:
    """Add a kind of prologue; kinds are asked in order of registration.

    Raises:
        InputError: the name is taken by another kind.
    """
    if _KINDS.get(kind.name, kind) is not kind:
        raise InputError(f"a prologue named {kind.name!r} exists", do="choose another name")
    _KINDS[kind.name] = kind
    return kind


@dataclass(frozen=True)
class Prologue:
    """Turns a model's own inputs into its graph's. Plain data: ``to_dict`` and ``from_dict`` round-trip through JSON.

    Attributes:
        name: a registered :class:`PrologueKind`.
        version: of that kind, when the model was traced.
        params: all that the kind needs to know of the model.
    """

    name: str
    version: int
    params: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))
        kind = _KINDS.get(self.name)
        if kind is None:
            raise FormatError(
                f"no input prologue is named {self.name!r}",
                expected=", ".join(sorted(_KINDS)),
                do="upgrade layergraph, or import the module that registers it before loading",
                shell="upgrade layergraph, or name the module that registers it: --import MODULE",
            )
        if not 1 <= self.version <= kind.version:
            raise FormatError(
                f"input prologue {self.name!r} is of a version that this layergraph cannot run",
                expected=f"1 to {kind.version}",
                found=str(self.version),
                do="upgrade layergraph, or trace the model again",
            )

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments that the forward is traced with; the tensors among them are the graph's inputs.

        New tensors are on the device of those they go with. An argument that the forward must be given and the
        graph does not need is None. ``inputs`` is not changed.

        Raises:
            InputError: an input is missing, or its values do not fit together.
        """
        return _KINDS[self.name].run(self.params, inputs)

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {"name": self.name, "version": self.version, "params": dict(self.params)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prologue:
        """Inverse of :meth:`to_dict`.

        Raises:
            FormatError: an unknown name, a newer version, or not a prologue at all.
        """
        try:
            name, version, params = str(data["name"]), int(data["version"]), dict(data["params"])
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                "this is not an input prologue", expected="name, version and params", found=repr(data)[:200]
            ) from error
        return cls(name, version, params)


def find_prologue(model: nn.Module, inputs: Mapping[str, Any]) -> Prologue | None:
    """The prologue that ``model`` needs to be traced with ``inputs``; None when its inputs can be the graph's."""
    for kind in _KINDS.values():
        params = kind.find(model, inputs)
        if params is not None:
            return Prologue(kind.name, kind.version, params)
    return None


register_prologue(PrologueKind("hf-vision-grid", 1, hf_vision_grid.find, hf_vision_grid.run))

__all__ = ["Prologue", "PrologueKind", "find_prologue", "register_prologue"]
