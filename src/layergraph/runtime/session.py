"""Session: one cache, stepped through a program's cached graph."""

from __future__ import annotations

import torch

from layergraph.errors import InputError
from layergraph.ir.execute import run_graph
from layergraph.ir.program import GraphUnit, Program
from layergraph.runtime.cache import DualCache


class Session:
    """Steps a cached program by hand: ``session.step(tokens)``, again and again.

    Args:
        program: with a ``step`` graph.
        cache: to go on with; a new one by default.
        capacity: tokens that the new cache holds without growing.

    One session belongs to one thread; any number of them may run on one program.

    Raises:
        NotSupportedError: the program has no cached graph.
    """

    def __init__(self, program: Program, cache: DualCache | None = None, *, capacity: int | None = None) -> None:
        self.program = program
        device = next(iter(program.state.values())).device
        self.cache = cache if cache is not None else DualCache(program, capacity=capacity, device=device)
        self.unit: GraphUnit = program["step"]

    def step(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 1,
    ) -> dict[str, torch.Tensor]:
        """Write the new tokens and return the graph's outputs by name.

        Args:
            input_ids: int64 [batch, tokens].
            attention_mask: [batch, tokens] or [batch, held + tokens], 0 for padding; all real by default.
            position_ids: int64 [batch, tokens]; by default each row counts its real tokens.
            logits_to_keep: how many of the last new tokens get logits (0 for all), or their indices.

        Long prompts are written in pieces where windows hold only so many.

        Raises:
            InputError: shapes disagree, the cache holds other rows, or it is full; the cache is as it was.
        """
        batch, count = input_ids.shape
        if count == 0:
            raise InputError("there is no token to write", do="pass at least one token in each row")
        real = self._real(attention_mask, batch, count, input_ids.device)
        keep = _indices(logits_to_keep, count, input_ids.device)
        self.cache.reserve(batch, count)
        start = self.cache.n_tokens.to(input_ids.device)[:, None]
        order = start + real.cumsum(1) - 1
        tokens = torch.where(real, order, -1)
        if position_ids is None:
            position_ids = order.clamp(min=0)
        position_ids = position_ids.expand(batch, -1)
        if position_ids.shape[1] != count:
            found = str(list(position_ids.shape))
            raise InputError("position_ids do not fit the tokens", expected=f"[{batch}, {count}]", found=found)
        limit = self.cache.max_tokens() or count
        pieces = []
        for first in range(0, count, limit):
            part = slice(first, min(first + limit, count))
            wanted = keep[(keep >= part.start) & (keep < part.stop)] - part.start
            pieces.append(self._run(input_ids[:, part], position_ids[:, part], tokens[:, part], wanted, real[:, part]))
        return pieces[0] if len(pieces) == 1 else _join(pieces)

    def _run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        tokens: torch.Tensor,
        keep: torch.Tensor,
        real: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        count = input_ids.shape[1]
        given = {
            "input_ids": input_ids.contiguous(),
            "position_ids": position_ids.contiguous(),
            "token_positions": tokens.contiguous(),
            "logits_to_keep": keep,
            **self.cache.slots(count),
            **self.cache.views(count),
        }
        names = self.unit.interface.input_names
        tensors = self.unit.interface.check({name: value for name, value in given.items() if name in names})
        with torch.no_grad():
            outputs = run_graph(self.unit, tensors)
        self.cache.advance(real)
        return outputs

    def _real(self, mask: torch.Tensor | None, batch: int, count: int, device: torch.device) -> torch.Tensor:
        if mask is None:
            return torch.ones(batch, count, dtype=torch.bool, device=device)
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in (count, self.cache.length + count):
            raise InputError(
                "attention_mask does not fit the tokens",
                expected=f"[{batch}, {count}] or [{batch}, {self.cache.length + count}]",
                found=str(list(mask.shape)),
                do="give one value for each new token, or for all held and new ones",
            )
        return mask[:, -count:].bool()


def _indices(keep: int | torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    if isinstance(keep, torch.Tensor):
        return keep.to(device)
    first = 0 if keep == 0 else max(0, count - keep)
    return torch.arange(first, count, device=device)


def _join(pieces: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Outputs of several pieces of one prompt, along the tokens."""
    return {name: torch.cat([piece[name] for piece in pieces], dim=1) for name in pieces[0]}


__all__ = ["Session"]
