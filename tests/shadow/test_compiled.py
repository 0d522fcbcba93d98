"""A switch of adapter recompiles nothing: under torch.compile, and in a package compiled ahead of time."""

from __future__ import annotations

import pytest
import torch
from shadow_oracle import padded_batch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import layergraph as lg

INPUTS = padded_batch()


@pytest.fixture
def two(twins):
    program = twins.fresh()
    program.add_adapter(twins.folders["second"], "second")
    wanted = {name: program(**INPUTS, adapter=name).logits for name in ("first", "second")}
    return program, wanted


@pytest.mark.parametrize("backend", ("eager", pytest.param("inductor", marks=pytest.mark.slow)))
def test_torch_compile_recompiles_nothing(two, backend):
    program, wanted = two
    counter = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    compiled = torch.compile(program.exported.module(), backend=counter, dynamic=True)
    with torch.no_grad():
        for turn in range(20):
            name = ("first", "second")[turn % 2]
            found = compiled(**INPUTS, **program.adapter_inputs(name))["logits"]
            torch.testing.assert_close(found, wanted[name], atol=1e-5, rtol=0)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_c6_the_dual_cache_under_torch_compile(twins):
    """Prefill and decode of both halves; another adapter, another batch and a larger cache compile nothing more."""
    program = lg.trace(twins.base).apply(lg.WeaveShadow(twins.folders["first"], name="first"))
    program.add_adapter(twins.folders["second"], "second")
    torch._dynamo.reset()
    counters.clear()
    given = {**INPUTS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    program.generate(**given, engine="inductor", max_new_tokens=4)
    program.session(engine="inductor").step(INPUTS["input_ids"], logits_to_keep=0)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 3  # a prompt with its last logits, one token, a prompt with all logits
    for turn in range(100):
        name = ("first", "second")[turn % 2]
        program.set_adapter(name)
        if turn < 4:
            wanted = program.generate(**given, max_new_tokens=80)  # past a bucket of 64 slots
            assert torch.equal(program.generate(**given, engine="inductor", max_new_tokens=80), wanted)
        session = program.session(engine="inductor")
        logits = session.step(INPUTS["input_ids"][:2], logits_to_keep=0)["logits"]
        eager = program.session().step(INPUTS["input_ids"][:2], logits_to_keep=0)["logits"]
        torch.testing.assert_close(logits, eager, atol=1e-5, rtol=0)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_one_package_serves_two_adapters(two, tmp_path):
    program, wanted = two
    path = torch._inductor.aoti_compile_and_package(program.exported, package_path=str(tmp_path / "woven.pt2"))
    runner = torch._inductor.aoti_load_package(path)
    for name in ("first", "second", "first"):
        found = runner(**INPUTS, **program.adapter_inputs(name))["logits"]
        torch.testing.assert_close(found, wanted[name], atol=1e-5, rtol=0)
    other = padded_batch(3, rows=2, length=12)
    found = runner(**other, **program.adapter_inputs("second"))["logits"]
    torch.testing.assert_close(found, program(**other, adapter="second").logits, atol=1e-5, rtol=0)
