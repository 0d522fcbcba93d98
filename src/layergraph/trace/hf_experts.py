"""Mixtures of experts in a form that can be traced, whatever implementation the model was set to.

The plain loop visits the experts that were hit, which depends on data. transformers' own way out while exporting is,
but for bf16, an operator of its own, which would tie every saved program to that package.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from layergraph.errors import NotSupportedError

_numbers = itertools.count()


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose forward transformers dispatches on ``config._experts_implementation``, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed")
    }


@contextmanager
def traceable_experts(model: nn.Module) -> Iterator[None]:
    """Give the experts of ``model``, a private copy, a forward that can be traced, for the block.

    Each expert module gets a config of its own. Apart from that one entry of transformers' registry of experts
    functions is ours for the block, under a name that nobody else asks for: modules look functions up by name.

    Raises:
        NotSupportedError: experts that are spread over processes.
    """
    from transformers.integrations.moe import ExpertsInterface

    experts = expert_modules(model)
    for path, module in experts.items():
        if getattr(module, "_is_expert_parallel", False):
            raise NotSupportedError("expert parallelism cannot be traced", path=path, do="trace the unsharded model")
    name = f"layergraph_{next(_numbers)}_experts"
    own: dict[int, Any] = {}
    before = {path: module.config for path, module in experts.items()}
    try:
        if experts:
            ExpertsInterface._global_mapping[name] = _experts_forward
        for module in experts.values():
            module.config = own.setdefault(id(module.config), _renamed(module.config, name))
        yield
    finally:
        for path, module in experts.items():
            module.config = before[path]
        ExpertsInterface._global_mapping.pop(name, None)


def _renamed(config: Any, name: str) -> Any:
    twin = copy.copy(config)
    twin._experts_implementation_internal = name
    return twin


def _experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """``out[t] = sum_k top_k_weights[t, k] * expert[top_k_index[t, k]](hidden_states[t])``.

    Args:
        module: holds stacked weights, (experts, in, out) if ``is_transposed`` and else (experts, out, in).
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k) integers.
        top_k_weights: (tokens, k).

    bf16 goes through torch's grouped matmul, whose fake kernel takes nothing else (torch 2.13). Other dtypes run
    every expert on every token and pick: more arithmetic, no data-dependent size, and memory of
    experts x tokens x width, where gathering the weights of each token would take tokens x k x hidden x width.
    """
    weight = module.gate_up_proj if module.has_gate else module.up_proj
    run = _grouped if weight.dtype is torch.bfloat16 else _dense
    picked = run(module, hidden_states.to(weight.dtype), top_k_index)
    return (picked * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def _dense(module: Any, tokens: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(module, name)
        y = torch.matmul(x, weight if module.is_transposed else weight.transpose(-2, -1))
        return y + getattr(module, f"{name}_bias")[:, None] if module.has_bias else y

    out = _expert_layers(module, linear, tokens[None])  # (experts, tokens, hidden)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    return out[top_k_index, rows[:, None]]


def _grouped(module: Any, tokens: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
    n_experts = (module.gate_up_proj if module.has_gate else module.up_proj).shape[0]
    expert, order = torch.sort(top_k_index.reshape(-1))
    # Row numbers at which each expert's group ends: how many rows go to it or an earlier one
    numbers = torch.arange(n_experts, device=expert.device)
    ends = (expert[None, :] <= numbers[:, None]).sum(-1, dtype=torch.int32)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(module, name)
        y = F.grouped_mm(x, weight if module.is_transposed else weight.transpose(-2, -1), offs=ends)
        return y + getattr(module, f"{name}_bias")[expert] if module.has_bias else y

    out = _expert_layers(module, linear, tokens[order // top_k_index.shape[1]])
    return out[torch.argsort(order)].view(*top_k_index.shape, -1)


def _expert_layers(module: Any, linear: Any, x: torch.Tensor) -> torch.Tensor:
    if module.has_gate:
        x = module._apply_gate(linear("gate_up_proj", x))
    else:
        x = module.act_fn(linear("up_proj", x))
    x = linear("down_proj", x)
    return module.post_expert_norm(x) if getattr(module, "has_post_expert_norm", False) else x


__all__ = ["expert_modules", "traceable_experts"]
