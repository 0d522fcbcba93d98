"""What a cached graph keeps between calls, as data: which tensors, for which layer, how long, how wide.

A cached graph (``step``) takes these tensors as inputs and changes them in place. Layers whose attention reaches
equally far form a *group*; a group has one tensor of positions, which says for every slot which token of the row it
holds, and one input of slots to write. Layers that keep a summary of the past instead of its tokens (convolutions,
state spaces, linear attention) have *states*, of one size however long the past.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Goes before the names of whatever belongs to the shadow's half.
SHADOW = "shadow_"


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose attention reaches equally far.

    Attributes:
        name: ``full``, ``window512``, ``chunk8192``; ``shadow_`` before it for the shadow's half.
        window: how many tokens back a query sees, itself included; None for all.
        chunk: attention stays within chunks of that many tokens; None for none.
    """

    name: str
    window: int | None = None
    chunk: int | None = None

    @property
    def reach(self) -> int | None:
        """How many tokens must be held; None for all."""
        return self.window if self.window is not None else self.chunk

    @property
    def positions(self) -> str:
        """Input ``int64 [slots, batch]``, mutated: the token that each slot holds, -1 for none."""
        return f"{self.name}_positions"

    @property
    def write(self) -> str:
        """Input ``int64 [batch, tokens]``: the slot to write each new token to."""
        return f"{self.name}_write"


@dataclass(frozen=True)
class CacheTensor:
    """One tensor kept for one layer: ``[slots, batch, heads, features]``, sequence first.

    A prefix of such a tensor is contiguous, so the cost of a step follows the tokens held, not the capacity.
    """

    name: str
    layer: int
    role: str
    group: str
    heads: int
    features: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        size = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}.get(self.dtype, 1)
        return self.heads * self.features * size

    @property
    def half(self) -> str:
        """``base`` or ``shadow``."""
        return _half(self.name)


@dataclass(frozen=True)
class CacheState:
    """One state kept for one layer: ``[batch, *shape]``, zero before the first token."""

    name: str
    layer: int
    role: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def half(self) -> str:
        """``base`` or ``shadow``."""
        return _half(self.name)


def _half(name: str) -> str:
    return "shadow" if name.startswith(SHADOW) else "base"


@dataclass(frozen=True)
class CacheGeometry:
    """Everything a cached graph keeps."""

    groups: tuple[CacheGroup, ...]
    tensors: tuple[CacheTensor, ...]
    states: tuple[CacheState, ...] = ()

    def group(self, name: str) -> CacheGroup:
        return next(group for group in self.groups if group.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        """Of everything that is kept."""
        return (*(tensor.name for tensor in self.tensors), *(state.name for state in self.states))

    def half(self, name: str) -> CacheGeometry:
        """Only what belongs to the ``base`` or to the ``shadow``."""
        return CacheGeometry(
            tuple(group for group in self.groups if _half(group.name) == name),
            tuple(tensor for tensor in self.tensors if tensor.half == name),
            tuple(state for state in self.states if state.half == name),
        )

    def joined(self, more: CacheGeometry) -> CacheGeometry:
        """This and ``more``; no name stands in both."""
        return CacheGeometry((*self.groups, *more.groups), (*self.tensors, *more.tensors), (*self.states, *more.states))

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, for one row."""
        return sum(tensor.bytes_per_token for tensor in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        return {
            "groups": [dict(group.__dict__) for group in self.groups],
            "tensors": [dict(tensor.__dict__) for tensor in self.tensors],
            "states": [{**state.__dict__, "shape": list(state.shape)} for state in self.states],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CacheGeometry:
        return cls(
            tuple(CacheGroup(**item) for item in data["groups"]),
            tuple(CacheTensor(**item) for item in data["tensors"]),
            tuple(CacheState(**{**item, "shape": tuple(item["shape"])}) for item in data.get("states", ())),
        )


__all__ = ["SHADOW", "CacheGeometry", "CacheGroup", "CacheState", "CacheTensor"]
