"""The shadow alone: equal to peft's detached model, generates, saves completely, and is a program of its own."""

from __future__ import annotations

import copy
import subprocess

import pytest
import torch
from shadow_oracle import padded_batch, tiny_decoder, weave, with_adapter

import layergraph as lg
from layergraph.passes.weave_shadow import WeaveShadow
from layergraph.trace.adapter_detach import DetachedShadow

CONFIGS = {
    "llama": {},
    "gemma3_text": {"shadow_num_hidden_layers": 2},
    "qwen3": {"shadow_hidden_size": 32},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_detached_equals_pefts(family):
    base = tiny_decoder(family)
    peft_model = with_adapter(copy.deepcopy(base), **CONFIGS[family])
    program = weave(base, WeaveShadow(peft_model))
    detached = program.detach_shadow()
    inputs = padded_batch()
    with torch.no_grad():
        expected = peft_model.base_model.unload_shadow()(**inputs, use_cache=False).logits
        torch.testing.assert_close(detached(**inputs, use_cache=False).logits, expected, atol=1e-5, rtol=0)
        alone = padded_batch(rows=1)["input_ids"]
        made = detached.generate(alone, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for _ in range(6):
            token = detached(alone, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            alone = torch.cat([alone, token], 1)
    # Greedy, one token after the other without a cache; a token that ends the text pads the rest.
    length = made.shape[1]
    assert torch.equal(made, alone[:, :length])


def test_shared_and_copied_tensors():
    base = tiny_decoder("llama")
    program = weave(base, WeaveShadow(with_adapter(copy.deepcopy(base))))
    table = base.get_input_embeddings().weight
    shared, copied = program.detach_shadow(), program.unload_shadow("default", copy=True)
    assert shared.get_input_embeddings().weight.data_ptr() == table.data_ptr()
    assert copied.get_input_embeddings().weight.data_ptr() != table.data_ptr()
    inputs = padded_batch()
    with torch.no_grad():
        expected = shared(**inputs).logits
        assert torch.equal(copied(**inputs).logits, expected)
    state = shared.state_dict()
    assert "backbone.embed_tokens.weight" in state and "head.weight" in state
    with pytest.raises(LookupError, match="no adapter 'other'"):
        program.detach_shadow("other")
    small = lg.trace(copied, cached=False)
    torch.testing.assert_close(small(**inputs).logits, expected, atol=1e-5, rtol=0)
    assert small.ir.n_parameters < program.ir.n_parameters + 10**6


@pytest.mark.parametrize("family", CONFIGS)
def test_row11_saved_complete_and_a_program_that_generates(family, tmp_path):
    """Embeddings included, tied or shared with the base as they may be; the program of it saves and loads as well."""
    base = tiny_decoder(family)
    program = weave(base, WeaveShadow(with_adapter(copy.deepcopy(base), **CONFIGS[family])))
    inputs = padded_batch()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for copied in (False, True):
        detached = program.detach_shadow(copy=copied)
        expected = detached.generate(**inputs, use_cache=False, **options)
        detached.save_pretrained(tmp_path / f"shadow-{copied}")
        again = DetachedShadow.from_pretrained(tmp_path / f"shadow-{copied}")
        with torch.no_grad():
            assert torch.equal(again(**inputs).logits, detached(**inputs).logits)
    small = lg.trace(again)
    assert torch.equal(small.generate(**inputs, **options), expected)
    small.save(tmp_path / "small")
    assert torch.equal(lg.load(tmp_path / "small").generate(**inputs, **options), expected)
    cls, shape = type(again.backbone), tmp_path / "shadow-False" / "shadow.json"
    shape.write_text(shape.read_text().replace(f"{cls.__module__}:{cls.__qualname__}", f"{subprocess.__name__}:Popen"))
    with pytest.raises(lg.LayerGraphError, match="is not there"):  # a file must not choose what is called
        DetachedShadow.from_pretrained(tmp_path / "shadow-False")
    (tmp_path / "shadow-True" / "model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(ValueError, match="saved shadow cannot be read"):
        DetachedShadow.from_pretrained(tmp_path / "shadow-True")


@pytest.mark.slow
def test_row11_a_package_of_its_own(tmp_path):
    base = tiny_decoder("llama")
    program = weave(base, WeaveShadow(with_adapter(copy.deepcopy(base))))
    detached = program.detach_shadow(copy=True)
    exported = lg.trace(detached, cached=False).exported
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "shadow.pt2"))
    runner = torch._inductor.aoti_load_package(path)
    inputs = padded_batch(3, rows=2, length=12)
    with torch.no_grad():
        expected = detached(**inputs).logits
    torch.testing.assert_close(runner(**inputs)["logits"], expected, atol=1e-5, rtol=0)


def test_detached_classifier():
    base = tiny_decoder("llama", "AutoModelForSequenceClassification", num_labels=3)
    peft_model = with_adapter(copy.deepcopy(base), task_type="SEQ_CLS")
    inputs = padded_batch()
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, base.config.pad_token_id)
    program = weave(base, WeaveShadow(peft_model), example_inputs=inputs)
    with torch.no_grad():
        expected = peft_model.base_model.unload_shadow()(**inputs).logits
        found = program.detach_shadow()(**inputs).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
