"""Convolution nodes, read once: what :class:`~layergraph.passes.fuse_patch_embed.FusePatchEmbed` matches on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from layergraph.ir.match import arguments

ATEN = torch.ops.aten
CONVOLUTIONS = (
    ATEN.conv1d.default,
    ATEN.conv2d.default,
    ATEN.conv3d.default,
    ATEN.conv1d.padding,
    ATEN.conv2d.padding,
    ATEN.conv3d.padding,
    ATEN.convolution.default,
)
TRANSPOSED = (ATEN.conv_transpose1d.default, ATEN.conv_transpose2d.input, ATEN.conv_transpose3d.input)


@dataclass(frozen=True)
class Conv:
    """A convolution node, read once: ``weight_shape`` is as it was, whatever becomes of the weight since."""

    node: torch.fx.Node
    weight_shape: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def read(cls, node: torch.fx.Node) -> Conv:
        given = arguments(node)
        shape = given["weight"].meta["val"].shape
        n_dims = len(shape) - 2
        padding = given["padding"]
        if padding == "valid":
            padding = 0
        elif padding == "same":
            padding = [int(size > 1) for size in shape[2:]]
        return cls(
            node,
            tuple(int(size) for size in shape),
            tuple(int(size) for size in shape[2:]),
            _per_dim(given["stride"], n_dims),
            _per_dim(padding, n_dims),
            _per_dim(given["dilation"], n_dims),
            int(given["groups"]),
        )

    @property
    def n_dims(self) -> int:
        return len(self.kernel)

    @property
    def n_inputs(self) -> int:
        """Length of one flattened patch of one group."""
        return torch.Size(self.weight_shape[1:]).numel()

    @property
    def n_outputs(self) -> int:
        return self.weight_shape[0]

    @property
    def input(self) -> torch.fx.Node:
        node: torch.fx.Node = arguments(self.node)["input"]
        return node

    @property
    def weight(self) -> torch.fx.Node:
        node: torch.fx.Node = arguments(self.node)["weight"]
        return node

    @property
    def bias(self) -> torch.fx.Node | None:
        bias: torch.fx.Node | None = arguments(self.node)["bias"]
        return bias

    @property
    def is_batched(self) -> bool:
        return self.input.meta["val"].dim() == self.n_dims + 2

    @property
    def covers_input(self) -> bool:
        """Whether each sample is exactly one patch: the input was flattened into patches before."""
        sizes = self.input.meta["val"].shape[-self.n_dims :]
        return self.is_batched and all(
            isinstance(size, int) and size == kernel for size, kernel in zip(sizes, self.kernel, strict=True)
        )


def _per_dim(value: Any, n_dims: int) -> tuple[int, ...]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return tuple(int(item) for item in (values * n_dims if len(values) == 1 else values))


__all__ = ["CONVOLUTIONS", "TRANSPOSED", "Conv"]
