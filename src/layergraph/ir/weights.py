"""Named, reversible changes of weights: from the model's own names and shapes to the graph's, and back.

A :class:`Remap` says how some tensors of the original state dict become tensors of the graph's. Both directions
are written together and tested bit for bit. A :class:`WeightMap` is a sequence of them, applied in order, undone in
reverse. Remaps are data (a registered kind, names, parameters), so a saved program holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layergraph.errors import FormatError, InputError, InputTypeError, NotFoundError

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RemapKind:
    """The two directions of one kind of remap; each takes and returns the tensors of one remap, in order."""

    to_rewritten: Callable[[Sequence[torch.Tensor], Mapping[str, Any]], Sequence[torch.Tensor]]
    to_original: Callable[[Sequence[torch.Tensor], Mapping[str, Any]], Sequence[torch.Tensor]]


_KINDS: dict[str, RemapKind] = {}


def register_remap(name: str, kind: RemapKind) -> None:
    """Make a kind of remap known by name.

    Raises:
        InputTypeError: not a name and a :class:`RemapKind`. InputError: the name is taken by another kind.
    """
    if not isinstance(name, str) or not isinstance(kind, RemapKind):
        raise InputTypeError(
            "a remap is registered by a name and its two directions",
            found=f"{name!r}, {kind!r}"[:80],
            do='write register_remap("my-remap", RemapKind(to_rewritten, to_original))',
        )
    if _KINDS.get(name, kind) is not kind:
        raise InputError(f"a remap named {name!r} exists already", do="choose another name")
    _KINDS[name] = kind


@dataclass(frozen=True)
class Remap:
    """One reversible change.

    Attributes:
        kind: a name given to :func:`register_remap`.
        original: names in the model's state dict, in the order the kind expects.
        rewritten: names in the graph's.
        params: plain data for the kind.
        made_by: the pass that made it.
    """

    kind: str
    original: tuple[str, ...]
    rewritten: tuple[str, ...]
    params: Mapping[str, Any]
    made_by: str = ""

    def forward(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._kind().to_rewritten(tensors, self.params)

    def backward(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._kind().to_original(tensors, self.params)

    def _kind(self) -> RemapKind:
        try:
            return _KINDS[self.kind]
        except KeyError:
            raise NotFoundError(
                f"no weight map named {self.kind!r}",
                path=", ".join(self.rewritten),
                expected=", ".join(sorted(_KINDS)),
                do="import the module whose pass made it before loading",
                shell="name the module whose pass made it: --import MODULE",
            ) from None

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "original": list(self.original),
            "rewritten": list(self.rewritten),
            "params": dict(self.params),
            "made_by": self.made_by,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Remap:
        return cls(
            data["kind"], tuple(data["original"]), tuple(data["rewritten"]), data["params"], data.get("made_by", "")
        )


@dataclass(frozen=True)
class WeightMap:
    """All remaps of a program, in the order they were made."""

    remaps: tuple[Remap, ...] = ()

    def __iter__(self) -> Iterator[Remap]:
        return iter(self.remaps)

    def __len__(self) -> int:
        return len(self.remaps)

    def add(self, remap: Remap) -> WeightMap:
        return WeightMap((*self.remaps, remap))

    def to_rewritten(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The graph's tensors from the model's; names that no remap mentions pass through."""
        result = dict(tensors)
        for remap in self.remaps:
            _apply(result, remap.original, remap.rewritten, remap.forward)
        return result

    def to_original(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The model's tensors from the graph's; the exact inverse of :meth:`to_rewritten`."""
        result = dict(tensors)
        for remap in reversed(self.remaps):
            _apply(result, remap.rewritten, remap.original, remap.backward)
        return result

    def to_list(self) -> list[dict[str, Any]]:
        return [remap.to_dict() for remap in self.remaps]

    @classmethod
    def from_list(cls, data: Sequence[Mapping[str, Any]]) -> WeightMap:
        return cls(tuple(Remap.from_dict(item) for item in data))


def _apply(
    tensors: dict[str, torch.Tensor],
    sources: tuple[str, ...],
    targets: tuple[str, ...],
    change: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> None:
    if not all(name in tensors for name in sources):
        return  # dropped since (dead-tail pruning): nothing to change
    made = change([tensors.pop(name) for name in sources])
    tensors.update(zip(targets, made, strict=True))


def _reshape(shape_key: str) -> Callable[[Sequence[torch.Tensor], Mapping[str, Any]], Sequence[torch.Tensor]]:
    def change(tensors: Sequence[torch.Tensor], params: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        (tensor,) = tensors
        shape = tuple(params[shape_key])
        if tensor.numel() != torch.Size(shape).numel():
            raise FormatError(
                "a weight has another size than its weight map was made for",
                expected=f"{shape_key} {list(shape)}",
                found=str(list(tensor.shape)),
                do="use the weights that belong to this program",
            )
        return [tensor.reshape(shape)]

    return change


register_remap("reshape", RemapKind(_reshape("rewritten_shape"), _reshape("original_shape")))

__all__ = ["Remap", "RemapKind", "WeightMap", "register_remap"]
