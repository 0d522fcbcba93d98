"""Shared by all tests: few threads (several workers share two cores), no network, quiet libraries."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from torch import nn

import layergraph as lg

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """Repeated blocks and a buffer of each kind: the smallest model that has all a graph can hold."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.register_buffer("scale", torch.full((width,), 2.0))
        self.register_buffer("shift", torch.full((width,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.shift


@pytest.fixture(scope="session")
def stack_program() -> lg.Program:
    torch.manual_seed(0)
    return lg.trace(Stack().eval(), {"x": torch.randn(2, 3, 8)})
