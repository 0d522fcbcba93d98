"""spec/5 tests, kind 2: shipped configurations compiled for four targets without a GPU. Run by test_isolated.py.

By hand: ``python -m pytest tests/kernels/isolated/compile_targets.py -s`` prints the tables.
"""

# ruff: noqa: E402 -- the environment is set before what reads it is imported
from __future__ import annotations

import dataclasses
import os

assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter must not be on in this process"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # today's default, said aloud so that Triton does not warn

import kernel_resources as resources
import pytest

from layergraph.kernels import tuning

PEFT_DEFAULT = resources.DTYPES[:1]


@pytest.mark.parametrize("arch", resources.TARGETS)
def test_shipped_configurations_fit(arch):
    """No spills, shared memory within the target's limit, and matrix instructions wherever there are rows for them."""
    check(arch, resources.DTYPES[:2] if arch == "sm_90" else PEFT_DEFAULT)


@pytest.mark.slow
@pytest.mark.parametrize("arch", resources.TARGETS)
def test_shipped_configurations_fit_in_every_dtype(arch):
    check(arch, resources.DTYPES)


def check(arch, dtypes):
    results = resources.measure(resources.shipped_jobs(arch, dtypes))
    print(f"\n{arch}\n{resources.table(results)}")
    bad = [(job, wrong) for job, found in results if (wrong := resources.faults(job, found))]
    assert not bad, bad


@pytest.mark.parametrize(
    "arch,config,fault",
    [
        ("sm_90", tuning.Config("split", 32, 64, 64, 1, 1), "spills"),
        ("gfx942", tuning.Config("split", 64, 128, 128, 8, 2), "shared memory"),
    ],
    ids=["too few warps", "too much shared memory"],
)
def test_the_check_catches_a_bad_configuration(arch, config, fault, monkeypatch):
    """The test above fails if the table is made to spill or to pass the limit."""
    row = tuning.Row(arch, None, None, 64, None, config, "made to fail")
    monkeypatch.setattr(tuning, "TABLE", (row,))
    jobs = [job for job in resources.shipped_jobs(arch, PEFT_DEFAULT) if job.kernel == "update_expand_reduce"]
    (result,) = [(job, resources.compile_job(job)) for job in jobs]
    assert any(fault in wrong for wrong in resources.faults(*result)), result


@pytest.mark.parametrize("kernel", resources.KERNELS)
def test_odd_sizes_compile(kernel):
    """r = 1, and a d that no block divides, compile in every family."""
    family = "split" if kernel in resources.SPLIT else "tile"
    for block_t in (1, 16):
        name = "row" if family == "tile" and block_t == 1 else family
        config = tuning.Config(name, block_t, 32, 32 if family == "split" else 0, 4, 1)
        job = resources.Job("sm_90", kernel, config, 1, "bf16", "fp32")
        assert resources.compile_job(dataclasses.replace(job), width=97).spills == 0
