"""Patterns of ops: what fits, what does not, in which module, and what is used elsewhere as well."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.errors import InputError, InputTypeError, NotFoundError
from layergraph.ir.match import Op, Through, Value, Weight, arguments, find, match_at

ATEN = torch.ops.aten
LINEAR = Op(ATEN.linear, Value("x"), Weight("weight"), name="linear")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


class Model(nn.Module):
    """Two blocks, the second called twice; then sums in both orders, casts, and a product that is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.down = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.down(self.blocks[0](x))
        y = self.down(self.blocks[1](y))
        z = self.blocks[1](y)
        w = nn.functional.relu(z).double().float()
        a = torch.add(w, z.sum(), alpha=2)
        return a, 1.0 + z.tanh(), z.tanh() + z.cos(), z.clamp(min=0.5)


@pytest.fixture(scope="module")
def unit():
    torch.manual_seed(0)
    return lg.trace(Model(), (torch.randn(3, 4),), progress=False).ir.forward


def gated(x="x"):
    return Op(ATEN.mul, Op(ATEN.silu, Op(ATEN.linear, Value("x"), name="gate")), Op(ATEN.linear, Value(x), name="up"))


def test_every_place_is_found_in_graph_order_with_its_parts(unit):
    found = list(find(unit, gated()))
    assert [match.path for match in found] == ["blocks.0", "blocks.1", "blocks.1"]
    assert all(match["gate"].args[0] is match["x"] is match["up"].args[0] for match in found)
    assert found[0].names == tuple(node.name for node in unit.graph.nodes if node in found[0].nodes)
    assert found[0].root is found[0].nodes[-1] and len(found[0].nodes) == 4


def test_the_sides_of_a_product_are_tried_both_ways_but_not_those_of_another_op(unit):
    silu = Op(ATEN.silu)
    up = Op(ATEN.linear, bias=None)
    assert len(list(find(unit, Op(ATEN.mul, up, silu)))) == 3
    minus = lg.trace(Minus(), (torch.randn(3, 4),), progress=False).ir.forward
    assert len(list(find(minus, Op(ATEN.sub, Op(ATEN.sin), Op(ATEN.cos))))) == 1
    assert not list(find(minus, Op(ATEN.sub, Op(ATEN.cos), Op(ATEN.sin))))


class Minus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() - x.cos()


def test_a_sum_that_scales_its_second_side_is_not_swapped(unit):
    total, cast = Op(ATEN.sum), Through((ATEN.to, ATEN._to_copy), Op(ATEN.relu))
    assert len(list(find(unit, Op(ATEN.add, cast, total, alpha=2)))) == 1
    assert not list(find(unit, Op(ATEN.add, total, cast)))


def test_a_name_stands_for_one_thing(unit):
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sin() * y.cos() + x.sin() * x.cos()

    two = lg.trace(Two(), (torch.randn(3), torch.randn(3)), progress=False).ir.forward
    same = Op(ATEN.mul, Op(ATEN.sin, Value("x")), Op(ATEN.cos, Value("x")))
    other = Op(ATEN.mul, Op(ATEN.sin, Value("x")), Op(ATEN.cos, Value("y")))
    assert len(list(find(two, same))) == 1
    assert len(list(find(two, other))) == 2


def test_literals_types_nodes_and_missing_arguments(unit):
    assert len(list(find(unit, Op(ATEN.clamp, Value(), 0.5)))) == 1
    assert len(list(find(unit, Op(ATEN.clamp, Value(), float, None)))) == 1
    assert not list(find(unit, Op(ATEN.clamp, Value(), 0)))
    assert not list(find(unit, Op(ATEN.clamp, Value(), max=float)))
    assert len(list(find(unit, Op(ATEN.linear, bias=None)))) == 3
    assert len(list(find(unit, Op(ATEN.linear, bias=Weight("bias"))))) == 5
    tanh = next(node for node in unit.graph.nodes if node.target is ATEN.tanh.default)
    assert [match.root for match in find(unit, Op(ATEN.add, tanh))] == list(tanh.users)


def test_weights_are_what_the_graph_holds(unit):
    assert len(list(find(unit, LINEAR))) == 8
    assert not list(find(unit, Op(ATEN.linear, Weight("x"))))
    target = next(find(unit, LINEAR))["weight"].name
    assert unit.targets[target] == "blocks.0.gate.weight"


def test_inside_keeps_a_match_within_one_call_of_a_module(unit):
    assert [match.path for match in find(unit, gated(), inside="blocks.0")] == ["blocks.0"]
    assert len(list(find(unit, gated(), inside="blocks.*"))) == 3
    assert not list(find(unit, gated(), inside="*.gate"))
    # Its parts lie in other calls than its last op.
    across = Op(ATEN.linear, Op(ATEN.mul))
    assert len(list(find(unit, across))) == 2
    assert not list(find(unit, across, inside="down"))
    assert len(list(find(unit, across, inside="**"))) == 2


def test_no_node_is_in_two_matches_and_leaks_are_told(unit):
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            a = x.sin().sin().sin()
            b = x.cos()
            return a, b.exp(), b

    chain = lg.trace(Chain(), (torch.randn(3),), progress=False).ir.forward
    assert len(list(find(chain, Op(ATEN.sin, Op(ATEN.sin))))) == 1
    (match,) = find(chain, Op(ATEN.exp, Op(ATEN.cos, name="cos")))
    assert match.leaks == (match["cos"],)
    assert not next(find(unit, gated())).leaks


