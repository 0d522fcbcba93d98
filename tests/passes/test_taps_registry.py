"""TapOutputs by registry key, row by row of its specification; the oracle is eager's own tuples, bit for bit."""

from __future__ import annotations

import pytest
import torch

import layergraph as lg

_KEYS = (
    "hidden_states",
    "late_hidden_states",
    "attentions",
    "second_attentions",
    "weights_from_the_end",
    "side_values",
    "by_suffix",
    "plain_class",
    "plain_name",
    "whole",
    "several",
)


def test_row_01_default_index_is_0_for_hidden_states_else_1_and_tensors_are_taken_whole(recorded):
    out = recorded.tapped("plain_class")
    assert out.plain_class[0].shape == (2, 5, 5)  # the weights, entry 1 of what a mixer returns
    assert recorded.tapped("late_hidden_states").late_hidden_states[0].shape == (2, 5, 8)
    assert recorded.tapped("whole").whole[0].shape == (2, 5, 8)  # index 4 of a bare tensor


@pytest.mark.parametrize("key", _KEYS)
def test_row_02_every_field_of_a_recorder_gives_what_eager_gives(recorded, same, key):
    same(recorded.tapped(key), recorded.eager(**{f"output_{key}": True}))


@pytest.mark.parametrize(
    ("model_type", "kind", "flag"),
    [
        ("switch_transformers", "base", "output_attentions"),  # index=-1, layer_name with a dot
        ("bart", "base", "output_attentions"),  # one class, two keys by layer_name
        ("segformer", "base", "output_hidden_states"),  # no initial hidden state
    ],
)
def test_row_02_recorders_of_transformers(case, same, model_type, kind, flag):
    one = case(model_type, kind, "eager")
    key = flag.removeprefix("output_")
    # Experts are traced as one product instead of a loop over those that were hit: other sums, by processor.
    same(one.tapped(key), one.eager(**{flag: True}), atol=5e-6 if model_type == "switch_transformers" else 0.0)


def test_row_03_hidden_states_start_with_what_enters_the_first_block(case, recorded):
    one = case("llama", "base")
    states = one.tapped("hidden_states").hidden_states
    assert len(states) == one.model.config.num_hidden_layers + 1
    assert torch.equal(states[0], one.model.embed_tokens(one.inputs["input_ids"]))
    # capture_initial_hidden_state=False leaves it out; keys of other names never have it
    assert len(recorded.tapped("late_hidden_states").late_hidden_states) == 3


def test_row_04_last_entry_is_tied_to_the_last_hidden_state_where_the_model_says_so(case, same):
    for model_type, kind in (("llama", "base"), ("clip", "vision"), ("siglip", "vision")):
        one = case(model_type, kind)
        out = one.tapped("hidden_states")
        same(out, one.eager(output_hidden_states=True))
        # SigLIP normalises what it returns, and leaves the entry as it was; CLIP returns it as it was
        assert torch.equal(out.hidden_states[-1], out.last_hidden_state) == (model_type != "siglip")


def test_row_04_config_overrides_the_tie_and_layers_give_the_value_before_the_norm(case, same):
    untied = case("llama", "base", tie_last_hidden_states=False)
    same(untied.tapped("hidden_states"), untied.eager(output_hidden_states=True))
    tied = case("llama", "base")
    before_norm = tied.tapped("hidden_states", layers=[-1]).hidden_states[-1]
    assert torch.equal(before_norm, untied.eager(output_hidden_states=True).hidden_states[-1])


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (True, [0, 1, 2]),
        (None, [0, 1, 2]),
        (1, [1]),
        (0, [0]),
        (-1, [2]),
        ([0, -1], [0, 2]),
        ((2,), [2]),
        ({1, -3}, [0, 1]),
    ],
)
def test_row_05_entries_count_as_the_tuple_does_and_the_others_are_none(case, entries, expected):
    one = case("llama", "lm")
    states = one.tapped("hidden_states", entries=entries).hidden_states
    full = one.eager(output_hidden_states=True).hidden_states
    assert [i for i, state in enumerate(states) if state is not None] == expected
    assert len(states) == len(full)
    assert all(torch.equal(states[i], full[i]) for i in expected)


def test_row_05_false_selects_nothing_and_costs_nothing(case):
    one = case("llama", "lm")
    assert one.program.apply(lg.TapOutputs(entries=False)).fingerprint == one.program.fingerprint


