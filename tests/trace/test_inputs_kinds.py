"""Example inputs by kind of model: each recipe traces without inputs of the caller's, and equals eager at two sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layergraph.api import trace
from layergraph.errors import TraceError
from layergraph.testing.coverage_inputs import example_inputs
from layergraph.testing.zoo import build_model, tiny_config
from layergraph.trace.flatten import flatten_output
from layergraph.trace.inputs import batch_like, dynamic_dims, make_example_inputs

torch.set_num_threads(1)


def _outputs(call: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    given = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return flatten_output(call(**given))[1]


@pytest.mark.parametrize(
    ("model_type", "recipe", "names", "other"),
    [
        ("omniasr_ctc", "OmniASRCTCModel", ["input_values"], {"batch": 3}),
        ("fun_asr_nano_encoder", "FunAsrNanoEncoder", ["input_features", "input_features_mask"], {"batch": 3}),
        ("speecht5_hifigan", "SpeechT5HifiGan", ["spectrogram"], {"batch": 3, "length": 9}),
        ("timesfm", "TimesFmModel", ["past_values", "past_values_padding", "freq"], {"batch": 3}),
        ("patchtsmixer", "PatchTSMixerModel", ["past_values"], {"batch": 3}),
        ("kosmos_2_5_vision_model", "Kosmos2_5VisionModel", ["flattened_patches", "attention_mask"], {"batch": 3}),
        ("bros", "BrosModel", ["bbox"], {"batch": 3, "sequence": 11}),
        ("flava_multimodal_model", "FlavaMultimodalModel", ["hidden_states"], {"batch": 3, "sequence": 11}),
        ("radio", "RadioModel", ["pixel_values"], {"batch": 3}),
    ],
)
def test_traced_without_inputs_and_equal_to_eager(
    model_type: str, recipe: str, names: list[str], other: dict[str, int]
) -> None:
    model = build_model(tiny_config(model_type), recipe, attn_implementation="eager")
    program = trace(model, cached=False, progress=False)
    inputs = make_example_inputs(model)
    assert set(names) <= inputs.keys()
    labels = {label for dims in dynamic_dims(model, inputs).values() for label in dims.values()}
    assert other.keys() <= labels
    for given in (inputs, batch_like(model, inputs, other)):
        expected, found = _outputs(model, given), _outputs(program, given)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


def test_patches_as_small_images_in_one_row() -> None:
    # Its config's merge size is that of the projector; the tower itself reads patches row by row
    model = build_model(tiny_config("paddleocr_vl_vision"), "PaddleOCRVisionModel")
    inputs = example_inputs(model)
    program = trace(model, inputs, cached=False, progress=False)
    fewer = {"pixel_values": inputs["pixel_values"][:, :24], "grid_thw": torch.tensor([[1, 2, 4], [1, 4, 4]])}
    for given in (inputs, fewer):
        expected, found = _outputs(model, given), _outputs(program, given)
        torch.testing.assert_close(found["last_hidden_state"], expected["last_hidden_state"], rtol=1e-4, atol=1e-4)


def test_inputs_of_the_caller_are_tried_without_a_cache() -> None:
    # What is traced is the model without a cache; with one, made by default, this one fails with eager attention
    model = build_model(tiny_config("dory"), "AutoModel", attn_implementation="eager")
    inputs = make_example_inputs(model)
    program = trace(model, inputs, cached=False, progress=False)
    expected, found = _outputs(model, inputs | {"use_cache": False}), _outputs(program, inputs)
    torch.testing.assert_close(found["last_hidden_state"], expected["last_hidden_state"], rtol=1e-4, atol=1e-4)


def test_padding_is_where_the_mask_says() -> None:
    model = build_model(tiny_config("siglip2"), "Siglip2Model")
    inputs = make_example_inputs(model)
    mask = inputs["pixel_attention_mask"].bool()
    assert torch.equal(mask.sum(1), inputs["spatial_shapes"].prod(1)) and not mask.all()
    assert not inputs["pixel_values"][~mask].any() and inputs["pixel_values"][mask].any(-1).all()


def test_clips_beside_text() -> None:
    assert make_example_inputs(build_model(tiny_config("xclip"), "XCLIPModel"))["pixel_values"].shape == (
        2,
        4,
        3,
        32,
        32,
    )


def test_boxes_are_boxes() -> None:
    bbox = make_example_inputs(build_model(tiny_config("udop"), "UdopModel"))["bbox"]
    assert (bbox[..., :2] <= bbox[..., 2:]).all() and bbox.min() >= 0 and bbox.max() <= 1


def test_says_that_a_class_has_no_forward() -> None:
    with pytest.raises(TraceError, match="has no forward of its own"):
        make_example_inputs(build_model(tiny_config("chameleon_vqgan"), "ChameleonVQVAE"))
