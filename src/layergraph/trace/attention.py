"""Packed ("varlen") attention of vision and audio encoders, in a form that can be traced.

Encoders that pack images or clips of different length into one sequence loop over ``cu_seqlens``, which a graph
cannot. With flash attention they hand ``cu_seqlens`` to the kernel instead; transformers' own code then has no
data-dependent step left. :func:`varlen_attention` gives these modules, on a private copy of a model, an attention
function that asks for that path and computes the same thing with a block-diagonal mask: token i sees token j when
both lie in one segment.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from layergraph.errors import NotSupportedError

# Names of keyword arguments that carry segment boundaries in the encoders of transformers 5.17 to 5.24.
_BOUNDARIES = ("cu_seqlens", "cu_window_seqlens")
_MAIN = ("hidden_states", "pixel_values", "position_ids")
_numbers = itertools.count()


def packed_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Attention modules that take ``cu_seqlens`` and can hand it to a flash kernel, by path."""
    return {path: module for path, module in model.named_modules() if _is_packed(type(module))}


def segment_mask(cu_seqlens: torch.Tensor, n_tokens: int | torch.SymInt) -> torch.Tensor:
    """Boolean (1, 1, tokens, tokens): True where query and key lie in one segment.

    Args:
        cu_seqlens: (segments + 1,) integers from 0 to ``n_tokens``, ascending.
        n_tokens: length of the packed sequence.
    """
    # Segment of token p = how many boundaries, 0 included, lie at or before p. Comparisons and a sum: every backend
    # has them. Without a slice of cu_seqlens no size is segments alone, which torch would fix where it is 1.
    position = torch.arange(n_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    segment = (position[:, None] >= cu_seqlens[None, :]).sum(-1)
    return (segment[:, None] == segment[None, :])[None, None]


class _Masks:
    """Masks of one trace: one for each distinct ``cu_seqlens``, so that equal layers share one node."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, Any], tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, cu_seqlens: torch.Tensor, n_tokens: int | torch.SymInt) -> torch.Tensor:
        # A symbolic length is keyed by its expression; comparing SymInts would put a guard on it.
        length = n_tokens.node.expr if isinstance(n_tokens, torch.SymInt) else n_tokens
        key = (id(cu_seqlens), length)
        if key not in self._made:
            # The tensor is kept with its mask: an id stays taken only as long as its owner lives.
            self._made[key] = (cu_seqlens, segment_mask(cu_seqlens, n_tokens))
        return self._made[key][1]

    def clear(self) -> None:
        self._made.clear()


@contextmanager
def varlen_attention(model: nn.Module) -> Iterator[None]:
    """Make the packed attention of ``model``, a private copy, traceable for the block.

    Modules whose config asks for ``eager`` attention get a variant that returns the weights too, (1, heads, tokens,
    tokens) and zero between segments. Nothing but ``model`` changes, apart from one entry under a name of our own in
    transformers' registry of attention functions, which is removed at the end: the registry is a class attribute,
    and the modules look their function up by name, so there is no other door. Other threads never ask for that name.

    Raises:
        NotSupportedError: a packed attention is set to an implementation other than eager, sdpa or flash attention.
    """
    packed = packed_attentions(model)
    if not packed:
        yield
        return
    from transformers.modeling_utils import AttentionInterface

    masks = _Masks()
    number = next(_numbers)
    # "flash" makes is_flash_attention_requested true; no digit follows it, as that would name a flash version.
    functions = {f"layergraph_{number}_{kind}_flash": _FORWARDS[kind] for kind in _FORWARDS}
    names = {kind: name for name, kind in zip(functions, _FORWARDS, strict=True)}
    configs = {path: module.config for path, module in packed.items()}
    handles = []
    try:
        for name, forward in functions.items():
            AttentionInterface._global_mapping[name] = _bind(forward, masks)
        for path, module in packed.items():
            own = copy.copy(module.config)  # the modules around it keep reading the user's choice
            own._attn_implementation_internal = names[_kind(path, own._attn_implementation)]
            module.config = own
            handles.append(module.register_forward_pre_hook(_give_max_seqlen, with_kwargs=True))
        for module in _owners(model, packed):
            handles.append(module.register_forward_pre_hook(_make_masks(masks), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for path, module in packed.items():
            module.config = configs[path]
        for name in functions:
            AttentionInterface._global_mapping.pop(name, None)
        masks.clear()


def _is_packed(cls: type[nn.Module]) -> bool:
    forward = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    return (
        code is not None
        and "cu_seqlens" in inspect.signature(forward).parameters
        and "is_flash_attention_requested" in code.co_names
    )


def _kind(path: str, implementation: str | None) -> str:
    if implementation == "eager":
        return "eager"
    if implementation in (None, "sdpa") or "flash" in implementation:
        return "sdpa"  # flash attention computes the same; a graph must not depend on its kernels
    raise NotSupportedError(
        f"attention implementation {implementation!r} cannot be traced for a packed sequence",
        path=path,
        do='call model.set_attn_implementation("sdpa") before tracing',
        shell="add --attention sdpa",
    )


def _owners(model: nn.Module, packed: dict[str, nn.Module]) -> list[nn.Module]:
    """Modules above packed attention that take ``**kwargs`` or boundaries: masks are made in the outermost called."""
    paths = {""} | {".".join(parts[:n]) for path in packed if (parts := path.split(".")) for n in range(len(parts))}
    return [model.get_submodule(path) for path in sorted(paths)]


def _make_masks(masks: _Masks) -> Any:
    """A pre-hook that makes masks in the scope of the encoder, so that its first layer is like every other."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        boundaries = [kwargs[name] for name in _BOUNDARIES if isinstance(kwargs.get(name), torch.Tensor)]
        main = next((v for v in [*args[:1], *map(kwargs.get, _MAIN)] if isinstance(v, torch.Tensor)), None)
        if boundaries and main is not None and main.dim() == 2:
            for cu_seqlens in boundaries:
                masks.get(cu_seqlens, main.shape[0])

    return hook


def _give_max_seqlen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Flash kernels want the longest segment as a number, read from the data. Ours does not: spare the read."""
    if kwargs.get("max_seqlen") is None:
        return args, {**kwargs, "max_seqlen": 0}
    return None


def _bind(forward: Any, masks: _Masks) -> Any:
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        cu_seq_lens_q: torch.Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Towers that take a batch of equal images or one packed sequence (radio) have no boundaries for the batch.
        mask = attention_mask if cu_seq_lens_q is None else masks.get(cu_seq_lens_q, query.shape[2])
        return forward(module, query, key, value, mask, scaling=scaling, dropout=dropout)

    return attention


def _sdpa_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
) -> tuple[torch.Tensor, None]:
    """Query (1, heads, tokens, d), keys and values (1, kv heads, tokens, d) to (1, tokens, heads, d)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False)


def _eager_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_sdpa_forward`, by the model's own eager function, with the weights (1, heads, tokens, tokens)."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask, scaling=scaling, dropout=dropout)


_FORWARDS = {"sdpa": _sdpa_forward, "eager": _eager_forward}

__all__ = ["packed_attentions", "segment_mask", "varlen_attention"]
