"""Row 17 of taps: transformers' patch registry resolves recorders to the classes that the model really has."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from transformers import monkey_patching
from transformers.models.llama import modeling_llama

import layergraph as lg
from layergraph.testing.zoo import tiny_config
from layergraph.trace.hf_captures import find_replacement


class OtherLayer(torch.nn.Module):
    """A decoder layer that is no subclass of the one it replaces."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, **kwargs):
        return hidden_states + torch.tanh(self.linear(hidden_states))


class SubLayer(modeling_llama.LlamaDecoderLayer):
    pass


@pytest.fixture
def registry():
    """The patch registry, empty before and after, and Llama's class-level table watched over."""
    monkey_patching.clear_patch_mapping()
    before = copy.deepcopy(modeling_llama.LlamaModel._can_record_outputs)
    yield monkey_patching
    monkey_patching.clear_patch_mapping()
    modeling_llama.LlamaModel._can_record_outputs = before


def _model(patched: bool = True):
    with monkey_patching.apply_patches() if patched else contextlib.nullcontext():
        return modeling_llama.LlamaModel(tiny_config("llama")).eval()


def _states(model):
    inputs = {"input_ids": torch.randint(3, 90, (2, 5))}
    program = lg.trace(model, inputs, cached=False, progress=False).apply(lg.TapOutputs("hidden_states"))
    return program(**inputs).hidden_states, inputs


@pytest.mark.parametrize("name", ["LlamaDecoderLayer", "Decoder.ayer$"])
@pytest.mark.parametrize("replacement", [OtherLayer, SubLayer])
def test_row_17_recorders_find_the_replacement_and_class_state_is_untouched(registry, name, replacement):
    registry.register_patch_mapping({name: replacement})
    table = copy.deepcopy(modeling_llama.LlamaModel._can_record_outputs)
    model = _model()
    assert type(model.layers[0]) is replacement
    found, inputs = _states(model)
    assert modeling_llama.LlamaModel._can_record_outputs == table
    assert registry.get_patch_mapping() == {name: replacement}
    # The oracle: upstream's own resolution, which changes class state for good (put back by the fixture)
    registry.patch_output_recorders(model)
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
    assert len(found) == len(expected) == 3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_row_17_exact_names_beat_patterns_and_patterns_are_searched_for(registry):
    patches = {"Decoder": OtherLayer, "LlamaDecoderLayer": SubLayer}
    assert find_replacement("LlamaDecoderLayer", patches) is SubLayer
    assert find_replacement("MistralDecoderLayer", patches) is OtherLayer
    assert find_replacement("LlamaMLP", patches) is None
    assert find_replacement("Llama(", {"Llama(": SubLayer}) is SubLayer  # no regex, taken as a plain name


def test_row_17_the_registry_refuses_doubles_and_unknown_names(registry):
    registry.register_patch_mapping({"LlamaDecoderLayer": OtherLayer})
    with pytest.raises(ValueError, match="already has a patch mapping"):
        registry.register_patch_mapping({"LlamaDecoderLayer": SubLayer})
    registry.register_patch_mapping({"LlamaDecoderLayer": SubLayer}, overwrite=True)
    found, _ = _states(_model())
    assert len(found) == 3
    with pytest.raises(ValueError, match="not found"):
        registry.unregister_patch_mapping(["GPT2Block"])


def test_row_17_class_state_left_behind_by_a_former_replacement_is_harmless(registry):
    registry.register_patch_mapping({"LlamaDecoderLayer": SubLayer})
    registry.patch_output_recorders(_model())
    registry.clear_patch_mapping()
    assert modeling_llama.LlamaModel._can_record_outputs["hidden_states"] is SubLayer  # left behind by upstream
    found, _ = _states(_model(patched=False))
    assert len(found) == 3


def test_row_17_nothing_changes_when_the_trace_fails(registry):
    registry.register_patch_mapping({"LlamaDecoderLayer": OtherLayer})
    table = copy.deepcopy(modeling_llama.LlamaModel._can_record_outputs)
    with pytest.raises(lg.LayerGraphError):
        lg.trace(_model(), {"input_ids": torch.zeros(2, 5, 7)}, progress=False)
    assert modeling_llama.LlamaModel._can_record_outputs == table
    assert registry.get_patch_mapping() == {"LlamaDecoderLayer": OtherLayer}