def test_row_05_layers_count_blocks_and_mean_their_outputs(case):
    one = case("llama", "base")
    states = one.tapped("hidden_states", layers=[0]).hidden_states
    assert states[0] is None
    assert torch.equal(states[1], one.eager(output_hidden_states=True).hidden_states[1])


@pytest.mark.parametrize(("index", "option"), [(3, "entries"), (-4, "entries"), (2, "layers"), (-3, "layers")])
def test_row_06_out_of_range_is_an_index_error_that_names_the_range(case, index, option):
    one = case("llama", "lm")
    with pytest.raises(IndexError, match=r"-3 to 2|-2 to 1") as caught:
        one.program.apply(lg.TapOutputs("hidden_states", **{option: [index]}))
    assert isinstance(caught.value, lg.LayerGraphError)
    assert option in str(caught.value)


@pytest.mark.parametrize("empty", [[], (), set()])
def test_row_06_an_empty_selection_is_a_value_error(empty):
    with pytest.raises(ValueError, match="selects nothing"):
        lg.TapOutputs(entries=empty)


def test_row_07_none_is_skipped_as_upstream_skips_it_and_reported_as_r1(recorded):
    program = recorded.program.apply(lg.TapOutputs("side_values"))
    assert len(program(**recorded.inputs).side_values) == 2
    refusals = program.report().as_dict()["passes"][-1]["refusals"]
    assert any("R1" in str(item) and "None from 4 modules" in str(item) for item in refusals)


def test_row_07_attentions_under_sdpa_say_how_to_have_them(case):
    one = case("llama", "lm", "sdpa")
    with pytest.raises(ValueError, match="sdpa attention, which does not compute weights") as caught:
        one.program.apply(lg.TapOutputs("attentions"))
    assert 'attn_implementation="eager"' in str(caught.value)


def test_row_08_attentions_bring_cross_attentions_and_those_of_the_mask_decoder(case, same):
    t5 = case("t5", "seq2seq", "eager")
    out = t5.tapped("attentions")
    same(out, t5.eager(output_attentions=True))
    assert len(out.cross_attentions) == len(out.decoder_attentions) == 2


def test_row_08_companions_are_those_of_the_table():
    """mask_decoder_attentions come along as cross_attentions do; SAM itself is checked by the coverage table."""
    from layergraph.passes.tap_registry import _COMPANIONS

    assert _COMPANIONS["attentions"] == ("cross_attentions", "mask_decoder_attentions")


def test_row_09_any_registered_key_works(case):
    mixtral = case("mixtral", "lm", "eager")
    found = mixtral.tapped("router_logits").router_logits
    expected = mixtral.eager(output_router_logits=True).router_logits
    assert len(found) == 2
    assert torch.equal(found[0], expected[0])
    # Experts are traced as one batched product, eager sums them one by one: what follows them differs by rounding
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    bart = case("bart", "base", "eager")
    crossed = bart.tapped("cross_attentions").cross_attentions
    expected = bart.eager(output_attentions=True).cross_attentions
    assert all(torch.equal(a, b) for a, b in zip(crossed, expected, strict=True))


def test_row_10_the_models_own_output_class_and_tuples_in_field_order(case):
    one = case("llama", "lm")
    program = one.program.apply(lg.TapOutputs("hidden_states"))
    out, expected = program(**one.inputs), one.eager(output_hidden_states=True)
    assert type(out) is type(expected)
    as_tuple = program(**one.inputs, return_dict=False)
    theirs = one.eager(output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(theirs)
    assert torch.equal(as_tuple[0], theirs[0])
    assert all(torch.equal(a, b) for a, b in zip(as_tuple[1], theirs[1], strict=True))


def test_encoder_decoders_fill_their_fields(case, same):
    for model_type, kind in (("t5", "seq2seq"), ("bart", "base")):
        one = case(model_type, kind, "eager")
        out = one.tapped("hidden_states")
        same(out, one.eager(output_hidden_states=True))
        assert out.encoder_hidden_states[0].shape[1] != out.decoder_hidden_states[0].shape[1]


def test_dual_encoders_fill_each_towers_own_output(case, same):
    one = case("clip", "dual", "eager")
    same(one.tapped("hidden_states"), one.eager(output_hidden_states=True))
