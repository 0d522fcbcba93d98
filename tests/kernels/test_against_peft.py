"""Issue 4: the ops against ``peft.tuners.shadow.layers.ShadowLayer`` itself, on random weights."""

from __future__ import annotations

import kernel_problems as problems
import pytest
import torch

pytest.importorskip("peft")
from peft.tuners.shadow.config import ShadowConfig
from peft.tuners.shadow.layers import ShadowLayer

from layergraph.kernels import ops

f32, bf16 = torch.float32, torch.bfloat16


class Block(torch.nn.Module):
    """A stand-in decoder block."""

    def __init__(self, d):
        super().__init__()
        self.linear = torch.nn.Linear(d, d)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))


def layer(d=64, r=8, u=20, dtype=f32, seed=0):
    torch.manual_seed(seed)
    config = ShadowConfig(r=r, update_hidden_size=u, shadow_alpha=0.3, shadow_dropout=0.0, init_weights=False)
    made = ShadowLayer(Block(d), "default", config, hidden_size=d)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.startswith("shadow_"):
                scale = 0.1 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn_like(parameter) * scale)
    return made.to(dtype)


def weights(made):
    """The layer's adapter as the ops' arguments."""
    transform, gate = made.shadow_update_transform["default"], made.shadow_update_gate["default"]
    update = [getattr(mlp[index], kind) for mlp in (transform, gate) for index in (0, 2) for kind in ("weight", "bias")]
    inject = [made.shadow_down["default"].weight, made.shadow_up["default"].weight]
    return tuple(update), (*inject, torch.tensor(made.shadow_alpha["default"]))


def states(d, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, 7, d, generator=generator).to(dtype) for _ in range(2))


def both(made, hidden, shadow):
    """(inject, update, the joined op's two) by us, and the same by peft."""
    update, inject = weights(made)
    state = made.shadow_update(hidden, shadow, "default")
    theirs = (made.shadow_inject(hidden, shadow, "default"), state, state, made.shadow_inject(hidden, state, "default"))
    ours = (
        ops.shadow_inject(hidden, shadow, *inject),
        ops.shadow_update(hidden, shadow, *update),
        *ops.shadow_update_inject(hidden, shadow, *update, *inject),
    )
    return ours, theirs


@pytest.mark.parametrize("d,r,u", [(64, 8, 8), (97, 3, 5), (200, 16, 40), (130, 1, 64)])
def test_float32_within_1e_6_relative(d, r, u):
    made = layer(d, r, u)
    with torch.no_grad():
        ours, theirs = both(made, *states(d, f32))
    for found, wanted in zip(ours, theirs, strict=True):
        assert problems.error(found, wanted.double()) <= 1e-6


@pytest.mark.parametrize("weight", [bf16, f32], ids=["bf16 adapter", "f32 adapter"])
@pytest.mark.parametrize("d,r,u", [(64, 8, 8), (200, 16, 40)])
def test_bfloat16_no_worse_than_pefts_own_error(d, r, u, weight):
    made = layer(d, r, u, dtype=weight)
    hidden, shadow = states(d, bf16)
    update, inject = weights(made)
    exact = problems.Call(hidden, shadow, update, *inject)
    wanted = [problems.exact(exact, op) for op in problems.OPS]
    with torch.no_grad():
        ours, theirs = both(made, hidden, shadow)
    for found, peft, right in zip(ours, theirs, (wanted[0][0], wanted[1][0], *wanted[2]), strict=True):
        assert problems.error(found, right) <= problems.error(peft, right)


class Ours(torch.nn.Module):
    """Two peft layers run through the ops, the second op joined with the first's update."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden, shadow):
        update, inject = weights(self.first)
        next_update, next_inject = weights(self.second)
        hidden = self.first.base_layer(ops.shadow_inject(hidden, shadow, *inject))
        shadow, hidden = ops.shadow_update_inject(hidden, shadow, *update, *next_inject)
        hidden = self.second.base_layer(hidden)
        return hidden, ops.shadow_update(hidden, shadow, *next_update)


def test_one_training_step_gives_pefts_gradients():
    first, second = layer(seed=0), layer(seed=1)

    def peft(hidden, shadow):
        for made in (first, second):
            hidden = made.base_layer(made.shadow_inject(hidden, shadow, "default"))
            shadow = made.shadow_update(hidden, shadow, "default")
        return hidden, shadow

    inputs = [state.requires_grad_(True) for state in states(64, f32)]
    names, parameters = zip(*[*first.named_parameters(), *second.named_parameters()], strict=True)
    grads = []
    for model in (Ours(first, second), peft):
        hidden, shadow = model(*inputs)
        loss = hidden.square().mean() + (shadow * torch.linspace(-1, 1, 64)).mean()
        grads.append(torch.autograd.grad(loss, [*inputs, *parameters]))
    assert len(names) == 2 * (10 + 2)
    for name, ours, theirs in zip(["hidden", "shadow", *names], *grads, strict=True):
        assert theirs.norm() > 0 and problems.error(ours, theirs.double()) <= 1e-5, name
