"""Gated delta rules (Qwen3-Next, Qwen3.5, OLMo hybrid) in a form that can be traced for every length.

Upstream scans over chunks of 64 tokens in Python: a trace holds for one number of chunks, and computes something else
for others without a word. The same function over one chunk as long as the text needs no loop. It costs memory like
eager attention does, tokens squared for each head; cached programs write prompts in pieces, which bounds it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_NAME = "torch_chunk_gated_delta_rule"


@contextmanager
def traceable_delta_rules(model: nn.Module) -> Iterator[None]:
    """Give layers of ``model``, a private copy, a forward that calls :func:`gated_delta_rule`, for the block.

    It is upstream's own forward over globals in which that one name means ours: nobody else sees it.
    """
    changed = []
    for module in model.modules():
        code = _forward_of(module)
        if code is None or "forward" in vars(module):
            continue
        ours = types.FunctionType(
            code.__code__,
            {**code.__globals__, _NAME: gated_delta_rule},
            code.__name__,
            code.__defaults__,
            code.__closure__,
        )
        ours.__kwdefaults__ = code.__kwdefaults__
        vars(module)["forward"] = types.MethodType(ours, module)
        changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def _forward_of(module: nn.Module) -> Any:
    function = inspect.unwrap(type(module).forward)
    code = getattr(function, "__code__", None)
    return function if code is not None and _NAME in code.co_names else None


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over all tokens at once (arXiv 2412.06464, section 3.3, with one chunk).

    Per head, with decays a_t = exp(g_t), from the state S_0::

        S_t = a_t S_(t-1) + beta_t k_t (v_t - a_t S_(t-1)^T k_t)^T        o_t = S_t^T q_t / sqrt(d_k)

    which for c_t = g_1 + ... + g_t is one triangular system of tokens times tokens.

    Args:
        query, key: [batch, tokens, key heads, d_k].
        value: [batch, tokens, heads, d_v]; each key head serves ``heads // key heads`` of them.
        g, beta: [batch, tokens, heads].
        initial_state: [batch, heads, d_k, d_v], zeros by default.
        use_qk_l2norm_in_kernel: normalise queries and keys.

    Returns:
        Outputs like ``value``, and the last state in float32, or None.
    """
    dtype, repeats = query.dtype, value.shape[2] // key.shape[2]
    if repeats != 1:
        query, key = query.repeat_interleave(repeats, dim=2), key.repeat_interleave(repeats, dim=2)
    query, key, value, beta, decay = (item.transpose(1, 2).to(torch.float32) for item in (query, key, value, beta, g))
    if use_qk_l2norm_in_kernel:
        query, key = (item * torch.rsqrt(item.square().sum(-1, keepdim=True) + 1e-6) for item in (query, key))
    query = query * query.shape[-1] ** -0.5
    # Sums over a long text lose what their small differences need, so a second number carries the rest.
    exact = decay.to(torch.float64).cumsum(-1)
    total = exact.to(torch.float32)
    rest = (exact - total).to(torch.float32)
    count = total.shape[-1]
    later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]) + (rest[..., :, None] - rest[..., None, :])
    between = between.masked_fill(later, float("-inf")).exp()
    since = total.exp()[..., None]  # from the state to each token
    weighted = key * beta[..., None]
    system = (weighted @ key.transpose(-1, -2)) * between
    # The system's diagonal counts as ones: what it holds there is not read.
    wanted = torch.cat([value * beta[..., None], weighted * since], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    attention = (query @ key.transpose(-1, -2)) * between
    if initial_state is not None:
        state = initial_state.to(torch.float32)
        written = written - read @ state
        output = (query * since) @ state + attention @ written
    else:
        output = attention @ written
    last = None
    if output_final_state:
        until = ((total[..., -1:] - total) + (rest[..., -1:] - rest)).exp()[..., None]
        last = (key * until).transpose(-1, -2) @ written
        if initial_state is not None:
            last = last + state * total[..., -1].exp()[..., None, None]
    return output.transpose(1, 2).to(dtype), last


__all__ = ["gated_delta_rule", "traceable_delta_rules"]
