"""Row 16 of the convolution pass: a new fusion family is one file; the worked example does all that a pass owes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.testing import check_pass

_FILE = Path(__file__).parents[2] / "examples" / "fuse_gate_up.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("fuse_gate_up", _FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_row_16_a_fusion_family_in_one_file_does_all_that_a_pass_owes(case, example):
    one = case("llama", "lm")
    checked = check_pass(example.FuseGateUp(), one.program, n_sites=2)
    assert checked.removed is True
    assert "model.layers.0.mlp.up_proj.weight" not in checked.after.state_dict("graph")
    weights = checked.after.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in one.model.state_dict().items() if name in weights)


def test_row_16_explain_tells_weights_that_became_one(case, example):
    program = lg.optimize(case("llama", "lm").program, [example.FuseGateUp()])
    mlp = "model.layers.0.mlp"
    gate, up = f"{mlp}.gate_proj", f"{mlp}.up_proj"
    state = program.state_dict("graph")
    original = program.state_dict()
    old = ", ".join(f"{path}.weight {list(original[f'{path}.weight'].shape)}" for path in (gate, up))
    change = f"{old} -> {gate}.weight {list(state[f'{gate}.weight'].shape)} (concat-rows)"
    for path in (mlp, gate, up):
        text = program.explain(path)
        assert f"weight    {change}, by fuse-gate-up" in text, text
        assert "by no pass" not in text


def test_row_16_it_is_known_by_name_and_stands_beside_other_passes(case, example):
    one = case("llama", "lm")
    program = lg.optimize(one.program, ["fuse-gate-up", lg.TapOutputs("hidden_states")], verify=True, progress=False)
    expected = one.eager(output_hidden_states=True)
    torch.testing.assert_close(program(**one.inputs).hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-5)


class Gated(nn.Module):
    def __init__(self, bias: bool, tied: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 6, bias=bias), nn.Linear(4, 6, bias=False)
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.gate(x)) * self.up(x)
        return y * self.up.weight.sum() if self.tied else y


@pytest.mark.parametrize(("bias", "tied", "code"), [(True, False, "R1"), (False, True, "R2")])
def test_row_16_its_refusals(example, bias, tied, code):
    program = lg.trace(Gated(bias, tied), (torch.randn(3, 4),), progress=False)
    after = program.apply(example.FuseGateUp())
    assert [refusal[1] for refusal in after.ir.history[-1].refusals] == [code]
    assert after.fingerprint == program.fingerprint
