"""What shadow_update_inject means: shadow_update, then shadow_inject of the state it returns."""

from __future__ import annotations

from torch import Tensor

from layergraph.kernels.shadow_inject.reference import InjectGrads, shadow_inject, shadow_inject_backward
from layergraph.kernels.shadow_update.reference import UpdateGrads, shadow_update, shadow_update_backward


def shadow_update_inject(
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
    down_weight: Tensor,
    up_weight: Tensor,
    alpha: Tensor,
) -> tuple[Tensor, Tensor]:
    """``(shadow', hidden')``: the state after layer l, and the input of layer l + 1 into which it was injected.

    Shapes and dtypes are those of the two ops; the inject sees shadow' as it is returned, rounded to shadow's dtype.
    """
    new_shadow = shadow_update(
        hidden, shadow, t1_weight, t1_bias, t2_weight, t2_bias, g1_weight, g1_bias, g2_weight, g2_bias
    )
    return new_shadow, shadow_inject(hidden, new_shadow, down_weight, up_weight, alpha)


def shadow_update_inject_backward(
    grad_shadow: Tensor,
    grad_hidden: Tensor,
    new_shadow: Tensor,
    hidden: Tensor,
    shadow: Tensor,
    update_weights: tuple[Tensor, ...],
    down_weight: Tensor,
    up_weight: Tensor,
    alpha: Tensor,
) -> tuple[UpdateGrads, InjectGrads]:
    """Gradients of both halves; hidden's is the sum of the two ``hidden`` fields.

    Args:
        grad_shadow, grad_hidden: gradients of the two results.
        new_shadow: the first result; the caller holds it anyway, so keeping it costs nothing.
        update_weights: the eight tensors of the update, in the op's order.
    """
    inject = shadow_inject_backward(grad_hidden, hidden, new_shadow, down_weight, up_weight, alpha)
    update = shadow_update_backward(grad_shadow + inject.shadow, hidden, shadow, *update_weights)
    return update, inject


__all__ = ["shadow_update_inject", "shadow_update_inject_backward"]
