"""DualCache: what a cached program keeps between calls, in one object that transformers drives.

Tensors are preallocated, sequence first, and given to the program as inputs that it changes in place. The object
stays the same for a whole conversation; its storage may be replaced when rows or capacity change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

from layergraph.errors import InputError, NotSupportedError
from layergraph.ir.cache_geometry import CacheGeometry, CacheGroup, CacheTensor

# Slots are handed to the program in multiples of this, so that a step costs what is held and shapes repeat.
BUCKET = 64
# Tokens written at once at most where windows are held: a window keeps that many more slots than its reach.
CHUNK = 128


class DualCache(Cache):
    """Keys, values and positions for every layer of a cached program, both halves where a shadow is woven in.

    Args:
        geometry: of the program's ``step`` graph (or the program itself).
        batch_size: rows; None takes them from the first call.
        capacity: tokens that fit without growing; None starts small and grows.
        fixed: overflow is an error instead of growth (always so under CUDA graphs).
        device: where the tensors live.

    Raises:
        NotSupportedError: the program has no cached graph.
    """

    def __init__(
        self,
        geometry: Any,
        batch_size: int | None = None,
        capacity: int | None = None,
        *,
        fixed: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        # Not Cache.__init__: storage is ours, and there are no layer objects.
        self.geometry: CacheGeometry = _geometry_of(geometry)
        self.device = torch.device(device)
        self.fixed = fixed
        self.capacity = _round_up(capacity or BUCKET)
        self.length = 0
        self.chunk = CHUNK
        self._real = torch.zeros(0, 0, dtype=torch.bool)
        self._tensors: dict[str, torch.Tensor] = {}
        self._rows = 0
        if fixed and capacity is None:
            raise InputError("a cache of fixed size needs a capacity", do="pass capacity=")
        if fixed:
            self.capacity = int(capacity or 0)
        if batch_size is not None:
            self._allocate(batch_size)

    # Looking ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        held = f"{self.length} of {self.capacity} tokens, {self._rows} rows"
        return f"DualCache({', '.join(group.name for group in self.geometry.groups)}: {held})"

    def __len__(self) -> int:
        return len({tensor.layer for tensor in self.geometry.tensors})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._tensors.values())

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first call (as transformers has it)."""
        return self._rows or -1

    @property
    def max_batch_size(self) -> int:
        return self._rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots used, padding included; the same for every layer, skipped ones too."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Capacity where it is fixed, -1 where it grows."""
        return self.capacity if self.fixed else -1

    @property
    def is_initialized(self) -> bool:
        return self._rows > 0

    @property
    def is_compileable(self) -> bool:
        """False tells transformers not to compile around us and to leave masks alone: programs make their own."""
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        return [group.reach is not None for group in self._layer_groups()]

    @property
    def is_linear(self) -> list[bool]:
        return [False for _ in self._layer_groups()]

    @property
    def is_dummy(self) -> list[bool]:
        return [False for _ in self._layer_groups()]

    def _layer_groups(self) -> list[CacheGroup]:
        groups = {tensor.layer: tensor.group for tensor in self.geometry.tensors}
        return [self.geometry.group(groups[layer]) for layer in sorted(groups)]

    @property
    def n_tokens(self) -> torch.Tensor:
        """Real tokens of each row, ``int64 [batch]``: the position its next token takes."""
        return self._real.sum(0) if self._rows else torch.zeros(0, dtype=torch.int64)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    # Stepping -----------------------------------------------------------------------------------------------------

    def max_tokens(self) -> int | None:
        """Tokens that can be written in one call, None for any number (windows hold only so many more)."""
        return self.chunk if any(group.reach is not None for group in self.geometry.groups) else None

    def reserve(self, batch_size: int, n_tokens: int) -> None:
        """Make room for ``n_tokens`` more in each of ``batch_size`` rows.

        Raises:
            InputError: other rows are held, or a fixed capacity would overflow; nothing is lost.
        """
        if self._rows and batch_size != self._rows:
            raise InputError(
                "the cache holds another number of rows",
                expected=f"{self._rows} rows",
                found=f"{batch_size} rows",
                do="reset() it, or use batch_repeat_interleave or batch_select_indices",
            )
        needed = self.length + n_tokens
        if needed > self.capacity and self.fixed:
            raise InputError(
                "the cache is full",
                expected=f"at most {self.capacity} tokens",
                found=f"{needed} needed: {self.length} held, {n_tokens} new",
                do="make it with a larger capacity, or without fixed=True",
            )
        if not self._rows:
            self.capacity = max(self.capacity, _round_up(needed) if not self.fixed else needed)
            self._allocate(batch_size)
        elif needed > self.capacity:
            self.capacity = _round_up(max(needed, self.capacity * 3 // 2))
            self._change(lambda tensor, group: _grown(tensor, self._slots(group), group))

    def views(self, n_tokens: int) -> dict[str, torch.Tensor]:
        """The program's cache inputs for writing ``n_tokens``: contiguous prefixes of what is allocated."""
        views = {}
        for group in self.geometry.groups:
            slots = min(self._slots(group), _round_up(self.length + n_tokens))
            for name in (group.positions, *(tensor.name for tensor in self._members(group))):
                view = self._tensors[name][:slots]
                if not view.is_contiguous():
                    raise InputError(f"cache tensor {name} is not contiguous", do="do not replace its storage")
                views[name] = view
        return views

    def slots(self, n_tokens: int) -> dict[str, torch.Tensor]:
        """Where the next ``n_tokens`` go, ``int64 [batch, n_tokens]`` for each group."""
        order = torch.arange(self.length, self.length + n_tokens, device=self.device)
        return {
            group.write: (order % self._slots(group) if group.reach is not None else order)
            .expand(self._rows, -1)
            .contiguous()
            for group in self.geometry.groups
        }

    def advance(self, real: torch.Tensor) -> None:
        """Count what was written; ``real`` is ``bool [batch, tokens]``, False for padding."""
        self._real = torch.cat([self._real, real.t().cpu()])
        self.length += real.shape[1]

    # What transformers asks of a cache -----------------------------------------------------------------------------

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(
            "this cache is written by a layergraph program, not by a model's layers",
            do="give the model a cache of its own, or call the program",
        )

    def reset(self) -> None:
        """Forget all tokens; rows and storage stay."""
        self.length = 0
        self._real = self._real[:0]
        for group in self.geometry.groups:
            if self._rows:
                self._tensors[group.positions].fill_(-1)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at ``indices``, in that order."""
        if not self._rows:
            return
        index = indices.to(self.device)
        self._change(lambda tensor, group: tensor.index_select(1, index))
        self._real = self._real[:, indices.cpu()]
        self._rows = self._real.shape[1]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, side by side."""
        if not self._rows:
            return
        self._change(lambda tensor, group: tensor.repeat_interleave(repeats, dim=1))
        self._real = self._real.repeat_interleave(repeats, dim=1)
        self._rows = self._real.shape[1]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative count says how many, a positive one how long the cache shall be.

        Raises:
            InputError: more tokens than a window still holds what lies before.
        """
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.length - tokens_to_remove)
        count = min(count, self.length)
        if count == 0:
            return
        limit = self.max_tokens()
        if limit is not None and count > limit and self.length > limit:
            raise InputError(
                "windows no longer hold what lies before the tokens to remove",
                expected=f"at most {limit} tokens",
                found=str(count),
                do="reset() the cache and prefill again",
            )
        gone = torch.arange(self.length - count, self.length, device=self.device)
        for group in self.geometry.groups:
            slots = gone % self._slots(group) if group.reach is not None else gone
            self._tensors[group.positions][slots] = -1
        self.length -= count
        self._real = self._real[: self.length]

    def activate_past_recording(self) -> None:
        """Nothing to do: windows always keep enough for :meth:`crop` to undo one call."""

    # Storage ------------------------------------------------------------------------------------------------------

    def _members(self, group: CacheGroup) -> list[CacheTensor]:
        return [tensor for tensor in self.geometry.tensors if tensor.group == group.name]

    def _slots(self, group: CacheGroup) -> int:
        """A window holds its reach, and as many more as one call writes: no query misses a key of its window."""
        if group.reach is None:
            return self.capacity
        return group.reach - 1 + self.chunk

    def _allocate(self, batch_size: int) -> None:
        self._rows = batch_size
        self._real = torch.zeros(0, batch_size, dtype=torch.bool)
        for group in self.geometry.groups:
            slots = self._slots(group)
            self._tensors[group.positions] = torch.full((slots, batch_size), -1, device=self.device)
            for tensor in self._members(group):
                shape = (slots, batch_size, tensor.heads, tensor.features)
                # Zeros, not empty: a masked slot is multiplied by a weight of 0, and 0 * NaN is NaN.
                self._tensors[tensor.name] = torch.zeros(shape, dtype=getattr(torch, tensor.dtype), device=self.device)

    def _change(self, change: Callable[[torch.Tensor, CacheGroup], torch.Tensor]) -> None:
        changed = {}
        for group in self.geometry.groups:
            for name in (group.positions, *(tensor.name for tensor in self._members(group))):
                changed[name] = change(self._tensors[name], group)
        self._tensors = changed  # all or nothing: an allocation that fails leaves the old ones


def _geometry_of(source: Any) -> CacheGeometry:
    if isinstance(source, CacheGeometry):
        return source
    graphs: Mapping[str, Any] = getattr(getattr(source, "ir", source), "graphs", {})
    step = graphs.get("step")
    if step is None or step.cache is None:
        raise NotSupportedError(
            "this program has no cached graph",
            found=getattr(getattr(source, "ir", source).model, "uncached_because", None),
            do="trace the whole decoder with layergraph.trace(model, cached=True)",
        )
    return step.cache


def _grown(tensor: torch.Tensor, slots: int, group: CacheGroup) -> torch.Tensor:
    if group.reach is not None or tensor.shape[0] >= slots:
        return tensor
    fill = -1 if tensor.dim() == 2 else 0
    grown = tensor.new_full((slots, *tensor.shape[1:]), fill)
    grown[: tensor.shape[0]] = tensor
    return grown


def _round_up(count: int) -> int:
    return -(-count // BUCKET) * BUCKET


__all__ = ["BUCKET", "CHUNK", "DualCache"]
