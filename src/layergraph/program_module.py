"""A program as an ``nn.Module``, to stand where the traced module stood."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layergraph.errors import NotFoundError

if TYPE_CHECKING:
    from layergraph.program import Program


class ProgramModule(nn.Module):
    """Runs a program; parameters and buffers are registered under the graph's names.

    What code around the original read from it (``dtype``, ``device``, ``config``, plain attributes such as
    ``spatial_merge_size``) is here too. Moving or casting it does not move the graph: trace again for another device.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        object.__setattr__(self, "program", program)
        seen: dict[int, nn.Parameter] = {}
        for name, tensor in program.ir.state_dict.items():
            owner = self._owner(name)
            leaf = name.rpartition(".")[2]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, seen.setdefault(id(tensor), tensor))
            else:
                owner.register_buffer(leaf, tensor)
        for name, value in program.ir.model.attributes.items():
            if not hasattr(self, name):
                setattr(self, name, value)
        self.train(program.ir.model.training)

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
        return getattr(importlib.import_module(module), name).from_dict(dict(model.config))


__all__ = ["ProgramModule"]
