"""The three shadow ops: schemas, fake kernels, gradients, and the choice of backend.

Each op is a ``torch.library.triton_op`` whose body branches on the device. On the CPU it runs the reference, so export
keeps one node while ``torch.compile`` and AOTInductor see plain aten and a package needs nothing of ours at run time.
On a GPU it launches the Triton kernels. Importing this module imports no Triton of ours, and needs none installed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from layergraph.kernels.common.checks import check_arguments, check_types
from layergraph.kernels.shadow_inject import reference as inject_reference
from layergraph.kernels.shadow_update import reference as update_reference
from layergraph.kernels.shadow_update_inject import reference as joined_reference
from layergraph.kernels.tuning import MAX_RANK

UPDATE_WEIGHTS = (
    "t1_weight",
    "t1_bias",
    "t2_weight",
    "t2_bias",
    "g1_weight",
    "g1_bias",
    "g2_weight",
    "g2_bias",
)
INJECT_WEIGHTS = ("down_weight", "up_weight")
_KERNEL_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def uses_kernels(hidden: Tensor, shadow: Tensor, *weights: Tensor) -> bool:
    """True where a call with these tensors launches Triton kernels, False where it runs the reference.

    The reference serves every device but CUDA and ROCm ones, float64, installations without Triton, and bottlenecks
    wider than :data:`layergraph.kernels.tuning.MAX_RANK`, where library matmuls are the better tool.

    Args:
        hidden, shadow: ``[..., d]``.
        weights: the op's matrices of shape ``[r, d]`` or ``[u, d]``.
    """
    if hidden.device.type != "cuda" or not _has_triton():
        return False
    if not _KERNEL_DTYPES.issuperset(tensor.dtype for tensor in (hidden, shadow, *weights)):
        return False
    return all(weight.shape[0] <= MAX_RANK for weight in weights)


def _load_kernels(*tensors: Tensor) -> None:
    # Loading a kernel file tells torch's compile cache which sources the op stands for; it must know them before it
    # computes a key, hence from the fake kernel. Otherwise a later version of this package could hit an old entry.
    if uses_kernels(*tensors):
        importlib.import_module("layergraph.kernels.shadow_update_inject.triton")


# ---- shadow_inject -------------------------------------------------------------------------------------------------
def _inject(hidden: Tensor, shadow: Tensor, down_weight: Tensor, up_weight: Tensor, alpha: Tensor) -> Tensor:
    _check_inject(hidden, shadow, down_weight, up_weight, alpha)
    if uses_kernels(hidden, shadow, down_weight):
        from layergraph.kernels.shadow_inject.triton import launch

        return launch(hidden, shadow, down_weight, up_weight, alpha)
    return inject_reference.shadow_inject(hidden, shadow, down_weight, up_weight, alpha)


def _check_inject(hidden: Tensor, shadow: Tensor, down_weight: Tensor, up_weight: Tensor, alpha: Tensor) -> None:
    adapter = {"down_weight": down_weight, "up_weight": up_weight}
    check_arguments("shadow_inject", hidden, shadow, adapter, alpha)


def _inject_fake(hidden: Tensor, shadow: Tensor, down_weight: Tensor, up_weight: Tensor, alpha: Tensor) -> Tensor:
    _check_inject(hidden, shadow, down_weight, up_weight, alpha)
    _load_kernels(hidden, shadow, down_weight)
    return hidden.new_empty(hidden.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _inject_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return tuple(inject_reference.shadow_inject_backward(grad, *ctx.saved_tensors))


# ---- shadow_update -------------------------------------------------------------------------------------------------
def _update(
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
    weights = (t1_weight, t1_bias, t2_weight, t2_bias, g1_weight, g1_bias, g2_weight, g2_bias)
    _check_update(hidden, shadow, *weights)
    if uses_kernels(hidden, shadow, t1_weight):
        from layergraph.kernels.shadow_update.triton import launch

        return launch(hidden, shadow, *weights)
    return update_reference.shadow_update(hidden, shadow, *weights)


def _check_update(hidden: Tensor, shadow: Tensor, *weights: Tensor) -> None:
    check_arguments("shadow_update", hidden, shadow, dict(zip(UPDATE_WEIGHTS, weights, strict=True)), None)


def _update_fake(hidden: Tensor, shadow: Tensor, *weights: Tensor) -> Tensor:
    _check_update(hidden, shadow, *weights)
    _load_kernels(hidden, shadow, weights[0])
    return shadow.new_empty(shadow.shape)


def _update_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return tuple(update_reference.shadow_update_backward(grad, *ctx.saved_tensors))


# ---- shadow_update_inject ------------------------------------------------------------------------------------------
def _update_inject(
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
    update = (t1_weight, t1_bias, t2_weight, t2_bias, g1_weight, g1_bias, g2_weight, g2_bias)
    _check_update_inject(hidden, shadow, *update, down_weight, up_weight, alpha)
    if uses_kernels(hidden, shadow, t1_weight, down_weight):
        from layergraph.kernels.shadow_update_inject.triton import launch

        return launch(hidden, shadow, *update, down_weight, up_weight, alpha)
    return joined_reference.shadow_update_inject(hidden, shadow, *update, down_weight, up_weight, alpha)


def _check_update_inject(hidden: Tensor, shadow: Tensor, *rest: Tensor) -> None:
    *weights, alpha = rest
    adapter = dict(zip(UPDATE_WEIGHTS + INJECT_WEIGHTS, weights, strict=True))
    check_arguments("shadow_update_inject", hidden, shadow, adapter, alpha)


def _update_inject_fake(hidden: Tensor, shadow: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    _check_update_inject(hidden, shadow, *rest)
    _load_kernels(hidden, shadow, rest[0], rest[8])
    return shadow.new_empty(shadow.shape), hidden.new_empty(hidden.shape)


def _keep_inputs_and_state(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[0])


def _update_inject_backward(ctx: Any, grad_shadow: Tensor, grad_hidden: Tensor) -> tuple[Tensor, ...]:
    hidden, shadow, *weights, down_weight, up_weight, alpha, new_shadow = ctx.saved_tensors
    update, inject = joined_reference.shadow_update_inject_backward(
        grad_shadow, grad_hidden, new_shadow, hidden, shadow, tuple(weights), down_weight, up_weight, alpha
    )
    return (
        update.hidden + inject.hidden,
        *update[1:],
        inject.down_weight,
        inject.up_weight,
        inject.alpha,
    )


# ---- registration --------------------------------------------------------------------------------------------------
def _register(name: str, body: Callable[..., Any], fake: Callable[..., Any], backward: Any, setup: Any) -> Any:
    op = triton_op(f"layergraph::{name}", body, mutates_args={})
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup)
    return getattr(torch.ops.layergraph, name).default


INJECT = _register("shadow_inject", _inject, _inject_fake, _inject_backward, _keep_inputs)
UPDATE = _register("shadow_update", _update, _update_fake, _update_backward, _keep_inputs)
UPDATE_INJECT = _register(
    "shadow_update_inject", _update_inject, _update_inject_fake, _update_inject_backward, _keep_inputs_and_state
)

#: Plain aten for each op, to pass to ``ExportedProgram.run_decompositions``: for ONNX, ExecuTorch, and serving where
#: this package is not installed.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    INJECT: inject_reference.shadow_inject,
    UPDATE: update_reference.shadow_update,
    UPDATE_INJECT: joined_reference.shadow_update_inject,
}


# ---- what callers use ----------------------------------------------------------------------------------------------
def shadow_inject(hidden: Tensor, shadow: Tensor, down_weight: Tensor, up_weight: Tensor, alpha: Tensor) -> Tensor:
    """``hidden + alpha * up(down(hidden - shadow))`` before a block (arXiv 2604.19254, Eq. 2-4).

    The semantics are those of ``peft.tuners.shadow.layers.ShadowLayer.shadow_inject`` without dropout, which belongs
    outside the op.

    Args:
        hidden: ``[..., d]``, any strides; float64 runs the reference on every device.
        shadow: shape of hidden; its dtype may differ.
        down_weight: ``[r, d]``, r from 1 up; may be float32 on bfloat16 hidden states, as peft has it.
        up_weight: ``[d, r]``, dtype of down_weight.
        alpha: 0-d float32 on hidden's device. A tensor, not a number, so that one graph serves every adapter.

    Returns:
        Contiguous, shape and dtype of hidden.

    Raises:
        InputError: a shape, dtype or device is wrong; it names the argument, what was found and what was expected.
        InputTypeError: an argument is no tensor.
    """
    check_types("shadow_inject", locals())
    return INJECT(hidden, shadow, down_weight, up_weight, alpha)


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
    """``(1 - g) * shadow + g * T(hidden)``, ``g = sigmoid(G(hidden))``, after a block (arXiv 2604.19254, Eq. 5-7).

    The semantics are those of ``peft.tuners.shadow.layers.ShadowLayer.shadow_update``.

    Args:
        hidden: ``[..., d]``, the block's output, any strides.
        shadow: shape of hidden; its dtype may differ.
        t1_weight, t1_bias: ``[u, d]`` and ``[u]``, first Linear of T; u need not be r.
        t2_weight, t2_bias: ``[d, u]`` and ``[d]``, second Linear of T.
        g1_weight, g1_bias, g2_weight, g2_bias: the same for G. All eight share one dtype.

    Returns:
        Contiguous, shape and dtype of shadow.

    Raises:
        InputError: a shape, dtype or device is wrong; it names the argument, what was found and what was expected.
        InputTypeError: an argument is no tensor.
    """
    check_types("shadow_update", locals())
    return UPDATE(hidden, shadow, t1_weight, t1_bias, t2_weight, t2_bias, g1_weight, g1_bias, g2_weight, g2_bias)


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
    """The update after layer l and the inject before layer l + 1 in one: hidden and shadow are read once.

    Args:
        hidden, shadow: as for :func:`shadow_update`.
        t1_weight ... g2_bias: the update weights of layer l, as for :func:`shadow_update`.
        down_weight, up_weight, alpha: the inject of layer l + 1, as for :func:`shadow_inject`; dtype of t1_weight.

    Returns:
        ``(shadow', hidden')``, contiguous, each in the dtype of the argument it replaces.

    Raises:
        InputError: a shape, dtype or device is wrong; it names the argument, what was found and what was expected.
        InputTypeError: an argument is no tensor.
    """
    check_types("shadow_update_inject", locals())
    return UPDATE_INJECT(
        hidden,
        shadow,
        t1_weight,
        t1_bias,
        t2_weight,
        t2_bias,
        g1_weight,
        g1_bias,
        g2_weight,
        g2_bias,
        down_weight,
        up_weight,
        alpha,
    )


__all__ = [
    "DECOMPOSITIONS",
    "INJECT",
    "UPDATE",
    "UPDATE_INJECT",
    "shadow_inject",
    "shadow_update",
    "shadow_update_inject",
    "uses_kernels",
]
