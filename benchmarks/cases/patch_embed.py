"""Convolution against the fused program against the bare product."""

from __future__ import annotations

import functools

import torch
from registry import Case, Forms, register
from torch import nn
from torch.nn import functional

import layergraph as lg

# Patches, channels, kernel, features
FLAT = {"qwen2_vl": (1024, 3, (2, 14, 14), 1280), "qwen3_vl": (1024, 3, (2, 16, 16), 1152)}
DTYPES = (torch.float32, torch.bfloat16)


class Flat(nn.Module):
    """As Qwen2-VL has it: patches cut before, one convolution over each."""

    def __init__(self, channels: int, kernel: tuple[int, ...], features: int) -> None:
        super().__init__()
        self.shape = (-1, channels, *kernel)
        self.features = features
        self.proj = nn.Conv3d(channels, features, kernel, stride=kernel, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x.view(self.shape)).view(-1, self.features)


class Clips(nn.Module):
    """As VideoMAE has it: clips of 5 dimensions in, tokens out."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, 768, (2, 16, 16), stride=(2, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x.permute(0, 2, 1, 3, 4)).flatten(2).transpose(1, 2)


def _program(model: nn.Module, x: torch.Tensor):
    traced = lg.trace(model, {"x": x}, dynamic={"x": {0: "batch"}} if x.shape[0] > 1 else False, progress=False)
    program = traced.apply(lg.FusePatchEmbed(), strict=True)
    return program.exported.graph_module, list(program.state_dict("graph").values())


def _flat(name: str, dtype: torch.dtype) -> Forms:
    patches, channels, kernel, features = FLAT[name]
    model = Flat(channels, kernel, features).to(dtype).eval()
    x = torch.randn(patches, channels * kernel[0] * kernel[1] * kernel[2], dtype=dtype)
    graph, weights = _program(model, x)
    matrix = model.proj.weight.detach().reshape(features, -1)
    return {
        "conv3d": lambda: model(x),
        "fused": lambda: graph(*weights, x),
        "linear": lambda: functional.linear(x, matrix),
    }


def _clips(dtype: torch.dtype) -> Forms:
    model = Clips().to(dtype).eval()
    x = torch.randn(1, 16, 3, 224, 224, dtype=dtype)
    graph, weights = _program(model, x)
    matrix, bias = model.proj.weight.detach().reshape(768, -1), model.proj.bias.detach()
    rows = torch.randn(8 * 14 * 14, 1536, dtype=dtype)
    cut = x.permute(0, 2, 1, 3, 4).reshape(1, 3, 8, 2, 14, 16, 14, 16).permute(0, 2, 4, 6, 1, 3, 5, 7)

    def copy_and_linear() -> torch.Tensor:
        cut.contiguous()
        return functional.linear(rows, matrix, bias)

    return {"conv3d": lambda: model(x), "fused": lambda: graph(*weights, x), "copy + linear": copy_and_linear}


for _dtype in DTYPES:
    _text = str(_dtype).removeprefix("torch.")
    for _name in FLAT:
        register(
            Case(
                f"patch-embed/{_name}-{_text}",
                functools.partial(_flat, _name, _dtype),
                (("fused", "linear"), ("conv3d", "linear")),
                "fused at most 1.05 times the bare linear",
            )
        )
    register(
        Case(
            f"patch-embed/videomae-{_text}",
            functools.partial(_clips, _dtype),
            (("fused", "copy + linear"), ("conv3d", "copy + linear")),
            "fused at most 1.15 times linear plus one copy",
        )
    )
