"""spec/5 tests, kind 3: the CUDA side of the ops by fake tensors and a mock driver. Run by test_isolated.py."""

# ruff: noqa: E402 -- the environment is set before what reads it is imported
from __future__ import annotations

import os
import sys

assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter must not be on in this process"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import kernel_problems as problems
import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from layergraph.kernels import DECOMPOSITIONS, ops, tuning
from layergraph.kernels.common import launch

OUTPUTS = {"shadow_inject": {"out"}, "shadow_update": {"new_shadow"}, "shadow_update_inject": {"new_shadow", "out"}}


class MockDriver(DriverBase):
    """An H100-like device that answers questions and runs nothing."""

    target = GPUTarget("cuda", 90, 32)

    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def map_python_to_cpp_type(self, kind):
        return "int"

    def get_device_interface(self):
        return torch.cuda

    def get_benchmarker(self):
        raise AssertionError("nothing may be timed here")

    def get_empty_cache_for_benchmark(self):
        raise AssertionError("nothing may be timed here")

    def clear_cache(self, cache):
        raise AssertionError("nothing may be timed here")


@pytest.fixture(autouse=True)
def mock():
    triton.runtime.driver.set_active(MockDriver())
    yield
    MockDriver.target = GPUTarget("cuda", 90, 32)


def fake_call(mode, *arguments, **options):
    """A call on fake CUDA tensors."""
    call = problems.make(*arguments, **options)
    with mode:
        change = lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")  # noqa: E731
        moved = call.to(change)
        moved.alpha = torch.empty((), device="cuda")
    return moved


