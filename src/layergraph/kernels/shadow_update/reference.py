"""What shadow_update means: arXiv 2604.19254, Eq. 5-7; ``peft.tuners.shadow.layers.ShadowLayer.shadow_update``."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def shadow_update(
    hidden: Tensor,
    shadow: Tensor,
    t1_weight: Tensor,
    t1_bias: Tensor,
    t2_weight: Tensor,
    t2_bias: Tensor,
    g1_weight: Tensor,
    g1_bias: Tensor,
    g2_weight: Tensor,
    g2_bias: Tensor,
) -> Tensor:
    """``(1 - g) * shadow + g * T(hidden)`` with ``g = sigmoid(G(hidden))``, contiguous, in shadow's dtype.

    T and G are Linear - GELU (exact, erf) - Linear. The arithmetic runs in the adapter's dtype.

    Args:
        hidden, shadow: ``[..., d]``.
        t1_weight, g1_weight: ``[u, d]``; their biases ``[u]``.
        t2_weight, g2_weight: ``[d, u]``; their biases ``[d]``. All eight of one dtype.
    """
    dtype = t1_weight.dtype
    x = hidden.contiguous().to(dtype)
    candidate = F.linear(F.gelu(F.linear(x, t1_weight, t1_bias)), t2_weight, t2_bias)
    gate = torch.sigmoid(F.linear(F.gelu(F.linear(x, g1_weight, g1_bias)), g2_weight, g2_bias))
    return ((1.0 - gate) * shadow.contiguous().to(dtype) + gate * candidate).to(shadow.dtype)


class UpdateGrads(NamedTuple):
    """Gradients of :func:`shadow_update`, in the order of its arguments."""

    hidden: Tensor
    shadow: Tensor
    t1_weight: Tensor
    t1_bias: Tensor
    t2_weight: Tensor
    t2_bias: Tensor
    g1_weight: Tensor
    g1_bias: Tensor
    g2_weight: Tensor
    g2_bias: Tensor


def shadow_update_backward(
    grad: Tensor,
    hidden: Tensor,
    shadow: Tensor,
    t1_weight: Tensor,
    t1_bias: Tensor,
    t2_weight: Tensor,
    t2_bias: Tensor,
    g1_weight: Tensor,
    g1_bias: Tensor,
    g2_weight: Tensor,
    g2_bias: Tensor,
) -> UpdateGrads:
    """Gradients from the inputs alone: candidate and gate are computed again instead of being kept."""
    width, dtype = hidden.shape[-1], t1_weight.dtype
    x, old, out = (tensor.reshape(-1, width).to(dtype) for tensor in (hidden, shadow, grad))
    t_in, g_in = F.linear(x, t1_weight, t1_bias), F.linear(x, g1_weight, g1_bias)
    t_mid, g_mid = F.gelu(t_in), F.gelu(g_in)
    candidate = F.linear(t_mid, t2_weight, t2_bias)
    gate = torch.sigmoid(F.linear(g_mid, g2_weight, g2_bias))

    grad_candidate = out * gate
    grad_logit = grad_candidate * (candidate - old) * (1.0 - gate)
    grad_t = (grad_candidate @ t2_weight) * _gelu_slope(t_in)
    grad_g = (grad_logit @ g2_weight) * _gelu_slope(g_in)
    return UpdateGrads(
        hidden=(grad_t @ t1_weight + grad_g @ g1_weight).to(hidden.dtype).reshape(hidden.shape),
        shadow=(out * (1.0 - gate)).to(shadow.dtype).reshape(shadow.shape),
        t1_weight=grad_t.t() @ x,
        t1_bias=grad_t.sum(0),
        t2_weight=grad_candidate.t() @ t_mid,
        t2_bias=grad_candidate.sum(0),
        g1_weight=grad_g.t() @ x,
        g1_bias=grad_g.sum(0),
        g2_weight=grad_logit.t() @ g_mid,
        g2_bias=grad_logit.sum(0),
    )


def _gelu_slope(x: Tensor) -> Tensor:
    # d/dx of x * Phi(x), Phi the normal distribution function.
    return 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


__all__ = ["UpdateGrads", "shadow_update", "shadow_update_backward"]
