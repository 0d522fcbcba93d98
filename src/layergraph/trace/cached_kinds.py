"""Kinds of models whose code ties attention to the order of a cache, and how a private copy is freed from that.

Each entry is for one call of the model, while it is traced: instance attributes and hooks of the copy's own modules,
taken back at the end. What they compute is what the model computes, over positions instead of places.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from layergraph.errors import NotSupportedError
from layergraph.ir.cache_geometry import CacheGroup
from layergraph.trace.cached_masks import visible

Flat = Mapping[str, torch.Tensor]
# Kept by this code out of cached graphs, with the reason; found by class name in any module of the model.
_REFUSED = {
    "RwkvSelfAttention": "RWKV keeps its states in a list of its own, outside of transformers' caches",
}


def refuse_kinds(model: nn.Module) -> None:
    """Raise for models that no cached graph can stand for.

    Raises:
        NotSupportedError: names the module and the reason.
    """
    for path, module in model.named_modules():
        reason = _REFUSED.get(type(module).__name__)
        if reason is not None:
            raise NotSupportedError("this model cannot be traced with a cache", path=path, found=reason)


def counts_columns(model: nn.Module) -> bool:
    """Whether a layer counts tokens with their padding, whatever positions it is given (Llama 4 scales queries so)."""
    return any(
        type(module).__name__ == "Llama4TextAttention" and module.attn_temperature_tuning and not module.use_rope
        for module in model.modules()
    )


@contextmanager
def adapted(model: nn.Module, group: CacheGroup | None, flat: Flat) -> Iterator[None]:
    """Free ``model`` from the order of its cache for the block.

    Args:
        model: a private copy.
        group: the layers that hold everything, or the first group; None where nothing but states is held.
        flat: the graph's inputs.
    """
    with ExitStack() as stack:
        for module in model.modules():
            adapt = _KINDS.get(type(module).__name__)
            if adapt is not None:
                adapt(module, group, flat, stack)
        yield


def _set(stack: ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Set an instance attribute for the block."""
    before = vars(module).get(name, stack)  # the stack itself stands for "none"
    setattr(module, name, value)

    def undo() -> None:
        if before is stack:
            delattr(module, name)
        else:
            setattr(module, name, before)

    stack.callback(undo)


# gpt_neo: a table of which place sees which, cut by lengths ---------------------------------------------------------


def _gpt_neo(module: Any, group: CacheGroup | None, flat: Flat, stack: ExitStack) -> None:
    assert group is not None
    window = int(module.config.window_size) if module.attention_type == "local" else None

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> Any:
        weights = torch.matmul(query.to(torch.float32), key.to(torch.float32).transpose(-1, -2))
        seen = visible(group, flat, window=window)
        weights = torch.where(seen, weights, torch.finfo(weights.dtype).min)
        weights = module.attn_dropout(nn.functional.softmax(weights, dim=-1).to(value.dtype))
        return torch.matmul(weights, value), weights

    _set(stack, module, "_attn", attend)


# ALiBi: biases by the distance of positions. A slot of a full group holds the token of its own number. --------------


def _bloom(module: Any, group: CacheGroup | None, flat: Flat, stack: ExitStack) -> None:
    slopes_of: Callable[..., torch.Tensor] = sys.modules[type(module).__module__]._get_alibi_slopes

    def alibi(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        slopes = slopes_of(num_heads, mask.device)
        bias = slopes[:, None, None] * torch.arange(mask.shape[-1], device=mask.device)
        return bias.repeat(mask.shape[0], 1, 1).to(dtype)

    _set(stack, module, "build_alibi_tensor", alibi)


def _mpt(module: Any, group: CacheGroup | None, flat: Flat, stack: ExitStack) -> None:
    assert group is not None
    build, slots = module.build_mpt_alibi_tensor, flat[group.positions].shape[0]

    def alibi(num_heads: int, sequence_length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Distances to the last slot: the same but for a constant in each row, which softmax does not see.
        return build(num_heads, slots, *args, **kwargs)

    _set(stack, module, "build_mpt_alibi_tensor", alibi)


def _falcon(module: Any, group: CacheGroup | None, flat: Flat, stack: ExitStack) -> None:
    if not module.use_alibi:
        return
    if module.config._attn_implementation != "sdpa":
        raise NotSupportedError("Falcon with ALiBi is cached under sdpa attention only", do="load it with sdpa")
    build = sys.modules[type(module).__module__].build_alibi_tensor
    heads, width = module.num_heads, module.config.hidden_size // module.num_heads

    def give(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # As the model does: the biases are part of the mask, and their presence says "no rotary positions".
        mask, hidden = kwargs["attention_mask"], args[0] if args else kwargs["hidden_states"]
        ones = torch.ones(1, mask.shape[-1], dtype=torch.int64, device=mask.device)
        bias = build(ones, heads, dtype=hidden.dtype)[None]
        joint = torch.where(mask, bias / math.sqrt(width), torch.finfo(hidden.dtype).min)
        return args, {**kwargs, "attention_mask": joint, "alibi": bias}

    _set(stack, module, "use_alibi", False)
    for layer in module.h:
        stack.callback(layer.register_forward_pre_hook(give, with_kwargs=True, prepend=True).remove)


# Linear attention -------------------------------------------------------------------------------------------------


def _minimax(module: Any, group: CacheGroup | None, flat: Flat, stack: ExitStack) -> None:
    """Lightning attention over one block of any length, from the state that is held.

        out_t = q_t (r^t W + sum over u <= t of r^(t-u) k_u' v_u),    W' = r^n W + sum over u of r^(n-u) k_u' v_u

    Upstream cuts prompts into blocks by a loop over lengths, and decodes by a loop over tokens; both are this sum.
    """
    masked = sys.modules[type(module).__module__].apply_mask_to_padding_states

    def forward(
        hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None, **_: Any
    ) -> Any:
        batch, count, _width = hidden_states.shape
        mixed = masked(module.act_fn(module.qkv_proj(hidden_states)), attention_mask)
        mixed = mixed.reshape(batch, count, module.num_attention_heads, 3 * module.head_dim)
        query, key, value = (part.transpose(1, 2) for part in torch.split(mixed, module.head_dim, dim=3))
        held = cache.get_linear_cache(module.layer_idx)
        place = torch.arange(count, device=query.device)
        distance = place[:, None] - place[None, :]
        decay = torch.where(distance >= 0, torch.exp(-module.slope_rate * distance.clamp(min=0)), 0.0)
        within = torch.matmul(torch.matmul(query, key.transpose(-1, -2)) * decay, value)
        before = torch.matmul(query * torch.exp(-module.slope_rate * (place + 1)[:, None]), held)
        fading = torch.exp(-module.slope_rate * (count - 1 - place)[:, None])
        state = held * torch.exp(-module.slope_rate * count) + torch.matmul((key * fading).transpose(-1, -2), value)
        output = (within + before).transpose(1, 2).reshape(batch, count, -1)
        output = torch.sigmoid(module.output_gate(hidden_states)) * module.norm(output)
        cache.set_linear_cache(module.layer_idx, state)
        return module.out_proj(output), state

    _set(stack, module, "forward", forward)


_KINDS: dict[str, Callable[[Any, CacheGroup | None, Flat, ExitStack], None]] = {
    "GPTNeoSelfAttention": _gpt_neo,
    "BloomModel": _bloom,
    "FalconModel": _falcon,
    "MptModel": _mpt,
    "MiniMaxLightningAttention": _minimax,
}

__all__ = ["adapted", "counts_columns", "refuse_kinds"]
