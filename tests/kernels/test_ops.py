"""The ops as torch sees them: opcheck, gradients, shapes, strides, dtypes, export, compile, errors (spec/5)."""

from __future__ import annotations

import kernel_problems as problems
import pytest
import torch

from layergraph.errors import InputError, InputTypeError, LayerGraphError
from layergraph.kernels import DECOMPOSITIONS, ops

f32, f16, bf16, f64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
PUBLIC = {
    "shadow_inject": ops.shadow_inject,
    "shadow_update": ops.shadow_update,
    "shadow_update_inject": ops.shadow_update_inject,
}
MIXES = [(f32, f32), (f64, f64), (bf16, bf16), (f16, f16), (bf16, f32), (f16, f32), (f32, bf16)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("hidden,weight", MIXES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("op", PUBLIC)
def test_opcheck_passes_for_every_dtype(op, hidden, weight):
    call = problems.make((2, 3), 24, 3, 5, hidden, weight, requires_grad=True)
    results = torch.library.opcheck(problems.OPS[op], call.arguments(op))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", PUBLIC)
@pytest.mark.parametrize("leading", [(), (0,), (1,), (3, 1, 2)], ids=str)
def test_opcheck_passes_for_any_leading_shape(op, leading):
    call = problems.make(leading, 12, 1, 2, requires_grad=True)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    results = torch.library.opcheck(problems.OPS[op], call.arguments(op), test_utils=utilities)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", PUBLIC)
def test_gradients_match_finite_differences_in_float64(op):
    call = problems.make((2, 3), 12, 3, 5, f64, f64, requires_grad=True)
    assert torch.autograd.gradcheck(problems.OPS[op], call.arguments(op))
    assert torch.autograd.gradgradcheck(problems.OPS[op], call.arguments(op))


@pytest.mark.parametrize("op", ["shadow_inject", "shadow_update_inject"])
def test_alpha_has_a_gradient(op):
    call = problems.make((2, 3), 12, 3, 5, f64, f64)
    call.alpha.requires_grad_(True)
    problems.as_tuple(PUBLIC[op](*call.arguments(op)))[-1].sum().backward()
    found, call.alpha.grad = call.alpha.grad, None
    problems.as_tuple(DECOMPOSITIONS[problems.OPS[op]](*call.arguments(op)))[-1].sum().backward()
    torch.testing.assert_close(found, call.alpha.grad)


STRIDES = {
    "swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "last dim apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "padded": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "expanded": lambda x: x[:1].expand(x.shape),
    "reversed dims": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
}


@pytest.mark.parametrize("op", PUBLIC)
@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES.keys())
def test_any_strides_give_the_same_contiguous_result(op, change):
    call = problems.make((3, 4), 24, 3, 5)
    call.hidden, call.shadow = change(call.hidden), change(call.shadow)
    found = problems.as_tuple(PUBLIC[op](*call.arguments(op)))
    for result, wanted in zip(found, problems.exact(call, op), strict=True):
        assert result.is_contiguous() and problems.error(result, wanted) < 1e-6
    utilities = ("test_faketensor", "test_aot_dispatch_dynamic")
    assert set(torch.library.opcheck(problems.OPS[op], call.arguments(op), test_utils=utilities).values()) == {
        "SUCCESS"
    }


def test_state_and_hidden_may_differ_in_dtype():
    call = problems.make((4,), 24, 3, 5, bf16, f32, shadow=f32)
    state, hidden = ops.shadow_update_inject(*call.arguments("shadow_update_inject"))
    assert state.dtype == f32 and hidden.dtype == bf16


def test_saving_for_backward_keeps_inputs_only():
    """spec/5: autograd of the plain formula keeps about 12 times what recomputing does (bf16 states, f32 weights)."""
    call = problems.make((64,), 256, 8, 8, bf16, f32, requires_grad=True)
    arguments = call.arguments("shadow_update_inject")

    def kept(function):
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = function(*arguments)
        theirs = {argument.untyped_storage().data_ptr() for argument in arguments}
        theirs |= {result.untyped_storage().data_ptr() for result in results}
        return sum(size for pointer, size in storages.items() if pointer not in theirs)

    assert kept(ops.UPDATE_INJECT) == 0
    assert kept(DECOMPOSITIONS[ops.UPDATE_INJECT]) > 20 * 64 * 256


class Net(torch.nn.Module):
    """An inject, an update and the two joined, around a Linear."""

    def __init__(self, d=24, r=3, u=5):
        super().__init__()
        call = problems.make((1,), d, r, u)
        self.weights = torch.nn.ParameterList((*call.update, call.down, call.up))
        self.register_buffer("alpha", call.alpha)
        self.block = torch.nn.Linear(d, d)

    def forward(self, hidden, shadow):
        *update, down, up = self.weights
        hidden = self.block(ops.shadow_inject(hidden, shadow, down, up, self.alpha))
        shadow = ops.shadow_update(hidden, shadow, *update)
        return ops.shadow_update_inject(self.block(hidden), shadow, *update, down, up, self.alpha)


def inputs(tokens=5):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, tokens, 24, generator=generator) for _ in range(2))


