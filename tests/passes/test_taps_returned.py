"""Tuples that transformers models collect in code of their own, or return in fields that no table names."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import layergraph as lg
from layergraph.testing.coverage import check_model_type
from layergraph.testing.coverage_overrides import OVERRIDES
from layergraph.testing.zoo import build_model, tiny_config
from layergraph.trace.flatten import flatten_output
from layergraph.trace.inputs import make_example_inputs


def _program(model_type: str, recipe: str, attention: str = "eager"):
    config = tiny_config(model_type, **OVERRIDES.get(model_type, {}))
    model = build_model(config, recipe, attn_implementation=attention)
    inputs = make_example_inputs(model)
    return model, inputs, lg.trace(model, inputs, cached=False, progress=False)


def _eager(model: nn.Module, inputs, **flags):
    if "use_cache" in inspect.signature(model.forward).parameters:
        flags["use_cache"] = False
    with torch.no_grad():
        return flatten_output(model(**inputs, **flags))[1]


@pytest.mark.parametrize(
    ("model_type", "recipe"),
    [
        ("groupvit", "GroupViTModel"),  # stages collected by hand inside a nested output; groupings nothing else uses
        ("maskformer", "MaskFormerModel"),  # feature maps, and one tuple of all the others in a row
        ("mask2former", "Mask2FormerModel"),  # a field that is called after no key
        ("sam3", "Sam3Model"),  # vision_, encoder_ and decoder_ fields named in code; sizes read on the host
        ("seamless_m4t_v2", "SeamlessM4Tv2Model"),  # text_decoder's tuple is decoder_hidden_states
        ("t5gemma2", "T5Gemma2Model"),  # an encoder without a table of its own
        ("resnet", "ResNetModel"),  # no table at all
    ],
)
def test_every_field_that_eager_fills_holds_its_bits(model_type, recipe):
    model, inputs, program = _program(model_type, recipe)
    plain = _eager(model, inputs)
    tapped = program
    for key in ("hidden_states", "attentions"):
        expected = {
            name: value
            for name, value in _eager(model, inputs, **{f"output_{key}": True}).items()
            if name not in plain and name.rpartition(".")[2].isdigit()
        }
        if not expected:
            continue
        out = program.apply(lg.TapOutputs(key))(**inputs)
        found = flatten_output(out)[1]
        assert type(out) is type(model(**inputs))
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        tapped = tapped.apply(lg.TapOutputs(key))
    assert tapped.ir.history
    while tapped.ir.history:
        tapped = tapped.remove("tap-outputs")
    assert tapped.fingerprint == program.fingerprint


def test_entries_layers_and_inputs_of_a_tuple_collected_by_hand(tmp_path):
    model, inputs, program = _program("bloom", "BloomModel")
    expected = _eager(model, inputs, output_hidden_states=True)
    out = program.apply(lg.TapOutputs("hidden_states", entries=[0, -1]))(**inputs).hidden_states
    assert torch.equal(out[0], expected["hidden_states.0"])
    assert out[1] is None
    assert torch.equal(out[2], expected["hidden_states.2"])
    last = program.apply(lg.TapOutputs("hidden_states", layers=-1))(**inputs).hidden_states[-1]
    assert torch.equal(model.ln_f(last), expected["hidden_states.2"])
    given = program.apply(lg.TapOutputs("hidden_states", layers=1, at="input"))(**inputs).hidden_states[2]
    assert torch.equal(given, expected["hidden_states.1"])
    program.save(tmp_path / "saved")
    loaded = lg.load(tmp_path / "saved").apply(lg.TapOutputs("hidden_states"))
    assert torch.equal(loaded(**inputs).hidden_states[1], expected["hidden_states.1"])


def test_attentions_of_code_without_a_table_say_how_to_have_them():
    _, _, program = _program("opt", "AutoModel", "sdpa")
    with pytest.raises(ValueError, match="return None there") as caught:
        program.apply(lg.TapOutputs("attentions"))
    assert 'attn_implementation="eager"' in str(caught.value)


def test_what_the_graph_returns_without_being_asked_is_named():
    _, _, program = _program("bridgetower", "BridgeTowerModel")
    with pytest.raises(ValueError, match="returns hidden_states already"):
        program.apply(lg.TapOutputs("hidden_states"))


def test_one_recorder_of_several_classes_records_each():
    row = check_model_type("inkling2_loop_text")
    assert row.taps["state"] == "pass", row.taps
    assert {"hidden_states", "router_logits"} <= set(row.taps["keys"])


def test_weights_of_packed_images_are_one_block_diagonal_matrix():
    model, inputs, program = _program("minimax_m3_vl", "MiniMaxM3VLVisionModel:vision_config")
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions[0]
    found = program.apply(lg.TapOutputs("attentions"))(**inputs).attentions[0]
    start = 0
    for value in expected:
        end = start + value.shape[-1]
        torch.testing.assert_close(found[..., start:end, start:end], value, rtol=0, atol=1e-6)
        start = end
    assert start == found.shape[-1]


def test_r2_what_code_between_modules_makes_is_left_alone_by_name():
    model, inputs, program = _program("swinv2", "Swinv2Model")
    tapped = program.apply(lg.TapOutputs("hidden_states"))
    asked = _eager(model, inputs, output_hidden_states=True)
    found = flatten_output(tapped(**inputs))[1]
    left = {refusal[0] for refusal in tapped.ir.history[-1].refusals if refusal[1] == "R2"}
    assert left == {name for name in asked if name.startswith("reshaped_hidden_states.")}
    assert all(torch.equal(found[name], value) for name, value in asked.items() if name not in left)


class Stages(nn.Module):
    """Feature maps of the stages that ``chosen`` names, in a list, as timm's networks give them."""

    def __init__(self, chosen: tuple[int, ...]) -> None:
        super().__init__()
        self.stages, self.chosen = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), chosen

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        maps = []
        for stage in self.stages:
            x = stage(x).tanh()
            maps.append(x)
        return [maps[index] for index in self.chosen]


class Backbone(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.net = Stages((2,))
        self.post_init()

    def forward(self, x: torch.Tensor, output_hidden_states: bool | None = None) -> BaseModelOutput:
        hidden = None
        if output_hidden_states:
            self.net.chosen = (0, 1, 2)
            hidden = tuple(self.net(x))
            self.net.chosen = (2,)
        return BaseModelOutput(last_hidden_state=hidden[-1] if hidden else self.net(x)[0], hidden_states=hidden)


def test_a_list_that_a_flag_makes_longer_is_not_taken_for_the_same() -> None:
    model, x = Backbone(PreTrainedConfig()).eval(), torch.randn(2, 8)
    tapped = lg.trace(model, {"x": x}, progress=False).apply(lg.TapOutputs("hidden_states"))
    with torch.no_grad():
        expected = model(x, output_hidden_states=True).hidden_states
    found = tapped(x).hidden_states
    for place, value in enumerate(found):
        assert value is None or torch.equal(value, expected[place]), place
    refused = {refusal[0] for refusal in tapped.ir.history[-1].refusals}
    assert len(refused) == sum(value is None for value in found)
