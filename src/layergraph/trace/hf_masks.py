"""Attention masks of models with mask functions of their own, built by broadcasting instead of ``torch.vmap``.

A trace records vmap's bookkeeping as ops, and replay then meets tensors outside of their vmap. Written against
``transformers.masking_utils`` 5.17 to 5.24.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAME = "_vmap_expansion_sdpa"


@contextmanager
def broadcast_masks() -> Iterator[None]:
    """Within the block and in this thread, masks are built by broadcasting; other threads get upstream's own function.

    Exports are made one at a time, so there is never more than one replacement.
    """
    from transformers import masking_utils

    theirs = getattr(masking_utils, _NAME, None)
    if theirs is None:
        yield
        return
    tracing = threading.get_ident()

    @functools.wraps(theirs)
    def expansion(mask_function: Callable[..., Any]) -> Callable[..., Any]:
        return _broadcast(mask_function) if threading.get_ident() == tracing else theirs(mask_function)

    setattr(masking_utils, _NAME, expansion)
    try:
        yield
    finally:
        setattr(masking_utils, _NAME, theirs)


def _broadcast(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    def build(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        mask: torch.Tensor = mask_function(
            batch[:, None, None, None], head[None, :, None, None], query[None, None, :, None], key[None, None, None, :]
        )
        return mask.expand(batch.shape[0], head.shape[0], query.shape[0], key.shape[0])

    return build


__all__ = ["broadcast_masks"]
