"""Random calls of the three ops, their float64 answers, and the error measure: what every kernel test compares with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from layergraph.kernels import ops

OPS = {"shadow_inject": ops.INJECT, "shadow_update": ops.UPDATE, "shadow_update_inject": ops.UPDATE_INJECT}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}


@dataclasses.dataclass
class Call:
    """Arguments of all three ops on one pair of states."""

    hidden: Tensor
    shadow: Tensor
    update: tuple[Tensor, ...]
    down: Tensor
    up: Tensor
    alpha: Tensor

    def arguments(self, op: str) -> tuple[Tensor, ...]:
        """The arguments of one op, in its order."""
        inject = (self.down, self.up, self.alpha)
        weights = {"shadow_inject": inject, "shadow_update": self.update, "shadow_update_inject": self.update + inject}
        return (self.hidden, self.shadow, *weights[op])

    def to(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The call with every tensor but alpha changed."""
        hidden, shadow, down, up = (change(tensor) for tensor in (self.hidden, self.shadow, self.down, self.up))
        return Call(hidden, shadow, tuple(change(weight) for weight in self.update), down, up, self.alpha)


def make(
    leading: tuple[int, ...] = (2, 5),
    d: int = 64,
    r: int = 8,
    u: int | None = None,
    hidden: torch.dtype = torch.float32,
    weight: torch.dtype = torch.float32,
    shadow: torch.dtype | None = None,
    seed: int = 0,
    requires_grad: bool = False,
) -> Call:
    """A call with weights scaled so that every part of the result matters."""
    u = r if u is None else u
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = weight) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return values.to(dtype).requires_grad_(requires_grad)

    def mlp() -> tuple[Tensor, ...]:
        return draw(u, d, scale=d**-0.5), draw(u, scale=0.1), draw(d, u, scale=u**-0.5), draw(d, scale=0.1)

    return Call(
        hidden=draw(*leading, d, dtype=hidden),
        shadow=draw(*leading, d, dtype=shadow or hidden),
        update=mlp() + mlp(),
        down=draw(r, d, scale=d**-0.5),
        up=draw(d, r, scale=r**-0.5),
        alpha=torch.tensor(0.3),
    )


def exact(call: Call, op: str) -> tuple[Tensor, ...]:
    """The op's results in float64, written out from the paper's equations and sharing no code with the package."""
    wide = call.to(lambda tensor: tensor.detach().double())
    hidden, shadow, alpha = wide.hidden, wide.shadow, call.alpha.double()

    def inject(state: Tensor) -> Tensor:
        return hidden + alpha * ((hidden - state) @ wide.down.T) @ wide.up.T

    if op == "shadow_inject":
        return (inject(shadow),)
    t1, t1b, t2, t2b, g1, g1b, g2, g2b = wide.update
    candidate = F.gelu(hidden @ t1.T + t1b) @ t2.T + t2b
    gate = torch.sigmoid(F.gelu(hidden @ g1.T + g1b) @ g2.T + g2b)
    state = (1 - gate) * shadow + gate * candidate
    return (state,) if op == "shadow_update" else (state, inject(state))


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Results of any of the three ops as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius distance; infinite if anything is not finite, so that NaN never passes."""
    if not torch.isfinite(found.double()).all():
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    return ((found.double() - wanted).norm() / wanted.norm()).item()
