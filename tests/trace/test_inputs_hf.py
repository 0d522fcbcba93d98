"""Example inputs, what of their sizes may vary, packed attention, and that no context leaves a trace behind."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

from layergraph.errors import InputError, NotSupportedError, TraceError
from layergraph.testing.zoo import build_model, tiny_config, tiny_model
from layergraph.trace.attention import packed_attentions, segment_mask, varlen_attention
from layergraph.trace.export import trace
from layergraph.trace.hf_context import hf_trace_context
from layergraph.trace.inputs import batch_like, dynamic_dims, make_example_inputs
from layergraph.trace.isolate import isolate
from layergraph.trace.prologue import find_prologue

torch.set_num_threads(1)


def test_text_inputs_and_their_labels() -> None:
    model = tiny_model("llama")
    inputs = make_example_inputs(model)
    assert inputs["input_ids"].shape == (2, 7)
    assert not set(inputs["input_ids"].unique().tolist()) & {model.config.eos_token_id, model.config.bos_token_id}
    labels = {0: "batch", 1: "sequence"}
    assert dynamic_dims(model, inputs) == {"input_ids": labels, "attention_mask": labels}
    other = batch_like(model, inputs, {"batch": 3, "sequence": 13})
    assert other.keys() == inputs.keys() and other["input_ids"].shape == (3, 13)


def test_architecture_fixes_images_and_frames() -> None:
    model = tiny_model("videomae")
    assert dynamic_dims(model, make_example_inputs(model)) == {"pixel_values": {0: "batch"}}
    with pytest.raises(InputError, match="no size named 'sequence'"):
        batch_like(model, make_example_inputs(model), {"sequence": 4})


@pytest.mark.parametrize(
    ("model_type", "shape"),
    [("whisper", (2, 16, 256)), ("speech_to_text", (2, 48, 80)), ("canary", (2, 48, 16)), ("moonshine", (2, 3200))],
)
def test_audio_of_encoder_decoders_comes_with_text_to_decode(model_type: str, shape: tuple[int, ...]) -> None:
    inputs = make_example_inputs(build_model(tiny_config(model_type), "AutoModel"))
    assert next(iter(inputs.values())).shape == shape
    assert inputs["decoder_input_ids"].shape == (2, 5)


def test_patches_and_grids_agree() -> None:
    model = tiny_model("qwen2_vl")
    inputs = make_example_inputs(model)
    assert len(inputs["grid_thw"].unique(dim=0)) == 2, "two images of different size"
    other = batch_like(model, inputs, {"images": 3, "patches": 40})
    assert other["hidden_states"].shape[0] == 40 == int(other["grid_thw"].prod(1).sum())
    with pytest.raises(InputError, match="patches are no"):
        batch_like(model, inputs, {"images": 3, "patches": 8})
    prepared = find_prologue(model, inputs)(inputs)
    labels = dynamic_dims(model, prepared)
    assert labels["hidden_states"] == labels["position_ids"] == {0: "patches"}


def test_follows_device_and_dtype() -> None:
    model = tiny_model("qwen2_vl", dtype=torch.bfloat16).to("meta")
    inputs = make_example_inputs(model)
    assert inputs["hidden_states"].is_meta and inputs["hidden_states"].dtype is torch.bfloat16
    prepared = find_prologue(model, inputs)(inputs)
    assert all(value.is_meta for value in prepared.values() if value is not None)


def test_heads_that_need_padding_take_a_batch_of_one() -> None:
    model = tiny_model("llama", "classifier")
    model.config.pad_token_id = None
    inputs = make_example_inputs(model)
    assert inputs["input_ids"].shape[0] == 1
    assert dynamic_dims(model, inputs)["input_ids"] == {1: "sequence"}


def test_says_when_inputs_are_beyond_it() -> None:
    with pytest.raises(TraceError, match="no config"):
        make_example_inputs(torch.nn.Linear(2, 2))


# ---- packed attention ----


def test_mask_is_block_diagonal() -> None:
    mask = segment_mask(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5)[0, 0]
    assert torch.equal(mask, torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool())


def test_equal_windows_share_one_mask_outside_the_layers() -> None:
    graph = trace(tiny_model("qwen2_5_vl", vision_config={"depth": 4})).forward.exported.graph
    attentions = [node for node in graph.nodes if "scaled_dot_product" in str(node.target)]
    masks = [node.args[3] for node in attentions]
    assert len(attentions) == 4 and len(set(masks)) == 2, "windowed three times, whole once"
    for mask in masks:
        stack = mask.meta.get("nn_module_stack") or {}
        assert not any("blocks" in path for path, _ in stack.values()), "made in a layer, equal layers would differ"


@pytest.mark.parametrize("model_type", ["qwen2_vl", "exaone4_5", "minimax_m3_vl"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_attention_is_eager_attention(model_type: str, attention: str) -> None:
    model = tiny_model(model_type, attn_implementation=attention)
    inputs = make_example_inputs(model)
    prepared = find_prologue(model, inputs)(inputs)
    twin = isolate(model)
    weights = []
    for module in packed_attentions(twin).values():
        module.register_forward_hook(lambda m, a, out: weights.append(out[1] if isinstance(out, tuple) else None))
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        with varlen_attention(twin):
            found = twin(**prepared).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, expected.abs().max().item()))
    # By transformers 5.17 that tower is not packed: its images see each other.
    if attention == "eager" and model_type == "minimax_m3_vl" and weights:
        n_first = int(inputs["grid_thw"][0].prod())
        assert weights[0] is not None and (weights[0][:, :, :n_first, n_first:] == 0).all()
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(weights[0].shape[:-1]))


def test_other_implementations_are_refused() -> None:
    model = isolate(tiny_model("qwen2_vl"))
    next(iter(packed_attentions(model).values())).config._attn_implementation_internal = "flex_attention"
    with pytest.raises(NotSupportedError, match="flex_attention"), hf_trace_context(model):
        pass
    text = isolate(tiny_model("llama"))
    text.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(NotSupportedError, match="flash_attention_2"), hf_trace_context(text):
        pass


# ---- nothing survives ----


def _registries() -> tuple[dict, dict]:
    from transformers.integrations.moe import ExpertsInterface
    from transformers.modeling_utils import AttentionInterface

    return dict(AttentionInterface._global_mapping), dict(ExpertsInterface._global_mapping)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "mixtral"])
def test_context_restores_on_exceptions(model_type: str) -> None:
    model = tiny_model(model_type)
    twin = isolate(model)
    registries = _registries()
    configs = {path: id(getattr(module, "config", None)) for path, module in twin.named_modules()}
    settings = copy.deepcopy(model.config.to_dict())
    with pytest.raises(ZeroDivisionError), hf_trace_context(twin):
        assert _registries() != registries
        raise ZeroDivisionError
    assert _registries() == registries
    assert configs == {path: id(getattr(module, "config", None)) for path, module in twin.named_modules()}
    assert not any(module._forward_pre_hooks for module in twin.modules())
    assert model.config.to_dict() == settings


def test_another_thread_sees_nothing() -> None:
    model = tiny_model("qwen2_vl")
    inputs = make_example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    found: list[torch.Tensor] = []

    def work() -> None:
        with torch.no_grad():
            found.append(model(**inputs).last_hidden_state)

    with hf_trace_context(isolate(model)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
