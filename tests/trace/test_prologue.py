"""The prologue of packed vision towers: equal to transformers' own helpers, plain data, named errors."""

from __future__ import annotations

import json

import pytest
import torch

from layergraph.errors import FormatError, InputError
from layergraph.testing.zoo import tiny_model
from layergraph.trace.hf_vision_grid import (
    vision_cu_seqlens,
    vision_interpolation,
    vision_position_ids,
    vision_windows,
)
from layergraph.trace.inputs import batch_like, make_example_inputs
from layergraph.trace.prologue import Prologue, PrologueKind, find_prologue, register_prologue

torch.set_num_threads(1)
GRIDS = torch.tensor([[1, 4, 6], [3, 2, 10], [1, 14, 8]])


@pytest.mark.parametrize("merge_temporal", [False, True])
def test_boundaries_as_upstream(merge_temporal: bool) -> None:
    from transformers.vision_utils import get_vision_cu_seqlens

    found = vision_cu_seqlens(GRIDS, merge_temporal=merge_temporal)
    assert found.dtype is torch.int32
    assert torch.equal(found, get_vision_cu_seqlens(GRIDS, merge_temporal=merge_temporal))


@pytest.mark.parametrize("include_temporal", [False, True])
@pytest.mark.parametrize("merge", [1, 2])
def test_positions_as_upstream(merge: int, include_temporal: bool) -> None:
    from transformers.vision_utils import get_vision_position_ids

    found = vision_position_ids(GRIDS, [merge] * 3, include_temporal=include_temporal)
    assert torch.equal(found, get_vision_position_ids(GRIDS, merge, include_temporal=include_temporal))


@pytest.mark.parametrize("side", [2, 3, 4, 8])
def test_windows_as_upstream(side: int) -> None:
    from transformers.vision_utils import get_vision_window_index

    index, boundaries = vision_windows(GRIDS, 2, side)
    expected_index, expected_boundaries = get_vision_window_index(GRIDS, 2, side * 2 * 14, 14)
    assert torch.equal(index, expected_index)
    assert torch.equal(boundaries, expected_boundaries)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding", ["border", "zeros"])
def test_interpolation_as_upstream(mode: str, align_corners: bool, padding: str) -> None:
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    indices, weights = vision_interpolation(GRIDS, 6, mode=mode, align_corners=align_corners, padding=padding, merge=2)
    expected = get_vision_interpolation_indices_and_weights(GRIDS, 6, mode, align_corners, 2, padding)
    assert torch.equal(indices, expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=0, atol=1e-6)


def test_is_plain_data_and_needs_no_model() -> None:
    model = tiny_model("qwen2_5_vl")
    inputs = make_example_inputs(model)
    prologue = find_prologue(model, inputs)
    assert prologue is not None and prologue.name == "hf-vision-grid"
    again = Prologue.from_dict(json.loads(json.dumps(prologue.to_dict())))
    assert again == prologue
    other = batch_like(model, inputs, {"images": 3})
    del model
    made, wanted = again(other), prologue(other)
    assert made.keys() == wanted.keys() >= {"cu_seqlens", "position_ids", "window_index", "cu_window_seqlens"}
    for name, value in wanted.items():
        assert value is made[name] or torch.equal(value, made[name])
    assert "cu_seqlens" not in other, "the caller's mapping is left alone"


def test_derives_what_the_tower_reads() -> None:
    def made(model_type: str) -> dict:
        model = tiny_model(model_type)
        inputs = make_example_inputs(model)
        prologue = find_prologue(model, inputs)
        assert prologue is not None
        return {name: value for name, value in prologue(inputs).items() if name not in inputs or value is None}

    assert made("qwen2_vl").keys() == {"cu_seqlens", "position_ids", "grid_thw"}
    assert made("qwen3_vl").keys() == {"cu_seqlens", "position_ids", "interp_indices", "interp_weights", "grid_thw"}
    assert made("glm4v").keys() == {"cu_seqlens", "position_ids"}, "glm4v looks image sizes up in grid_thw"
    assert made("minimax_m3_vl")["position_ids"].shape[1] == 3


@pytest.mark.parametrize(
    ("model_type", "kind"), [("llama", "lm"), ("vit", "base"), ("clip", "vision"), ("t5", "seq2seq")]
)
def test_other_models_need_none(model_type: str, kind: str) -> None:
    model = tiny_model(model_type, kind)
    assert find_prologue(model, make_example_inputs(model)) is None


def test_bad_inputs_are_named() -> None:
    model = tiny_model("qwen2_vl")
    inputs = make_example_inputs(model)
    prologue = find_prologue(model, inputs)
    assert prologue is not None
    with pytest.raises(InputError, match="patches do not match grid_thw"):
        prologue(inputs | {"hidden_states": inputs["hidden_states"][:-4]})
    with pytest.raises(InputError, match="does not divide"):
        prologue({"hidden_states": inputs["hidden_states"][:15], "grid_thw": torch.tensor([[1, 3, 5]])})
    with pytest.raises(InputError, match="grid_thw is wrong"):
        prologue({"hidden_states": inputs["hidden_states"]})
    with pytest.raises(InputError, match="grid_thw is wrong"):
        prologue(inputs | {"grid_thw": torch.tensor([1, 2, 2])})


def test_unknown_and_newer_are_named() -> None:
    with pytest.raises(FormatError, match="no input prologue is named 'no-such'"):
        Prologue.from_dict({"name": "no-such", "version": 1, "params": {}})
    with pytest.raises(FormatError, match="version that this layergraph cannot run"):
        Prologue.from_dict({"name": "hf-vision-grid", "version": 99, "params": {}})
    with pytest.raises(FormatError, match="not an input prologue"):
        Prologue.from_dict({"name": "hf-vision-grid"})


def test_names_are_taken_once() -> None:
    with pytest.raises(InputError, match="exists"):
        register_prologue(PrologueKind("hf-vision-grid", 1, lambda m, i: None, lambda p, i: dict(i)))