def launches(op, call, mode):
    """Kernel launches in the graph that AOTAutograd would hand to Inductor: (kernel, constants, grid, clones)."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    with mode:
        graph = make_fx(dispatch_functionalize(problems.OPS[op]))(*call.arguments(op)).graph
    found = []
    for node in graph.nodes:
        if "triton_kernel_wrapper" not in str(node.target):
            assert "layergraph" not in str(node.target), "the op must have been traced through"
            continue
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        passed = node.kwargs["kwargs"].items()
        constants = {name: value for name, value in passed if not isinstance(value, torch.fx.Node)}
        inner = getattr(kernel, "fn", kernel)
        found.append((inner.__name__, constants, node.kwargs["grid"], node.kwargs.get("tensors_to_clone"), node))
    return found


BF16, F32 = torch.bfloat16, torch.float32
SPLIT = {"shadow_update_inject": 3, "shadow_inject": 2, "shadow_update": 2}
SHAPES = {
    "row": ((1,), 1024, 8, "row", 1),
    "decode": ((1,), 4096, 8, "split", SPLIT),
    "short prefill": ((2, 100), 4096, 8, "split", SPLIT),
    "prefill": ((2, 2048), 4096, 8, "tile", 1),
    "wide bottleneck": (
        (1, 4096),
        4096,
        64,
        "split",
        SPLIT,
    ),
}


@pytest.mark.parametrize("op", OUTPUTS)
@pytest.mark.parametrize("leading,d,r,family,count", SHAPES.values(), ids=SHAPES)
def test_graph_holds_the_chosen_kernels_and_clones_outputs_only(op, leading, d, r, family, count):
    mode = FakeTensorMode()
    call = fake_call(mode, leading, d, r, hidden=BF16, weight=F32)
    found = launches(op, call, mode)
    assert len(found) == (count if isinstance(count, int) else count[op])
    tokens = call.hidden.numel() // d
    config = tuning.choose(tuning.Problem(op, "sm_90", tokens, d, r, 4, 2))
    assert config.family == family
    for _name, constants, grid, clones, _node in found:
        assert constants["BT"] == config.block_t and constants["BD"] == config.block_d
        assert grid[0][0] == -(-tokens // config.block_t)
        # A failed mutation analysis would list every tensor here, and clone hidden and shadow on each call.
        assert set(clones) <= OUTPUTS[op] | {"part", "part_r"} and clones


def test_warps_and_stages_reach_the_launch():
    mode = FakeTensorMode()
    call = fake_call(mode, (1, 4096), 4096, 64, hidden=BF16, weight=F32)
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    for *_rest, node in launches("shadow_update_inject", call, mode):
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        (config,) = kernel.configs
        assert (config.num_warps, config.num_stages) == (8, 2)


def test_constants_are_plain_numbers_and_strings():
    """Inductor writes them into the code it makes by repr(); a Triton dtype would not survive that."""
    mode = FakeTensorMode()
    call = fake_call(mode, (1, 4096), 4096, 8, hidden=BF16, weight=F32)
    for _name, constants, *_rest in launches("shadow_update_inject", call, mode):
        assert {type(value) for value in constants.values()} <= {int, bool, str, float, type(None)}


@pytest.mark.parametrize("op", OUTPUTS)
def test_fake_results_have_shape_dtype_device_and_strides(op):
    mode = FakeTensorMode()
    call = fake_call(mode, (2, 5), 64, 8, hidden=BF16, weight=F32)
    call.hidden = call.hidden.transpose(0, 1)
    call.shadow = call.shadow.transpose(0, 1)
    with mode:
        for result in problems.as_tuple(problems.OPS[op](*call.arguments(op))):
            assert (result.shape, result.dtype, result.device.type) == ((5, 2, 64), BF16, "cuda")
            assert result.is_contiguous()


class Net(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, *arguments):
        return self.op(*arguments)


def test_export_on_cuda_keeps_the_op_with_an_open_T():
    mode = FakeTensorMode()
    call = fake_call(mode, (1, 100), 64, 8, hidden=BF16, weight=F32)
    arguments = call.arguments("shadow_update_inject")
    tokens = torch.export.Dim("tokens", min=1, max=8192)
    shapes = [{1: tokens}, {1: tokens}, *[None] * 11]
    with mode:
        program = torch.export.export(Net(ops.UPDATE_INJECT), arguments, dynamic_shapes={"arguments": tuple(shapes)})
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("layergraph.shadow_update_inject.default") == 1


def test_open_T_is_served_without_a_guard():
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    real = torch.empty(100, 4096, device="meta", dtype=BF16)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    meta = mode.from_tensor(real, symbolic_context=context)
    problem = launch.problem_of("shadow_inject", meta, torch.empty(8, 4096), 8, "sm_90")
    assert problem.tokens == 100 and not shapes.guards
    assert tuning.choose(tuning.Problem("shadow_inject", "sm_90", None, 4096, 8, 4, 2)).family == "split"


@pytest.mark.parametrize("change", ["float64", "wide", "amd"])
def test_what_the_kernels_do_not_serve_runs_the_reference(change):
    mode = FakeTensorMode()
    kind = torch.float64 if change == "float64" else F32
    call = fake_call(mode, (4,), 64, 65 if change == "wide" else 8, hidden=kind, weight=kind)
    if change == "amd":
        MockDriver.target = GPUTarget("hip", "gfx942:sramecc+:xnack-", 64)
        assert len(launches("shadow_inject", call, mode)) == 2
        return
    assert launches("shadow_inject", call, mode) == []


def test_compile_cache_knows_the_kernels():
    """Otherwise an upgrade of this package could reuse what torch compiled from older kernels."""
    from torch._library.triton import get_triton_kernels_for_op

    mode = FakeTensorMode()
    call = fake_call(mode, (4,), 64, 8)
    with mode:
        ops.shadow_update_inject(*call.arguments("shadow_update_inject"))
    assert "layergraph.kernels.shadow_inject.triton" in sys.modules
    for op, count in (("shadow_inject", 3), ("shadow_update", 3), ("shadow_update_inject", 4)):
        assert len(get_triton_kernels_for_op(f"layergraph::{op}")) == count


def test_decompositions_cover_the_three_ops():
    assert set(DECOMPOSITIONS) == {ops.INJECT, ops.UPDATE, ops.UPDATE_INJECT}
