"""A program without a cached graph: the true reason, a remedy that works, and transformers is asked for nothing."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import layergraph as lg
from layergraph.errors import InputTypeError, NotSupportedError
from layergraph.testing.zoo import tiny_model

IDS = torch.tensor([[5, 6, 7]])
SLOW = {"max_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", "lm")


@pytest.fixture(scope="module")
def program(model):
    return lg.trace(model)


def refusal(program, capfd, **options):
    """The error of ``generate``, session and cache, which say the same; nothing else is said meanwhile."""
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NotSupportedError, match="no cached graph") as caught:
            program.generate(IDS, max_new_tokens=2, **options)
    assert capfd.readouterr() == ("", "")
    for make in (program.session, lambda: lg.DualCache(program)):
        with pytest.raises(NotSupportedError) as other:
            make()
        assert str(other.value) == str(caught.value)
    return caught.value


def test_traced_without(model, capfd):
    program = lg.trace(model, cached=False)
    error = refusal(program, capfd)
    assert "cached=False" in error.found and "without cached=False" in error.do
    assert torch.equal(program.generate(IDS, **SLOW), model.generate(IDS, **SLOW))  # the remedy it names


def test_traced_with_inputs_of_ones_own(model, capfd):
    program = lg.trace(model, {"input_ids": torch.randint(0, 90, (2, 7))})
    error = refusal(program, capfd)
    assert "example inputs" in error.found and "use_cache=False" in error.do and "cached=True" in error.do
    assert torch.equal(program.generate(IDS, **SLOW), model.generate(IDS, **SLOW))
    assert "step" in lg.trace(model, cached=True).programs


@pytest.mark.parametrize("verify", [False, True])
def test_dropped_by_a_pass(program, capfd, verify, tmp_path):
    cut = program.apply(lg.TapOutputs("hidden_states", layers=[0], only=True), verify=verify)
    error = refusal(cut, capfd)
    assert error.found == "tap-outputs dropped it"
    if verify:
        assert error.do == "program.remove('tap-outputs') brings it back"
        assert "step" in cut.remove("tap-outputs").programs
    else:
        assert error.do == "start again from the model, without tap-outputs"
    loaded = lg.load(cut.save(tmp_path / "cut"))
    assert "start again from the model" in refusal(loaded, capfd).do
    with pytest.raises(NotSupportedError, match="no cached graph"):  # nor can it write text slowly: it has no logits
        loaded.generate(IDS, **SLOW)


@lg.register_pass
@dataclass(frozen=True)
class ForgetStep(lg.Pass):
    """Adds a copy to the uncached graph, and has no use for the cached one."""

    pass_name: ClassVar[str] = "forget-step"

    def keeps(self, program, graph):
        return graph == "forward"

    def find(self, program, graph):
        return lg.Findings((lg.Site("lm_head", (program[graph].graph.output_node().args[0][0].name,)),))

    def rewrite(self, site, edit):
        node = edit.node(site.nodes[0])
        edit.replace(node, edit.call(torch.ops.aten.clone.default, node, after=node))


def test_dropped_by_a_pass_that_leaves_the_logits(model, program, capfd):
    forgetful = program.apply(ForgetStep())
    error = refusal(forgetful, capfd)
    assert error.found == "forget-step dropped it"
    assert "program.remove('forget-step') brings it back" in error.do and "use_cache=False" in error.do
    assert "step" in forgetful.remove("forget-step").programs
    assert torch.equal(forgetful.generate(IDS, **SLOW), model.generate(IDS, **SLOW))


def test_a_model_that_writes_no_text(capfd):
    program = lg.trace(tiny_model("bert"))
    for options in ({}, {"use_cache": False}):
        error = refusal(program, capfd, **options)
        assert "does not generate text" in error.found and "ForCausalLM" in error.do
    plain = lg.trace(torch.nn.Linear(3, 3), torch.randn(2, 3))
    assert "Linear does not write text" in refusal_of_cache(plain).found


def refusal_of_cache(program):
    with pytest.raises(NotSupportedError, match="no cached graph") as caught:
        lg.DualCache(program)
    return caught.value


def test_a_cache_of_something_else():
    with pytest.raises(InputTypeError, match="made for a program"):
        lg.DualCache(torch.nn.Linear(2, 2))
