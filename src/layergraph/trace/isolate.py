"""A private copy of a model's modules around the same tensors, so that tracing can never change the model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from layergraph.errors import InputTypeError, NotSupportedError, TraceError

_QUANTISED = ("bitsandbytes", "gptqmodel", "auto_gptq", "awq", "torchao", "hqq", "aqlm", "eetq", "quanto")
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def isolate(model: nn.Module, *, training: bool = False) -> nn.Module:
    """A copy of the module tree that shares parameters with ``model`` (has its own for training).

    Buffers are copied: a graph may change them when it runs, and the model must not notice. Stray FakeTensors that
    an earlier export left on modules are dropped from the copy.

    Raises:
        InputTypeError: not a module.
        NotSupportedError: offload hooks, quantised bases, tensor classes of their own, compiled, scripted or spread
            modules: named, with the remedy.
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
    if type(model).__name__ in _WRAPPERS:
        raise NotSupportedError(
            "a wrapper that spreads a model over devices cannot be traced",
            found=type(model).__name__,
            do="pass model.module",
        )
    for path, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise NotSupportedError(
                "offload hooks move weights while the model runs, which a graph cannot hold",
                path=path or type(model).__name__,
                found=type(module._hf_hook).__name__,
                do="load without device_map, or remove the hooks with accelerate.hooks.remove_hook_from_submodules",
            )
        _refuse_weights(path, module)


def _refuse_weights(path: str, module: nn.Module) -> None:
    tensors = {**module._parameters, **module._buffers}
    for kind in (type(module), *map(type, tensors.values())):
        if kind.__module__.partition(".")[0] in _QUANTISED or kind.__module__.startswith("torch.ao.nn.quantized"):
            raise NotSupportedError(
                "a quantised base cannot be traced",
                path=path,
                found=f"{kind.__module__}.{kind.__name__}",
                do="load the model unquantised, or dequantize() it first",
                shell="give a folder whose weights are not quantised",
            )
    for name, tensor in tensors.items():
        if tensor is not None and is_traceable_wrapper_subclass(tensor):
            raise NotSupportedError(
                "a weight that is of a tensor class of its own cannot be part of a graph",
                path=f"{path}.{name}" if path else name,
                found=f"{type(tensor).__module__}.{type(tensor).__name__}",
                do="make a plain tensor of it first: dequantize(), full_tensor()",
            )


__all__ = ["isolate"]
