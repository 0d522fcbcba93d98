"""The kernels package where Triton is not installed. Run by test_isolated.py."""

# ruff: noqa: E402 -- the environment is set before what reads it is imported
from __future__ import annotations

import importlib.abc
import sys


class NoTriton(importlib.abc.MetaPathFinder):
    """Makes every import of triton fail as if it were not there."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for loaded in [name for name in sys.modules if name.split(".")[0] == "triton"]:
    del sys.modules[loaded]
sys.meta_path.insert(0, NoTriton())

import kernel_problems as problems
import pytest
import torch

from layergraph.kernels import DECOMPOSITIONS, ops


@pytest.mark.parametrize("op", problems.OPS)
def test_ops_run_train_compile_and_export(op):
    assert "triton" not in sys.modules
    call = problems.make((2, 3), 24, 3, 5, requires_grad=True)
    arguments = call.arguments(op)
    for found, wanted in zip(problems.as_tuple(problems.OPS[op](*arguments)), problems.exact(call, op), strict=True):
        assert problems.error(found, wanted) < 1e-6
        torch.autograd.grad(found.sum(), call.hidden, retain_graph=True)
    compiled = torch.compile(lambda *a: problems.OPS[op](*a), fullgraph=True)
    with torch.no_grad():
        for a, b in zip(problems.as_tuple(compiled(*arguments)), problems.exact(call, op), strict=True):
            assert problems.error(a, b) < 1e-6
    checks = torch.library.opcheck(problems.OPS[op], arguments, test_utils=("test_schema", "test_faketensor"))
    assert set(checks.values()) == {"SUCCESS"}


def test_nothing_is_launched():
    call = problems.make()
    assert not ops.uses_kernels(call.hidden, call.shadow, call.down)
    assert len(DECOMPOSITIONS) == 3
