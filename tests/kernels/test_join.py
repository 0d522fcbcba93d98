"""The rewrite that joins an update with the next inject: fires, refuses by each rule, keeps interface and numbers."""

from __future__ import annotations

import kernel_problems as problems
import pytest
import torch

from layergraph.kernels import ops
from layergraph.kernels.join import find_pairs, join_pairs


class Layers(torch.nn.Module):
    """n blocks with an inject before and an update after each: n - 1 pairs."""

    def __init__(self, n=4, d=24, r=3, u=5):
        super().__init__()
        calls = [problems.make((1,), d, r, u, seed=seed) for seed in range(n)]
        self.weights = torch.nn.ModuleList(torch.nn.ParameterList((*call.update, call.down, call.up)) for call in calls)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(d, d) for _ in range(n))
        self.register_buffer("alpha", torch.tensor(0.3))

    def forward(self, hidden, shadow):
        for (*update, down, up), block in zip(self.weights, self.blocks, strict=True):
            hidden = block(ops.shadow_inject(hidden, shadow, down, up, self.alpha))
            shadow = ops.shadow_update(hidden, shadow, *update)
        return hidden, shadow


def states(tokens=5):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, tokens, 24, generator=generator) for _ in range(2))


def counts(graph):
    return [sum(node.target is op for node in graph.nodes) for op in (ops.INJECT, ops.UPDATE, ops.UPDATE_INJECT)]


def test_joins_every_pair_and_keeps_numbers_and_signature(tmp_path):
    net = Layers().eval()
    tokens = torch.export.Dim("tokens", min=1, max=64)
    program = torch.export.export(net, states(), dynamic_shapes=({1: tokens}, {1: tokens}))
    before = str(program.graph_signature)
    assert counts(program.graph) == [4, 4, 0]
    assert len(find_pairs(program.graph).pairs) == 3 and counts(program.graph) == [4, 4, 0]  # pure
    found = join_pairs(program.graph_module)
    assert (len(found.pairs), found.refusals) == (3, [])
    assert counts(program.graph) == [1, 1, 3]
    program.validate()
    assert str(program.graph_signature) == before
    assert find_pairs(program.graph).pairs == []
    torch.export.save(program, tmp_path / "joined.pt2")
    loaded = torch.export.load(tmp_path / "joined.pt2")
    for count in (1, 7):
        for result in (program, loaded):
            for a, b in zip(result.module()(*states(count)), net(*states(count)), strict=True):
                assert torch.equal(a, b)


class Step(torch.nn.Module):
    """An update and an inject of its result with something in between."""

    def __init__(self, between):
        super().__init__()
        call = problems.make((1,), 24, 3, 5)
        self.update = torch.nn.ParameterList(call.update)
        self.down, self.up = torch.nn.Parameter(call.down), torch.nn.Parameter(call.up)
        self.register_buffer("alpha", call.alpha)
        self.between = between

    def forward(self, hidden, shadow):
        return self.between(self, hidden, ops.shadow_update(hidden, shadow, *self.update))


def plain(net, hidden, state):
    return ops.shadow_inject(hidden, state, net.down, net.up, net.alpha), state


def state_used_first(net, hidden, state):
    """The state also feeds something that is computed before the inject, which needs nothing of it: still a pair."""
    other = state * 2
    return ops.shadow_inject(hidden, state, net.down, net.up, net.alpha), other


def weight_from_state(net, hidden, state):
    down = net.down + state.mean()
    return ops.shadow_inject(hidden, state, down, net.up, net.alpha), state


def two_injects(net, hidden, state):
    first = ops.shadow_inject(hidden, state, net.down, net.up, net.alpha)
    return first, ops.shadow_inject(hidden, state, net.down * 2, net.up, net.alpha)


def other_hidden(net, hidden, state):
    return ops.shadow_inject(hidden * 2, state, net.down, net.up, net.alpha), state


def other_dtype(net, hidden, state):
    return ops.shadow_inject(hidden, state, net.down.double(), net.up.double(), net.alpha), state


def trace(between):
    return torch.export.export(Step(between).eval(), states(), strict=False)


@pytest.mark.parametrize("between", [plain, state_used_first], ids=lambda f: f.__name__)
def test_fires(between):
    program = trace(between)
    wanted = program.module()(*states())
    found = join_pairs(program.graph_module)
    assert len(found.pairs) == 1 and counts(program.graph) == [0, 0, 1]
    program.validate()
    for a, b in zip(program.module()(*states()), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "between,rule,reason",
    [
        (weight_from_state, "R1", "uses the new state before"),
        (two_injects, "R2", "2 injects read its state"),
        (other_hidden, "R3", "reads mul, the update read hidden"),
        (other_dtype, "R4", "adapters of torch.float32 and torch.float64"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refuses_with_the_reason(between, rule, reason):
    program = trace(between)
    text = str(program.graph)
    found = join_pairs(program.graph_module)
    assert found.pairs == [] and str(program.graph) == text
    (refusal,) = found.refusals
    assert refusal.rule == rule and reason in refusal.reason


def with_write(target):
    """A graph with an in-place write between update and inject, as a late pass may make one."""
    module = trace(plain).graph_module
    inject = next(node for node in module.graph.nodes if node.target is ops.INJECT)
    with module.graph.inserting_before(inject):
        value = {"hidden": inject.args[0], "weight": inject.args[2]}.get(target)
        if target == "cache":
            with module.graph.inserting_before(next(iter(module.graph.nodes))):
                value = module.graph.placeholder("cache")
        elif target == "view":
            value = module.graph.call_function(torch.ops.aten.alias.default, (inject.args[0],))
        module.graph.call_function(torch.ops.aten.zero_.default, (value,))
    return module


@pytest.mark.parametrize("target", ["hidden", "weight", "view"])
def test_refuses_across_a_write_to_what_the_pair_reads_R5(target):
    found = find_pairs(with_write(target).graph)
    assert found.pairs == [] and [refusal.rule for refusal in found.refusals] == ["R5"]


def test_joins_across_a_write_to_another_input():
    assert len(find_pairs(with_write("cache").graph).pairs) == 1


def test_update_without_an_inject_is_no_near_miss():
    program = torch.export.export(Step(lambda net, hidden, state: state).eval(), states())
    assert find_pairs(program.graph) == ([], [])
