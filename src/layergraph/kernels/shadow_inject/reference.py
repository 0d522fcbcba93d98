"""What shadow_inject means: arXiv 2604.19254, Eq. 2-4; ``peft.tuners.shadow.layers.ShadowLayer.shadow_inject``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def shadow_inject(hidden: Tensor, shadow: Tensor, down_weight: Tensor, up_weight: Tensor, alpha: Tensor) -> Tensor:
    """``hidden + alpha * up(down(hidden - shadow))``, contiguous, in hidden's dtype.

    Args:
        hidden, shadow: ``[..., d]``; the difference is taken in their common dtype, as peft does.
        down_weight: ``[r, d]``; the products run in its dtype.
        up_weight: ``[d, r]``, dtype of down_weight.
        alpha: 0-d float32.
    """
    # Contiguous inputs make contiguous results, which is what the fake kernel promises.
    hidden, shadow = hidden.contiguous(), shadow.contiguous()
    delta = (hidden - shadow).to(down_weight.dtype)
    correction = F.linear(F.linear(delta, down_weight), up_weight)
    return hidden + _scaled(correction, alpha).to(hidden.dtype)


class InjectGrads(NamedTuple):
    """Gradients of :func:`shadow_inject`, in the order of its arguments."""

    hidden: Tensor
    shadow: Tensor
    down_weight: Tensor
    up_weight: Tensor
    alpha: Tensor


def shadow_inject_backward(
    grad: Tensor, hidden: Tensor, shadow: Tensor, down_weight: Tensor, up_weight: Tensor, alpha: Tensor
) -> InjectGrads:
    """Gradients from the inputs alone: the [T, r] activations are computed again instead of being kept."""
    width, dtype = hidden.shape[-1], down_weight.dtype
    out = grad.reshape(-1, width).to(dtype)
    delta = (hidden - shadow).reshape(-1, width).to(dtype)
    low = delta @ down_weight.t()
    grad_scaled_low = out @ up_weight
    grad_low = _scaled(grad_scaled_low, alpha).to(dtype)
    grad_delta = (grad_low @ down_weight).reshape(hidden.shape)
    return InjectGrads(
        hidden=grad + grad_delta.to(hidden.dtype),
        shadow=(-grad_delta).to(shadow.dtype),
        down_weight=grad_low.t() @ delta,
        up_weight=_scaled(out.t() @ low, alpha).to(dtype),
        alpha=(grad_scaled_low * low).sum().to(alpha.dtype),
    )


def _scaled(value: Tensor, alpha: Tensor) -> Tensor:
    # In half precision a 0-d alpha would itself be rounded to half (a Python float, as peft has it, is not).
    return alpha * value.to(torch.promote_types(value.dtype, torch.float32))


__all__ = ["InjectGrads", "shadow_inject", "shadow_inject_backward"]
