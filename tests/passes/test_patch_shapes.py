"""Shapes at the edge: one sample without a batch, and a batch of none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import layergraph as lg


class Patches(nn.Module):
    def __init__(self, conv: nn.Module, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv = conv
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.conv(x))


def fused(model: nn.Module, x: torch.Tensor) -> lg.Program:
    return lg.trace(model, (x,)).apply(lg.FusePatchEmbed(conv2d=True), strict=True)


@pytest.mark.parametrize("after", [lambda y: y.flatten(2).transpose(1, 2), lambda y: y.transpose(-1, -2)])
@pytest.mark.parametrize(("conv", "size"), [(nn.Conv2d, (4, 8, 8)), (nn.Conv3d, (4, 8, 8, 8))])
def test_without_a_batch_flatten_means_other_dimensions(conv: type[nn.Module], size: tuple[int, ...], after) -> None:
    model, x = Patches(conv(4, 6, 2, stride=2), after).eval(), torch.randn(size)
    torch.testing.assert_close(fused(model, x)(x), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("conv", "size"), [(nn.Conv1d, (8,)), (nn.Conv2d, (8, 8)), (nn.Conv3d, (8, 8, 8))])
def test_a_batch_of_none(conv: type[nn.Module], size: tuple[int, ...]) -> None:
    model = Patches(conv(4, 6, 2, stride=2), lambda y: y.flatten(2).transpose(1, 2)).eval()
    program = fused(model, torch.randn(3, 4, *size))
    for n in (0, 1, 5):
        x = torch.randn(n, 4, *size)
        torch.testing.assert_close(program(x), model(x).detach(), rtol=1e-5, atol=1e-5)
