"""What a tap cannot mean: each is a named error that says what to do, raised before the program is touched."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.testing.zoo import tiny_model


class Several(nn.Module):
    """An op of several values (topk), whole numbers (argmax) and a value of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.pick, self.flat = Pick(), nn.Flatten(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, chosen = x.topk(2, -1)
        return values + self.pick(x)[:, None] + self.flat(x).sum() + chosen


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.keys(x) * 2


class Pick(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


@pytest.fixture(scope="module")
def several():
    return lg.trace(Several(), torch.randn(3, 4), progress=False)


def refused(program, *args, **options):
    before = program.fingerprint
    with pytest.raises(lg.LayerGraphError) as caught:
        program.apply(lg.TapOutputs(*args, **options))
    assert program.fingerprint == before
    assert not program.ir.history
    return str(caught.value)


@pytest.mark.parametrize("name", ["keys", "to_tuple", "last_hidden_state", "hidden_states"])
def test_a_name_that_means_something_in_the_return_value(recorded, name):
    message = refused(recorded.program, "blocks.0.dense", name=name)
    assert name in message
    assert "choose another name=" in message


def test_a_module_whose_path_is_such_a_name_takes_another():
    model, x = Keyed(), torch.randn(2, 4)
    program = lg.trace(model, x, progress=False)
    assert "choose another name=" in refused(program, "keys")
    (found,) = program.apply(lg.TapOutputs("keys", name="inner"))(x).inner
    assert torch.equal(found, model.keys(x))


@pytest.mark.parametrize(
    ("what", "option", "value"),
    [
        ("attentions", "index", 0),
        ("attentions", "name", "weights"),
        ("blocks.0::softmax", "index", 1),
        ("blocks.0::softmax", "at", "input"),
        (lambda node: True, "at", "input"),
    ],
)
def test_an_option_that_says_nothing_is_not_ignored(recorded, what, option, value):
    message = refused(recorded.program, what, **{option: value})
    assert f"{option} says nothing about" in message
    assert f"leave {option} out" in message


@pytest.mark.parametrize(
    ("what", "found"),
    [(nn.ReLU(), "a module, not the name of one"), (torch.ops.aten.add.Tensor, "an op, not the name of one")],
)
def test_an_object_where_its_name_belongs(what, found):
    for given in (what, [what]):
        with pytest.raises(TypeError, match=found):
            lg.TapOutputs(given)


def test_a_predicate_that_fails_names_the_node_and_what_it_raised(several):
    message = refused(several, lambda node: node.meta["val"].shape[99] == 1)
    assert "the predicate fails" in message
    assert "AttributeError: 'tuple' object" in message
    assert "node topk" in message


def test_a_node_of_several_values_points_at_what_lies_behind_it(several):
    message = refused(several, "::topk")
    assert "makes none" in message
    assert "getitem" in message
    assert "makes none" in refused(several, lambda node: "topk" in str(node.target))
    behind = several.apply(lg.TapOutputs(lambda node: node.op == "call_function" and "getitem" in str(node.target)))
    assert len(behind.ir.history[-1].sites) == 2


@pytest.mark.parametrize(
    ("what", "reduce", "expected"),
    [
        ("pick", "mean", "a reduction over tokens needs two dimensions"),
        ("pick", "norm", "no norm of whole numbers"),
        ("flat", "last", "a reduction over tokens needs two dimensions"),
        ("::argmax", "norm", "no norm of whole numbers"),
        ("**::add", ("topk", 3), "topk of 3 takes more features than there are"),
    ],
)
def test_a_reduction_that_the_value_does_not_have(several, what, reduce, expected):
    message = refused(several, what, reduce=reduce)
    assert expected in message
    assert "another reduction" in message


def test_an_occurrence_of_an_op_that_is_not_there_matches_nothing(recorded):
    assert "matches nothing to tap" in refused(recorded.program, "blocks.1::erf#0")
    assert "no number after #" in refused(recorded.program, "blocks.1::softmax#x")


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        (r"BLOCKS\.\d\.dense", re.IGNORECASE),
        (r"blocks \. \d \. dense  # a comment", re.VERBOSE),
        (r"(?i)BLOCKS  \. \d \. DENSE", re.VERBOSE),
    ],
)
def test_flags_of_a_regex_are_saved_with_it(recorded, tmp_path, pattern, flags):
    tap = lg.TapOutputs(re.compile(pattern, flags))
    program = recorded.program.apply(tap)
    assert len(program.ir.history[-1].sites) == 3
    loaded = lg.load(program.save(tmp_path / "saved", progress=False), progress=False)
    again = recorded.program.apply(lg.TapOutputs.from_options(loaded.ir.history[-1].options))
    assert again.fingerprint == program.fingerprint == loaded.fingerprint


def test_an_op_that_is_not_there_is_answered_with_those_that_are(recorded):
    message = refused(recorded.program, "blocks.1.dense::erf")
    assert "an op that runs there: linear" in message and "name one of these" in message
    assert "matches nothing to tap" in refused(recorded.program, "blocks.77::softmax")


def test_softmax_under_fused_attention_names_eager():
    program = lg.trace(tiny_model("llama", "base", attn_implementation="sdpa"), progress=False)
    message = refused(program, "layers.0.self_attn::softmax#0")
    assert "scaled_dot_product_attention" in message and "traced with sdpa attention" in message
    assert 'attn_implementation="eager"' in message


def test_an_output_of_the_graph_needs_no_tap():
    program = lg.trace(tiny_model("llama", "lm"), progress=False)
    assert "the graph returns logits already" in refused(program, "logits")


def test_a_name_that_matches_nothing_is_told_every_form(recorded):
    message = refused(recorded.program, "nowhere")
    assert "PATH::softmax#0" in message and "%add_9" in message


@pytest.mark.parametrize("dtype", ["int8", torch.int64, torch.bool])
def test_a_cast_that_would_cut_fractions_off(recorded, dtype):
    message = refused(recorded.program, "blocks.0.dense", dtype=dtype)
    assert f"a cast to {str(dtype).removeprefix('torch.')} would cut the values off" in message


def test_whole_numbers_may_be_cast_to_others(several):
    x = torch.randn(3, 4)
    tapped = several.apply(lg.TapOutputs("pick", dtype=torch.int32))
    assert torch.equal(tapped(x)["pick"], x.argmax(-1).to(torch.int32))


def test_sizes_in_messages_have_their_names():
    program = lg.trace(tiny_model("llama", "base"), progress=False)
    assert "f32[batch,sequence,64]" in refused(program, "layers.0", reduce=("topk", 65))


def test_a_range_selects(recorded):
    options = {"layers": range(2)}
    assert lg.TapOutputs("hidden_states", **options) == lg.TapOutputs("hidden_states", layers=(0, 1))
