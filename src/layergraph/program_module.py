"""A program as an ``nn.Module``, to stand where the traced module stood."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layergraph.errors import NotFoundError

if TYPE_CHECKING:
    from layergraph.program import Program


class ProgramModule(nn.Module):
    """Runs a program; parameters and buffers are registered under the graph's names.

    ``state_dict`` gives them in the model's own layout, and ``load_state_dict`` takes that: a model with such a module
    inside saves checkpoints as before.

    What code around the original read from it (``dtype``, ``device``, ``config``, plain attributes such as
    ``spatial_merge_size``) is here too. Moved or cast, alone or with the model around it, it becomes what
    :meth:`layergraph.Program.to` gives.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._hold(program)
        for name, value in program.ir.model.attributes.items():
            if not hasattr(self, name):
                setattr(self, name, value)
        self.train(program.ir.model.training)
        self.register_state_dict_post_hook(_to_original)
        self.register_load_state_dict_pre_hook(_to_rewritten)

    def _hold(self, program: Program) -> None:
        """Run ``program``, its parameters and buffers registered."""
        object.__setattr__(self, "program", program)
        for name, tensor in program.ir.state_dict.items():
            owner = self._owner(name)
            leaf = name.rpartition(".")[2]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ProgramModule:
        """What ``to``, ``cuda``, ``half`` and the like come down to: a graph moves as a whole, or not at all."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (probe.dtype, probe.device) == (self.dtype, self.device):
            super()._apply(fn, recurse)
        else:
            self._hold(self.program.to(probe.device, probe.dtype, progress=False))
        return self

    def _owner(self, name: str) -> nn.Module:
        owner: nn.Module = self
        for part in name.split(".")[:-1]:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        return owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating-point parameter, as transformers has it."""
        return next(tensor.dtype for tensor in self.parameters() if tensor.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def config(self) -> Any:
        """The traced model's config, as an object of its own class."""
        model = self.program.ir.model
        if model.config is None or model.config_class is None:
            raise NotFoundError("the traced module had no config", do="read what you need from the model itself")
        module, _, name = model.config_class.partition(":")
        if module.partition(".")[0] != "transformers" and module not in sys.modules:
            # The name may come from a folder, which must not choose what is imported.
            raise NotFoundError(
                f"the class of the traced module's config, {name}, is not loaded",
                do=f"import {module} first, if you trust it",
            )
        return getattr(importlib.import_module(module), name).from_dict(dict(model.config))


def _to_original(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    _mapped(state, prefix, module.program.ir.weights.to_original)


def _to_rewritten(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    _mapped(state, prefix, module.program.ir.weights.to_rewritten)


def _mapped(state: dict[str, Any], prefix: str, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Replace the entries under ``prefix`` by what ``change`` makes of them."""
    own = {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
    made = change(own)
    for name in own:
        if name not in made:
            del state[prefix + name]
    state.update((prefix + name, tensor) for name, tensor in made.items() if own.get(name) is not tensor)


__all__ = ["ProgramModule"]