def test_either_and_through(unit):
    active = Op(ATEN.silu) | Op(ATEN.gelu)
    assert len(list(find(unit, Op(ATEN.mul, active)))) == 3
    total = Op(ATEN.add, Through(ATEN.to, Op(ATEN.relu, name="relu")))
    (match,) = find(unit, total)
    assert [node.target for node in match.nodes].count(ATEN.relu.default) == 1
    assert sum(node.target is not ATEN.relu.default for node in match.nodes) >= 2  # the casts, and the sum


def test_backtracking_tries_another_order_when_a_name_was_bound_wrongly(unit):
    class Both(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x + y) * x.exp()

    both = lg.trace(Both(), (torch.randn(3), torch.randn(3)), progress=False).ir.forward
    (match,) = find(both, Op(ATEN.mul, Op(ATEN.add, Value("b"), Value("a")), Op(ATEN.exp, Value("a"))))
    assert (match["a"].name, match["b"].name) == ("x", "y")


def test_arguments_are_read_by_name_with_defaults(unit):
    add = next(node for node in unit.graph.nodes if node.target is ATEN.add.Tensor and "alpha" in node.kwargs)
    assert list(arguments(add)) == ["self", "other", "alpha"] and arguments(add)["alpha"] == 2
    clamp = next(node for node in unit.graph.nodes if node.target is ATEN.clamp.default)
    assert arguments(clamp)["max"] is None
    graph = torch.fx.Graph()
    assert arguments(graph.call_function(operator.getitem, (1, 2))) == {"0": 1, "1": 2}


def test_match_at_looks_at_one_node(unit):
    root = next(find(unit, gated())).root
    assert match_at(unit, root, gated()).root is root
    assert match_at(unit, root, LINEAR) is None


@pytest.mark.parametrize("target", ["linear", (), ("linear",), None])
def test_a_pattern_that_names_no_op_is_refused(target):
    with pytest.raises(InputTypeError, match="names no op"):
        Op(target)


class Chain(nn.Module):
    """A chain of signs, behind one of sums."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(40):
            y = y + x.sin()
        for _ in range(1200):
            y = y.neg()
        return y.cos()


@pytest.fixture(scope="module")
def chain():
    return lg.trace(Chain(), (torch.randn(3, 4),), progress=False).ir.forward


def test_long_chains_are_looked_through(chain):
    (match,) = find(chain, Op(ATEN.cos, Through(ATEN.neg, Op(ATEN.add))))
    assert len(match.nodes) == 1202
    assert not list(find(chain, Op(ATEN.cos, Through(ATEN.neg, Op(ATEN.mul)))))


def test_sums_of_sums_and_alternatives_take_no_exponential_time(chain):
    """2^40 ways lead to the leaf that is not there."""
    pattern: object = Op(ATEN.tanh)
    for _ in range(30):
        pattern = Op(ATEN.add, pattern, Value()) | Op(ATEN.add, pattern, Op(ATEN.sin) | Value())
    assert not list(find(chain, Op(ATEN.cos, Through(ATEN.neg, pattern))))
    found = Value("x")
    for _ in range(30):
        found = Op(ATEN.add, found, Value()) | Op(ATEN.add, Value(), found)
    assert len(list(find(chain, Op(ATEN.cos, Through(ATEN.neg, found))))) == 1


def test_a_search_starts_from_an_op_or_several(unit):
    either = list(find(unit, Op(ATEN.tanh) | Op(ATEN.cos) | Op(ATEN.clamp, Value("x"))))
    assert [str(match.root.target) for match in either].count("aten.cos.default") == 1 and len(either) >= 3
    for pattern in (Value("x"), Through(ATEN.to, Op(ATEN.cos)), Op(ATEN.cos) | Value(), "aten.cos", None):
        with pytest.raises(InputTypeError, match="a search starts from an op"):
            find(unit, pattern)
    with pytest.raises(InputTypeError, match="inside is no module path"):
        find(unit, LINEAR, inside=["blocks"])


def test_arguments_called_self_and_target_can_be_named(unit):
    assert list(find(unit, Op(ATEN.tanh, self=Value("x"))))
    Op(ATEN.mse_loss, self=Value("a"), target=Value("b"))


def test_patterns_that_can_never_fit_are_refused(unit):
    with pytest.raises(InputTypeError, match=r"mul is no op of an exported graph[\s\S]*torch\.ops\.aten\.mul"):
        Op(torch.mul)
    with pytest.raises(InputTypeError, match="is no op of an exported graph"):
        Op(lambda x: x)
    with pytest.raises(InputError, match=r"takes what this pattern names[\s\S]*input, weight, bias[\s\S]*bais"):
        Op(ATEN.linear, bais=None)
    with pytest.raises(InputError, match="5 by position"):
        Op(ATEN.linear, 1, 2, 3, 4, 5)
    with pytest.raises(NotFoundError, match=r"names nothing 'zzz'[\s\S]*linear, x, weight"):
        next(find(unit, LINEAR))["zzz"]
