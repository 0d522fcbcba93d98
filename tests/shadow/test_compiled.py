"""A switch of adapter recompiles nothing: under torch.compile, and in a package compiled ahead of time."""

from __future__ import annotations

import pytest
import torch
from shadow_oracle import padded_batch
from torch._dynamo.testing import CompileCounterWithBackend

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
