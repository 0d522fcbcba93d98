"""A program stands where the traced tower stood (3-patch-embed, "In place")."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import layergraph as lg
from layergraph.errors import NotSupportedError
from layergraph.testing.zoo import tiny_model
from layergraph.trace.inputs import make_example_inputs


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl"])
def test_the_tower_generates_inside_its_model_with_images_of_different_size(model_type: str, tmp_path) -> None:
    model = tiny_model(model_type, "vlm")
    inputs = make_example_inputs(model)
    grids = inputs["image_grid_thw"]
    assert len(grids) == 2 and not torch.equal(grids[0], grids[1])
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs, **options)
    tower = model.model.visual
    program = lg.optimize(tower, passes=["fuse-patch-embed"], strict=True)
    loaded = lg.load(program.save(tmp_path / "tower"))
    for replacement in (program.as_module(), loaded.as_module()):
        model.model.visual = replacement
        assert torch.equal(model.generate(**inputs, **options), expected)
    model.model.visual = tower
    assert torch.equal(model.generate(**inputs, **options), expected)


def test_the_module_has_what_code_around_a_tower_reads() -> None:
    tower = tiny_model("qwen2_vl", "vision")
    module = lg.trace(tower).as_module()
    assert module.dtype == tower.dtype and module.device == tower.device
    assert module.spatial_merge_size == tower.spatial_merge_size
    assert type(module.config) is type(tower.config)
    assert module.state_dict().keys() == tower.state_dict().keys()
    assert not module.training


def test_a_model_with_a_rewritten_tower_saves_and_loads_checkpoints_as_before(tmp_path) -> None:
    model = tiny_model("qwen2_vl", "vlm")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.model.visual = lg.optimize(model.model.visual, passes=["fuse-patch-embed"]).as_module()
    state = model.state_dict()
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())
    model.load_state_dict({name: tensor + 1 for name, tensor in before.items()})
    assert all(torch.equal(tensor, before[name] + 1) for name, tensor in model.state_dict().items())


def test_a_model_with_a_rewritten_tower_can_be_copied() -> None:
    """As EMA, and many trainers, do."""
    model = tiny_model("qwen2_vl", "vlm")
    model.model.visual = lg.optimize(model.model.visual, passes=["fuse-patch-embed"], progress=False).as_module()
    inputs = make_example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(**inputs).logits, expected)


@pytest.mark.parametrize("write", [pickle.dumps, lambda it: torch.save(it, io.BytesIO())])
def test_what_cannot_be_pickled_says_how_to_save_it(write) -> None:
    program = lg.trace(torch.nn.Linear(2, 2), torch.randn(3, 2), progress=False)
    for it in (program, torch.nn.Sequential(program.as_module())):
        with pytest.raises(NotSupportedError, match=r"cannot be pickled[\s\S]*program.save\(folder\)"):
            write(it)