def op_counts(graph):
    names = [str(node.target) for node in graph.nodes if "layergraph" in str(node.target)]
    return {name: names.count(f"layergraph.{name}.default") for name in PUBLIC}


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_one_node_each_and_stays_dynamic(strict):
    net = Net().eval()
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    program = torch.export.export(net, inputs(), dynamic_shapes=({1: tokens}, {1: tokens}), strict=strict)
    assert op_counts(program.graph) == dict.fromkeys(PUBLIC, 1)
    assert op_counts(program.run_decompositions().graph) == dict.fromkeys(PUBLIC, 1)
    for count in (1, 5, 33):
        for found, wanted in zip(program.module()(*inputs(count)), net(*inputs(count)), strict=True):
            torch.testing.assert_close(found, wanted)


class Chosen(torch.nn.Module):
    """The op on as many rows as the data says, as routers make them."""

    def forward(self, hidden, shadow, mask, *inject):
        return ops.shadow_inject(hidden[mask], shadow[mask], *inject)


def test_rows_that_depend_on_data_trace_and_run():
    call = problems.make((6,), 24, 3)
    arguments = call.arguments("shadow_inject")
    program = torch.export.export(Chosen(), (*arguments[:2], torch.arange(6) % 2 == 0, *arguments[2:]), strict=False)
    for mask in (torch.arange(6) < 4, torch.zeros(6, dtype=torch.bool)):
        found = program.module()(*arguments[:2], mask, *arguments[2:])
        torch.testing.assert_close(found, Chosen()(*arguments[:2], mask, *arguments[2:]))


def test_decompositions_leave_plain_aten_with_the_same_numbers():
    net = Net().eval()
    program = torch.export.export(net, inputs())
    table = torch.export.default_decompositions()
    table.update(DECOMPOSITIONS)
    plain = program.run_decompositions(table)
    assert op_counts(plain.graph) == dict.fromkeys(PUBLIC, 0)
    for found, wanted in zip(plain.module()(*inputs()), net(*inputs()), strict=True):
        torch.testing.assert_close(found, wanted)


def test_compile_fullgraph_forward_and_backward():
    net = Net()
    compiled = torch.compile(net, fullgraph=True, dynamic=True)
    for count in (5, 7):
        wanted, found = net(*inputs(count)), compiled(*inputs(count))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    eager_grads = torch.autograd.grad(sum(result.sum() for result in wanted), list(net.parameters()))
    grads = torch.autograd.grad(sum(result.sum() for result in found), list(net.parameters()))
    for a, b in zip(grads, eager_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_vmap_free_functional_call_under_two_threads():
    """Ops hold no state: two threads with two adapters get their own answers."""
    import concurrent.futures

    calls = [problems.make((7,), 64, 8, 8, seed=seed) for seed in range(8)]
    run = lambda call: ops.shadow_update_inject(*call.arguments("shadow_update_inject"))  # noqa: E731
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for found, call in zip(pool.map(run, calls), calls, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, run(call), strict=True))


