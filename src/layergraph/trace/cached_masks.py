"""What each new token sees of a cache, computed in the graph from the positions that its slots hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from layergraph.ir.cache_geometry import CacheGroup


def write_positions(group: CacheGroup, flat: Mapping[str, torch.Tensor]) -> None:
    """Note which tokens the new slots hold: after that a slot's position tells all there is to know."""
    query = flat["token_positions"]
    rows = torch.arange(query.shape[0], device=query.device)
    flat[group.positions].index_put_((flat[group.write].t(), rows[None, :]), query.t())


def visible(
    group: CacheGroup,
    flat: Mapping[str, torch.Tensor],
    *,
    window: int | None = None,
    additive: torch.dtype | None = None,
) -> torch.Tensor:
    """``[batch, 1, tokens, slots]``: bool, or additive for eager attention.

    Args:
        group: which slots; its positions are written already.
        flat: the graph's inputs by name.
        window: a narrower reach than the group's, for layers that hold more than they look at.
        additive: dtype of an additive mask.
    """
    query, held = flat["token_positions"], flat[group.positions]
    key = held.t()[:, None, :]
    position = query[:, :, None]
    seen = (key >= 0) & (key <= position)
    reach = window if window is not None else group.window
    if reach is not None:
        seen = seen & (position - key < reach)
    if group.chunk is not None:
        seen = seen & (position // group.chunk == key // group.chunk)
    # Padding sees what its slot holds and nothing else: a row without any key would be 0 / 0.
    slots = torch.arange(held.shape[0], device=query.device)
    mask = (seen | (slots[None, None, :] == flat[group.write][:, :, None]) & (position < 0))[:, None]
    if additive is None:
        return mask
    zero = torch.zeros((), dtype=additive, device=query.device)
    return torch.where(mask, zero, torch.full((), torch.finfo(additive).min, dtype=additive, device=query.device))


__all__ = ["visible", "write_positions"]
