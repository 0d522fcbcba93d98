"""Session: one cache, stepped through a program's cached graph."""

from __future__ import annotations

import torch

from layergraph.errors import InputError, NotSupportedError
from layergraph.ir.program import GraphUnit, Program
from layergraph.runtime.cache import DualCache
from layergraph.runtime.engine import runner
from layergraph.runtime.ownership import check_geometry, check_writer
from layergraph.runtime.pieces import join


class Session:
    """Steps a cached program by hand: ``session.step(tokens)``, again and again.

    Args:
        program: with a ``step`` graph.
        cache: to go on with; a new one by default.
        capacity: tokens that the new cache holds without growing.
        adapter: the adapter of a woven shadow that this conversation uses; None for the base model.
        engine: ``eager`` replays the graph op by op, ``inductor`` compiles it at the first step.

    One session belongs to one thread; any number of them may run on one program.

    Raises:
        NotSupportedError: the program has no cached graph.
        NotFoundError: no adapter of that name.
        InputError: an unknown engine; the cache is of another program (one half where both are needed, say), or
            holds what another adapter computed.
    """

    def __init__(
        self,
        program: Program,
        cache: DualCache | None = None,
        *,
        capacity: int | None = None,
        adapter: str | None = None,
        engine: str = "eager",
    ) -> None:
        self.program = program
        device = next(iter(program.state.values())).device
        self.cache = cache if cache is not None else DualCache(program, capacity=capacity, device=device)
        self.unit: GraphUnit = program["step"]
        check_geometry(self.cache, self.unit.cache)
        self.adapter = program.shadow[adapter] if program.shadow is not None and adapter is not None else None
        self.engine = engine
        self._run_graph = runner(self.unit, engine)
        self._adapter_inputs = program.adapter_inputs("step", adapter)
        check_writer(self.cache, self.adapter)
        self._names = set(self.unit.interface.input_names)
        self._embeds = next((item for item in self.unit.interface.inputs if item.name == "inputs_embeds"), None)

    def step(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 1,
        *,
        inputs_embeds: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Write the new tokens and return the graph's outputs by name.

        Args:
            input_ids: int64 [batch, tokens]; -1 where ``inputs_embeds`` has the embedding.
            attention_mask: [batch, tokens] or [batch, held + tokens], 0 for padding; all real by default.
            position_ids: int64 [batch, tokens]; by default each row counts its real tokens.
            logits_to_keep: how many of the last new tokens get logits (0 for all), or their indices.
            inputs_embeds: [batch, tokens, features], what the model's embedding would return.

        Long prompts are written in pieces where windows hold only so many.

        Raises:
            InputError: shapes disagree, the cache holds other rows, or it is full; the cache is as it was.
            NotSupportedError: embeddings are given, and the graph takes ids only.
        """
        ids, embeds = self._tokens(input_ids, inputs_embeds)
        batch, count = ids.shape
        if count == 0 or batch == 0:
            raise InputError("there is no token to write", do="pass at least one token in each row")
        real = self._real(attention_mask, batch, count)
        keep = _indices(logits_to_keep, count, ids.device)
        if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != count):
            found = str(list(position_ids.shape))
            raise InputError("position_ids do not fit the tokens", expected=f"[{batch}, {count}]", found=found)
        if embeds is not None and not self._takes_embeddings():
            raise NotSupportedError(
                "the shadow backbone looks tokens up in a table of its own, of another width",
                do="pass input_ids, or weave an adapter with share_embeddings=True",
            )
        check_writer(self.cache, self.adapter)
        self.cache.reserve(real)
        self.cache.writer = self.adapter
        limit = self.cache.max_tokens() or count
        pieces, sizes = [], []
        try:
            for first in range(0, count, limit):
                part = slice(first, min(first + limit, count))
                given = {"input_ids": ids[:, part], "logits_to_keep": _within(keep, part)}
                if embeds is not None:
                    given["inputs_embeds"] = embeds[:, part]
                if position_ids is not None:
                    given["position_ids"] = position_ids.expand(batch, -1)[:, part]
                pieces.append(self._run(given, real[:, part]))
                sizes.append(part.stop - part.start)
        except BaseException:
            self.cache.give_up()
            raise
        return pieces[0] if len(pieces) == 1 else join(self.unit, pieces, batch, sizes)

    def _run(self, given: dict[str, torch.Tensor], real: torch.Tensor) -> dict[str, torch.Tensor]:
        ids = given["input_ids"]
        order = (self.cache.rows.counts[:, None] + real.cumsum(1) - 1).to(ids.device)
        tokens = torch.where(real.to(ids.device), order, -1)
        given = {
            "position_ids": order.clamp(min=0),
            **given,
            "token_positions": tokens,
            "tokens_written": torch.full((1,), self.cache.length, device=ids.device),
            **self.cache.slots(tokens, real),
            **self.cache.views(real),
            **self._adapter_inputs,
        }
        if self._embeds is not None and "inputs_embeds" not in given:
            # Not read: every id says that its embedding is to be looked up.
            shape = (*ids.shape, int(self._embeds.shape[-1]))
            given["inputs_embeds"] = torch.zeros(shape, dtype=getattr(torch, self._embeds.dtype), device=ids.device)
        kept = {name: value.contiguous() for name, value in given.items() if name in self._names}
        with torch.no_grad():
            outputs = self._run_graph(self.unit.interface.check(kept))
        self.cache.advance(real)
        return outputs

    def _tokens(
        self, input_ids: torch.Tensor | None, embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if embeds is None:
            if input_ids is None:
                raise InputError("there is no token to write", do="pass input_ids or inputs_embeds")
            if input_ids.dim() != 2:
                raise InputError("input_ids have no rows", expected="[batch, tokens]", found=str(list(input_ids.shape)))
            return input_ids, None
        if self._embeds is None:
            raise NotSupportedError("this graph takes token ids, not embeddings", do="pass input_ids")
        width, dtype = self._embeds.shape[-1], getattr(torch, self._embeds.dtype)
        if embeds.dim() != 3 or embeds.shape[-1] != width:
            found = str(list(embeds.shape))
            raise InputError("inputs_embeds do not fit", expected=f"[batch, tokens, {width}]", found=found)
        if input_ids is None:
            input_ids = torch.full(embeds.shape[:2], -1, dtype=torch.int64, device=embeds.device)
        if input_ids.shape != embeds.shape[:2]:
            found = f"{list(input_ids.shape)} and {list(embeds.shape)}"
            raise InputError("input_ids and inputs_embeds disagree", expected="the same batch and tokens", found=found)
        return input_ids, embeds.to(dtype)

    def _takes_embeddings(self) -> bool:
        return self.program.shadow is None or bool(self.program.shadow.geometry.get("takes_embeddings", True))

    def _real(self, mask: torch.Tensor | None, batch: int, count: int) -> torch.Tensor:
        """bool [batch, tokens] on the CPU: which new tokens are no padding."""
        if mask is None:
            return torch.ones(batch, count, dtype=torch.bool)
        held = self.cache.length
        if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in (count, held + count):
            raise InputError(
                "attention_mask does not fit the tokens",
                expected=f"[{batch}, {count}] or [{batch}, {held + count}]",
                found=str(list(mask.shape)),
                do="give one value for each new token, or for all held and new ones",
            )
        real = mask.to("cpu", torch.bool)
        if (
            real.shape[1] > count
            and len(self.cache.rows) == batch
            and not torch.equal(real[:, :held], self.cache.rows.real)
        ):
            raise InputError(
                "attention_mask says otherwise about tokens that are held",
                expected="the mask they were written with",
                do="crop() or reset() the cache to write them anew, or give a mask for the new tokens only",
            )
        return real[:, -count:]


def _indices(keep: int | torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    if isinstance(keep, torch.Tensor):
        return torch.where(keep < 0, keep + count, keep).to(device)
    first = 0 if keep == 0 else max(0, count - keep)
    return torch.arange(first, count, device=device)


def _within(keep: torch.Tensor, part: slice) -> torch.Tensor:
    return keep[(keep >= part.start) & (keep < part.stop)] - part.start


__all__ = ["Session"]