# ---- errors --------------------------------------------------------------------------------------------------------
FAULTS = [
    ("shadow_inject", "hidden", lambda x: x[0, 0, 0], r"hidden has the wrong shape", r"\[\.\.\., d\]", r"\[\]"),
    ("shadow_inject", "hidden", lambda x: x[..., :0], "hidden has the wrong shape", "d from 1 up", r"\[2, 3, 0\]"),
    ("shadow_inject", "down", lambda x: x[:0], "down_weight has the wrong shape", "from 1 up", r"\[0, 24\]"),
    ("shadow_inject", "hidden", lambda x: x.to(torch.float8_e4m3fn), "hidden has the wrong dtype", "float16", "float8"),
    ("shadow_inject", "shadow", lambda x: x[:1], "shadow has the wrong shape", r"\[2, 3, 24\]", r"\[1, 3, 24\]"),
    ("shadow_inject", "down", lambda x: x[:, :7], "down_weight has the wrong shape", r"\[r, 24\]", r"\[3, 7\]"),
    ("shadow_inject", "down", lambda x: x[0], "down_weight has the wrong shape", r"\[r, 24\]", r"\[24\]"),
    ("shadow_inject", "up", lambda x: x.t(), "up_weight has the wrong shape", r"\[24, 3\]", r"\[3, 24\]"),
    ("shadow_inject", "alpha", lambda x: x[None], "alpha has the wrong shape", r"\[\]", r"\[1\]"),
    ("shadow_inject", "alpha", lambda x: x.double(), "alpha has the wrong dtype", "torch.float32", "torch.float64"),
    ("shadow_inject", "hidden", lambda x: x.long(), "hidden has the wrong dtype", "float16, bfloat16", "torch.int64"),
    (
        "shadow_inject",
        "down",
        lambda x: x.long(),
        "down_weight has the wrong dtype",
        "float16, bfloat16",
        "torch.int64",
    ),
    (
        "shadow_inject",
        "up",
        lambda x: x.half(),
        "up_weight has the wrong dtype",
        "float32, the dtype of down",
        "float16",
    ),
    ("shadow_inject", "up", lambda x: x.to("meta"), "up_weight has the wrong device", "cpu", "meta"),
    ("shadow_update", 0, lambda x: x[:, :7], "t1_weight has the wrong shape", r"\[u, 24\]", r"\[5, 7\]"),
    ("shadow_update", 1, lambda x: x[:4], "t1_bias has the wrong shape", r"\[5\] \(u, from 1 up\)", r"\[4\]"),
    ("shadow_update", 2, lambda x: x.t(), "t2_weight has the wrong shape", r"\[24, 5\]", r"\[5, 24\]"),
    ("shadow_update", 4, lambda x: x[:4], "g1_weight has the wrong shape", r"\[5, 24\]", r"\[4, 24\]"),
    ("shadow_update", 7, lambda x: x[:, None], "g2_bias has the wrong shape", r"\[24\]", r"\[24, 1\]"),
    ("shadow_update_inject", "down", lambda x: x.double(), "down_weight has the wrong dtype", "float32", "float64"),
]


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("op,name,change,what,expected,found", FAULTS, ids=lambda value: str(value)[:24])
def test_errors_name_argument_found_and_expected(op, name, change, what, expected, found, fake):
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = problems.make((2, 3), 24, 3, 5)
    if isinstance(name, int):
        call.update = (*call.update[:name], change(call.update[name]), *call.update[name + 1 :])
    else:
        setattr(call, name, change(getattr(call, name)))
    arguments = call.arguments(op)
    with pytest.raises(InputError, match=what) as caught:
        if fake:
            with FakeTensorMode() as mode:
                PUBLIC[op](*(mode.from_tensor(argument) for argument in arguments))
        else:
            PUBLIC[op](*arguments)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, LayerGraphError)
    text = str(caught.value)
    assert f"layergraph::{op}" in text
    import re

    assert re.search(f"expected +.*{expected}", text) and re.search(f"found +.*{found}", text), text


def test_a_number_for_alpha_is_refused_with_the_remedy():
    call = problems.make()
    with pytest.raises(InputTypeError, match="alpha is not a tensor") as caught:
        ops.shadow_inject(call.hidden, call.shadow, call.down, call.up, 0.1)
    assert "torch.tensor" in str(caught.value) and isinstance(caught.value, TypeError)


@pytest.mark.parametrize("value", [None, "x", [1.0]])
def test_non_tensors_are_refused_by_name(value):
    call = problems.make()
    with pytest.raises(InputTypeError, match="shadow is not a tensor"):
        ops.shadow_update(call.hidden, value, *call.update)
