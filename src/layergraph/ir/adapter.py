"""Adapters as data: what a shadow adapter holds, what all adapters of one program share, and how to weave them in.

Nothing here knows peft or transformers. Tensors go by the names of peft's checkpoint format (``key``), graph inputs by
names of their own; an :class:`AdapterSlot` connects the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from layergraph.errors import InputError, NotFoundError, NotSupportedError

if TYPE_CHECKING:
    from layergraph.ir.program import GraphUnit

ALPHA = "shadow_alpha"
LOSS_WEIGHT = "shadow_loss_weight"


@dataclass(frozen=True)
class AdapterSlot:
    """One tensor that every adapter of a program has.

    Attributes:
        key: its name in peft's checkpoint format, the adapter's own name folded to ``default``.
        shape, dtype: as the graph takes it; dtype as torch prints it, without the prefix.
        input: the graph input it is given as, or None where the graph does not read it (the update after the last
            block, whose result nothing uses).
        base: the base weight it stands in for (``modules_to_save``), which is used while no adapter is active.
        frozen: whether training leaves it as it is (embeddings of a pretrained backbone).
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    input: str | None = None
    base: str | None = None
    frozen: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AdapterSlot:
        return cls(**{**data, "shape": tuple(data["shape"])})


@dataclass(frozen=True)
class Adapter:
    """One adapter: its configuration and its tensors. A value.

    Attributes:
        name: what the program calls it.
        config: ``adapter_config.json`` as data, every field of peft's ``ShadowConfig``.
        tensors: by key, in the dtypes of the program's slots.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def alpha(self) -> float:
        """Strength of the injected correction."""
        return float(self.config["shadow_alpha"])

    @property
    def loss_weight(self) -> float:
        """Weight of the auxiliary loss."""
        return float(self.config["auxiliary_loss_weight"])

    def parameters(self) -> list[torch.Tensor]:
        """The tensors that training changes."""
        return [tensor for tensor in self.tensors.values() if tensor.requires_grad]

    def is_same(self, other: Adapter) -> bool:
        """Whether both are one adapter: the same name, strength and tensors (not copies of them)."""
        return (
            (self.name, self.alpha) == (other.name, other.alpha)
            and self.tensors.keys() == other.tensors.keys()
            and all(tensor.data_ptr() == other.tensors[key].data_ptr() for key, tensor in self.tensors.items())
        )

    def __repr__(self) -> str:
        size = sum(tensor.numel() for tensor in self.tensors.values())
        return f"<Adapter {self.name!r}: {len(self.tensors)} tensors, {size:,} numbers, alpha {self.alpha}>"


@dataclass(frozen=True)
class Shadow:
    """The adapters of a program, and what they share. A value: the methods give new ones.

    Attributes:
        slots: every tensor that an adapter has.
        geometry: plain data that is part of the graph and so the same for all adapters: blocks, rank, backbone...
        adapters: by name.
        active: the one a call uses that names none; None for the base model alone.
    """

    slots: tuple[AdapterSlot, ...]
    geometry: Mapping[str, Any]
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    active: str | None = None

    def __getitem__(self, name: str) -> Adapter:
        try:
            return self.adapters[name]
        except KeyError:
            raise NotFoundError(
                f"the program has no adapter {name!r}",
                expected=", ".join(self.adapters) or "none was added",
                do="add_adapter(folder, name) adds one",
                shell="give the folder of one: --adapter FOLDER",
            ) from None

    def fit(
        self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, training: bool
    ) -> Adapter:
        """An adapter with its tensors as the graph takes them: checked, cast, and leaves of their own for training.

        Raises:
            InputError: a tensor is missing, too many, or of another shape; a name that cannot be a folder's.
        """

        def fail(what: str, key: str, expected: str, found: str) -> None:
            raise InputError(
                f"adapter {name!r} {what}",
                path=key,
                expected=expected,
                found=found,
                do="use an adapter that was made for this model",
            )

        if not re.fullmatch(r"\w[\w.-]*", name or ""):
            raise InputError(
                f"{name!r} is no name for an adapter", expected="letters, digits, _, - and dots", do="choose another"
            )
        keys = {slot.key for slot in self.slots}
        for slot in self.slots:
            if slot.key not in tensors:
                fail("lacks a tensor", slot.key, f"{slot.dtype}{list(slot.shape)}", "none of that name")
        for key in tensors:
            if key not in keys:
                fail("has a tensor too many", key, f"{len(keys)} tensors", f"{len(tensors)}")
        fitted = {}
        for slot in self.slots:
            tensor = tensors[slot.key]
            if tuple(tensor.shape) != slot.shape:
                fail("has a tensor of another shape", slot.key, f"{list(slot.shape)}", f"{list(tensor.shape)}")
            if tensor.is_floating_point() != slot.torch_dtype.is_floating_point:
                fail("has a tensor of another kind", slot.key, slot.dtype, str(tensor.dtype).removeprefix("torch."))
            tensor = tensor.detach().to(slot.torch_dtype)
            if training and slot.torch_dtype.is_floating_point:
                # Leaves of their own: the adapter that they came from must not train along.
                tensor = tensor.clone().requires_grad_(not slot.frozen)
            fitted[slot.key] = tensor
        return Adapter(name, dict(config), fitted)

    def with_adapter(self, adapter: Adapter) -> Shadow:
        """With one more adapter, which has been checked against the slots.

        Raises:
            InputError: there is one of that name.
        """
        if adapter.name in self.adapters:
            raise InputError(
                f"there is an adapter {adapter.name!r} already",
                found=", ".join(self.adapters),
                do="choose another name, or delete_adapter() first",
            )
        return replace(self, adapters={**self.adapters, adapter.name: adapter})

    def without_adapter(self, name: str) -> Shadow:
        """Without one; if it was active, the first that is left becomes so (as in peft)."""
        left = {key: value for key, value in self.adapters.items() if key != self[name].name}
        active = next(iter(left), None) if self.active == name else self.active
        return replace(self, adapters=left, active=active)

    def with_active(self, name: str | None) -> Shadow:
        return replace(self, active=None if name is None else self[name].name)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Every graph input that an adapter fills."""
        return (*(slot.input for slot in self.slots if slot.input is not None), ALPHA, LOSS_WEIGHT)

    def inputs(
        self, name: str | None, wanted: tuple[str, ...], state: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The graph inputs that choose an adapter.

        ``None`` chooses the base model: any adapter's tensors with strength zero, or zeros where there is none, and
        the base's own weights for modules that adapters replace.

        Args:
            wanted: input names of the graph; others are left out.
            state: the program's state dict.
        """
        chosen = self.adapters.get(name) if name is not None else next(iter(self.adapters.values()), None)
        if name is not None and chosen is None:
            chosen = self[name]  # raises
        values: dict[str, torch.Tensor] = {}
        device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
        names = set(wanted)
        for slot in self.slots:
            if slot.input not in names or slot.input is None:
                continue
            if name is None and slot.base is not None:
                values[slot.input] = state[slot.base]
            elif chosen is not None:
                values[slot.input] = chosen.tensors[slot.key]
            else:
                values[slot.input] = torch.zeros(slot.shape, dtype=slot.torch_dtype, device=device)
        strengths = {ALPHA: 0.0, LOSS_WEIGHT: 0.0}
        if name is not None and chosen is not None:
            strengths = {ALPHA: chosen.alpha, LOSS_WEIGHT: chosen.loss_weight}
        for key, value in strengths.items():
            if key in names:
                values[key] = torch.tensor(value, dtype=torch.float32, device=device)
        return values


def no_shadow() -> NotSupportedError:
    """The error for asking a program without a shadow about adapters."""
    return NotSupportedError(
        "no shadow is woven into this program",
        do="program.apply(layergraph.WeaveShadow(folder)) weaves one in; it has methods for more adapters then",
        shell="--pass weave-shadow:adapter=FOLDER weaves one in, or generate with --adapter FOLDER",
    )


@dataclass(frozen=True)
class SavedModule:
    """A module of the base that adapters bring a copy of: base weight (name in the state dict) -> graph input."""

    path: str
    inputs: Mapping[str, str]


@dataclass(frozen=True)
class ShadowPlan:
    """Everything that weaving needs, made before the pass runs.

    Attributes:
        shadow: slots and adapters of the program to be.
        blocks: paths of the blocks, in the order in which they run.
        roles: per block, argument of the shadow ops -> graph input (None for the update that nothing uses).
        backbones: traced shadow backbones by graph name; a graph without one cannot be woven, and is dropped.
        backbone_state: name in a backbone's state dict -> graph input.
        embeddings: path of the base's embeddings if the backbone reads those, else None.
        projection: graph input of the projection to the base's width, or None.
        saved: modules that adapters replace.
        head: path of the base's module that the auxiliary loss reads s^(0) with, or None.
        head_state: parameter of that module -> graph input, for heads of the adapter's own.
        task: peft's task type.
        dropout: probability in training.
        fresh: whether the first adapter is untrained: the program then computes what it did before.
        uncached_because: why the cached graph has no backbone, or None.
    """

    shadow: Shadow
    blocks: tuple[str, ...]
    roles: tuple[Mapping[str, str | None], ...]
    backbones: Mapping[str, GraphUnit]
    backbone_state: Mapping[str, str]
    embeddings: str | None
    projection: str | None
    saved: tuple[SavedModule, ...] = ()
    head: str | None = None
    head_state: Mapping[str, str] = field(default_factory=dict)
    task: str | None = None
    dropout: float = 0.0
    fresh: bool = False
    uncached_because: str | None = None


__all__ = ["ALPHA", "LOSS_WEIGHT", "Adapter", "AdapterSlot", "SavedModule", "Shadow", "ShadowPlan", "no_shadow"]
