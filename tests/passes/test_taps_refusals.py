"""What a tap leaves alone, with its reason: R1 to R3, each beside a twin that is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import layergraph as lg


class Branches(nn.Module):
    """``maybe`` returns a tensor and None; ``aside`` and ``chosen`` compute what nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.maybe, self.aside, self.chosen, self.head = Maybe(), nn.Linear(4, 4), Chosen(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.maybe(x)
        self.aside(hidden)
        self.chosen(hidden)
        return self.head(hidden)


class Maybe(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x * 2, None


class Chosen(nn.Module):
    """Not plain ops: a branch on data is a graph within the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


@pytest.fixture(scope="module")
def branches():
    model, x = Branches().eval(), torch.randn(3, 4)
    return model, x, lg.trace(model, x, progress=False)


def refusals(program, *args, **options):
    (record,) = program.apply(lg.TapOutputs(*args, **options)).ir.history
    return [(path, code) for path, code, _ in record.refusals]


def test_r1_none_is_left_alone_and_its_neighbour_taken(branches):
    _, x, program = branches
    assert refusals(program, "maybe", index=1) == [("maybe", "R1")]
    assert torch.equal(program.apply(lg.TapOutputs("maybe", index=0))(x).maybe, x * 2)
    with pytest.raises(lg.LayerGraphError, match="R1"):
        program.apply(lg.TapOutputs("maybe", index=1), strict=True)


def test_r2_an_unused_value_is_brought_back_if_plain_ops_compute_it(branches):
    model, x, program = branches
    assert torch.equal(program.apply(lg.TapOutputs("aside"))(x).aside, model.aside(x * 2))
    assert refusals(program, "chosen") == [("chosen", "R2")]


def test_r3_what_is_returned_already_under_that_name(branches):
    _, x, program = branches
    once = program.apply(lg.TapOutputs("maybe", index=0))
    again = once.apply(lg.TapOutputs("maybe", index=0))
    assert [code for _, code, _ in again.ir.history[-1].refusals] == ["R3"]
    assert torch.equal(again(x).maybe, x * 2) and again.fingerprint == once.fingerprint
    other = once.apply(lg.TapOutputs("maybe", index=0, name="doubled"))
    assert torch.equal(other(x).doubled[0] if isinstance(other(x).doubled, tuple) else other(x).doubled, x * 2)
