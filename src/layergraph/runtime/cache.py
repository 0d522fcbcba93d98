"""DualCache: what a cached program keeps between calls, in one object that transformers drives.

Tensors are preallocated, sequence first, and given to the program as inputs that it changes in place. The object
stays the same for a whole conversation; its storage may be replaced when rows or capacity change.

Token *n* of a row stands in slot *n*, or in slot *n* modulo the number of slots where layers look back only so far.
So padding takes no room, rows at different lengths stay apart, and a step costs what the longest row holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

from layergraph.errors import InputError, InputTypeError, NotSupportedError
from layergraph.ir.adapter import Adapter
from layergraph.ir.cache_geometry import CacheGeometry, CacheGroup, CacheState, CacheTensor
from layergraph.runtime.rows import Rows
from layergraph.runtime.uncached import no_cached_graph

# Slots are handed to the program in multiples of this, so that a step costs what is held and shapes repeat.
BUCKET = 64
# Tokens written at once at most where windows are held: a window keeps that many more slots than its reach.
CHUNK = 128


class DualCache(Cache):
    """Keys, values and positions for every layer of a cached program, both halves where a shadow is woven in.

    Args:
        geometry: of the program's ``step`` graph (or the program itself).
        batch_size: rows; None takes them from the first call.
        capacity: tokens in a row that fit without growing; None starts small and grows.
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
        self.chunk = CHUNK
        self.rows = Rows()
        self.writer: Adapter | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._broken = False
        if fixed and capacity is None:
            raise InputError("a cache of fixed size needs a capacity", do="pass capacity=")
        if capacity is not None and capacity < 1:
            raise InputError("a cache holds at least one token", found=f"capacity={capacity}", do="pass a larger one")
        self.capacity = int(capacity) if capacity is not None else BUCKET
        if batch_size is not None:
            self._allocate(batch_size)

    # Looking ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        held = f"{self.length} of {self.capacity} tokens, {len(self.rows)} rows"
        writer = f", adapter {self.writer.name}" if self.writer is not None else ""
        return f"DualCache({', '.join(self.held_kinds)}: {held}{writer})"

    @property
    def held_kinds(self) -> tuple[str, ...]:
        """Groups by name, and which half keeps states."""
        states = dict.fromkeys(
            "shadow_states" if state.half == "shadow" else "states" for state in self.geometry.states
        )
        return (*(group.name for group in self.geometry.groups), *states)

    def __len__(self) -> int:
        return len(self._layer_groups())

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._tensors.values())

    @property
    def length(self) -> int:
        """Tokens written in each row, padding included."""
        return self.rows.length

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first call (as transformers has it)."""
        return len(self.rows) or -1

    @property
    def max_batch_size(self) -> int:
        return len(self.rows)

    @property
    def n_tokens(self) -> torch.Tensor:
        """Real tokens of each row, ``int64 [batch]`` on the CPU: the position its next token takes."""
        return self.rows.counts.clone()

    @property
    def n_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens written in each row, padding included; the same for every layer, skipped ones too."""
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
        return len(self.rows) > 0

    @property
    def is_compileable(self) -> bool:
        """False tells transformers not to compile around us and to leave masks alone: programs make their own."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken back (assisted decoding asks): not from states, which sum up all."""
        return not self.geometry.states

    @property
    def is_sliding(self) -> list[bool]:
        return [group is not None and group.reach is not None for group in self._layer_groups()]

    @property
    def is_linear(self) -> list[bool]:
        return [group is None for group in self._layer_groups()]

    @property
    def is_dummy(self) -> list[bool]:
        return [False for _ in self._layer_groups()]

    def _layer_groups(self) -> list[CacheGroup | None]:
        """For each layer that keeps something, its group; None where it keeps states only."""
        base = self.geometry.half("base")  # transformers knows of the base's layers only
        groups: dict[int, CacheGroup | None] = {state.layer: None for state in base.states}
        groups |= {tensor.layer: base.group(tensor.group) for tensor in base.tensors}
        return [groups[layer] for layer in sorted(groups)]

    # Stepping -----------------------------------------------------------------------------------------------------

    def max_tokens(self) -> int | None:
        """Tokens that can be written in one call, None for any number.

        Windows hold only so many more than they reach, and what layers with states need grows with tokens squared.
        """
        is_limited = self.geometry.states or any(group.reach is not None for group in self.geometry.groups)
        return self.chunk if is_limited else None

    def reserve(self, real: torch.Tensor) -> None:
        """Make room for new tokens; ``real`` is ``bool [batch, tokens]`` on the CPU, False for padding.

        Raises:
            InputError: other rows are held, padding stands where states cannot have it, or a fixed capacity would
                overflow; nothing is lost.
        """
        batch = real.shape[0]
        if self._broken:
            raise InputError("a step on this cache failed half-way", do="reset() the cache and prefill again")
        if len(self.rows) and batch != len(self.rows):
            raise InputError(
                "the cache holds another number of rows",
                expected=f"{len(self.rows)} rows",
                found=f"{batch} rows",
                do="reset() it, or use batch_repeat_interleave or batch_select_indices",
            )
        if self.geometry.states and self.rows.has_gap(real):
            raise InputError(
                "padding after a row's first token would enter the states of layers that keep no tokens",
                do="pad on the left, and only before the first token of a row",
            )
        held = self.rows.longest
        needed = int(self.rows.after(real).max()) if batch else 0
        if needed > self.capacity and self.fixed:
            raise InputError(
                "the cache is full",
                expected=f"at most {self.capacity} tokens in a row",
                found=f"{needed} needed: {held} held, {self.capacity - held} free",
                do="make it with a larger capacity, or without fixed=True",
            )
        if not len(self.rows):
            self.capacity = max(self.capacity, needed)
            self._allocate(batch)
        elif needed > self.capacity:
            before, self.capacity = self.capacity, max(needed, self.capacity * 3 // 2)
            try:
                self._change(self._grown)
            except Exception:
                self.capacity = before
                raise

    def views(self, real: torch.Tensor) -> dict[str, torch.Tensor]:
        """The program's cache inputs for writing ``real`` tokens: contiguous prefixes of what is allocated."""
        views = {state.name: self._tensors[state.name] for state in self.geometry.states}
        needed = _round_up(int(self.rows.after(real).max()) + 1)  # one more, for padding to go to
        for group in self.geometry.groups:
            slots = min(self._slots(group), needed)
            for name in (group.positions, *(tensor.name for tensor in self._members(group))):
                views[name] = self._tensors[name][:slots]
        for name, view in views.items():
            if not view.is_contiguous():
                # Compiled programs would compute wrong and write elsewhere, without a word.
                raise InputError(f"cache tensor {name} is not contiguous", do="do not replace its storage")
        return views

    def slots(self, tokens: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        """Where new tokens go, ``int64 [batch, tokens]`` for each group; ``tokens`` are positions, -1 for padding."""
        # Padding goes where the row's next token will: it is overwritten by it, and nobody looks at it till then.
        spare = self.rows.after(real).to(tokens.device)[:, None]
        place = torch.where(tokens >= 0, tokens, spare)
        return {
            group.write: (place % self._slots(group) if group.reach is not None else place).contiguous()
            for group in self.geometry.groups
        }

    def advance(self, real: torch.Tensor) -> None:
        """Count what was written; ``real`` is ``bool [batch, tokens]``, False for padding."""
        self.rows.append(real)

    def give_up(self) -> None:
        """A step failed with some of its tokens written: nothing but :meth:`reset` helps then."""
        self._broken = True

    # What transformers asks of a cache -----------------------------------------------------------------------------

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(
            "this cache is written by a layergraph program, not by a model's layers",
            do="give the model a cache of its own, or call the program",
        )

    def reset(self) -> None:
        """Forget all tokens; rows and storage stay."""
        self.rows.clear()
        self._broken = False
        if len(self.rows):
            for group in self.geometry.groups:
                self._tensors[group.positions].fill_(-1)
            for state in self.geometry.states:
                self._tensors[state.name].zero_()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at ``indices`` (numbers, or a mask), in that order."""
        if not len(self.rows):
            return
        chosen = torch.arange(len(self.rows))[indices.cpu()]
        index = chosen.to(self.device)
        self._change(lambda tensor, group: tensor.index_select(0 if group is None else 1, index))
        self.rows.select(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, side by side."""
        self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative count says how many, a positive one how long the cache shall be.

        Raises:
            InputError: a window no longer holds what lies before the tokens to remove; nothing is lost.
            NotSupportedError: states cannot be taken back.
        """
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.length - tokens_to_remove)
        count = min(count, self.length)
        if count == 0:
            return
        if not self.is_croppable:
            raise NotSupportedError(
                "states of layers that keep no tokens cannot be taken back",
                found=f"{len(self.geometry.states)} states",
                do="reset() the cache and prefill again",
            )
        after = self.rows.before_last(count)
        for group in self.geometry.groups:
            if group.reach is not None:
                # One slot may hold padding; the others hold the newest tokens that ever were.
                oldest = self.rows.highest - (self._slots(group) - 1)
                if bool(((after > 0) & (oldest > (after - group.reach + 1).clamp(min=0))).any()):
                    raise InputError(
                        f"{group.name} no longer holds what lies before the tokens to remove",
                        expected=f"at most {self.chunk} tokens",
                        found=str(count),
                        do="reset() the cache and prefill again",
                    )
        limit = after.to(self.device)[None, :]
        for group in self.geometry.groups:
            positions = self._tensors[group.positions]
            positions.masked_fill_(positions >= limit, -1)
        self.rows.drop_last(count)

    def activate_past_recording(self) -> None:
        """Nothing to do: windows always keep enough for :meth:`crop` to undo one call."""

    # Storage ------------------------------------------------------------------------------------------------------

    def _members(self, group: CacheGroup) -> list[CacheTensor]:
        return [tensor for tensor in self.geometry.tensors if tensor.group == group.name]

    def _slots(self, group: CacheGroup) -> int:
        """A window holds its reach, what one call writes, so that no query misses a key, and one slot for padding."""
        if group.reach is None:
            return _round_up(self.capacity + 1)
        return group.reach + self.chunk

    def _allocate(self, batch_size: int) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for group in self.geometry.groups:
            slots = self._slots(group)
            tensors[group.positions] = torch.full((slots, batch_size), -1, device=self.device)
            for tensor in self._members(group):
                # Zeros, not empty: a masked slot is multiplied by a weight of 0, and 0 * NaN is NaN.
                tensors[tensor.name] = self._zeros(tensor, slots, batch_size, tensor.heads, tensor.features)
        for state in self.geometry.states:
            tensors[state.name] = self._zeros(state, batch_size, *state.shape)
        self._tensors = tensors
        self.rows = Rows(batch_size)

    def _grown(self, tensor: torch.Tensor, group: CacheGroup | None) -> torch.Tensor:
        if group is None or tensor.shape[0] >= (slots := self._slots(group)):
            return tensor  # states and windows are as long as they get
        grown = tensor.new_full((slots, *tensor.shape[1:]), -1 if tensor.dim() == 2 else 0)
        grown[: tensor.shape[0]] = tensor
        return grown

    def _zeros(self, item: CacheTensor | CacheState, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, item.dtype), device=self.device)

    def _change(self, change: Callable[[torch.Tensor, CacheGroup | None], torch.Tensor]) -> None:
        changed = {state.name: change(self._tensors[state.name], None) for state in self.geometry.states}
        for group in self.geometry.groups:
            for name in (group.positions, *(tensor.name for tensor in self._members(group))):
                changed[name] = change(self._tensors[name], group)
        self._tensors = changed  # all or nothing: an allocation that fails leaves the old ones


def _geometry_of(source: Any) -> CacheGeometry:
    if isinstance(source, CacheGeometry):
        return source
    graphs: Mapping[str, Any] | None = getattr(getattr(source, "ir", source), "graphs", None)
    if graphs is None:
        found = type(source).__name__
        raise InputTypeError("a cache is made for a program", expected="layergraph.Program", found=found)
    step = graphs.get("step")
    if step is None or step.cache is None:
        raise no_cached_graph(getattr(source, "ir", source))
    return step.cache


def _round_up(count: int) -> int:
    return -(-count // BUCKET) * BUCKET


__all__ = ["BUCKET", "CHUNK", "DualCache"]
