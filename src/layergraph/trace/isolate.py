"""A private copy of a model's modules around the same tensors, so that tracing can never change the model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from layergraph.errors import InputTypeError, NotSupportedError, TraceError

_QUANTISED = ("bitsandbytes", "gptqmodel", "auto_gptq", "awq", "torchao", "hqq", "aqlm", "eetq", "quanto")


def isolate(model: nn.Module, *, training: bool = False) -> nn.Module:
    """A copy of the module tree that shares parameters with ``model`` (has its own for training).

    Buffers are copied: a graph may change them when it runs, and the model must not notice. Stray FakeTensors that
    an earlier export left on modules are dropped from the copy.

    Raises:
        InputTypeError: not a module.
        NotSupportedError: offload hooks, quantised bases, compiled or scripted modules: named, with the remedy.
        TraceError: some attribute cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            "only an nn.Module can be traced", found=type(model).__name__, do="pass the model itself, not a path or id"
        )
    _refuse(model)
    memo: dict[int, Any] = {}
    if not training:
        memo = {id(tensor): tensor for tensor in model.parameters()}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, FakeTensor):
                memo[id(value)] = None
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be copied, and tracing works on a copy",
            found=f"{type(error).__name__}: {error}",
            do="remove what cannot be copied (locks, handles, generators) from the model's attributes",
        ) from error
    return twin.train(training)


def _refuse(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise NotSupportedError("a scripted module has no Python to trace", do="pass the nn.Module it was made from")
    if type(model).__name__ == "OptimizedModule":
        raise NotSupportedError("a compiled module cannot be traced", do="pass model._orig_mod")
    for path, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise NotSupportedError(
                "offload hooks move weights while the model runs, which a graph cannot hold",
                path=path or type(model).__name__,
                found=type(module._hf_hook).__name__,
                do="load without device_map, or remove the hooks with accelerate.hooks.remove_hook_from_submodules",
            )
        origin = type(module).__module__.partition(".")[0]
        if origin in _QUANTISED:
            raise NotSupportedError(
                "a quantised base cannot be traced",
                path=path,
                found=f"{type(module).__module__}.{type(module).__name__}",
                do="load the model unquantised, or dequantize() it first",
                shell="give a folder whose weights are not quantised",
            )


__all__ = ["isolate"]
