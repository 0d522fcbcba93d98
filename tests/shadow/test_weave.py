"""weave-shadow against peft's uncached forward: families, kinds of blocks, seeds, targets, taps."""

from __future__ import annotations

import re

import pytest
import torch
from shadow_oracle import oracle, padded_batch, pair, tiny_decoder, weave, with_adapter

import layergraph as lg
from layergraph.passes.weave_shadow import WeaveShadow

FAMILIES = ("llama", "qwen3", "gpt2", "gptj", "gpt_neox", "gemma3_text", "mixtral")


@pytest.mark.parametrize("family", FAMILIES)
def test_uncached_logits_equal_pefts(family):
    base, peft_model = pair(family)
    program = weave(base, WeaveShadow(peft_model))
    inputs = padded_batch()
    expected = oracle(peft_model, inputs).logits
    # fp32, sums in the same order as peft's: nothing but the tolerance of the issue.
    torch.testing.assert_close(program(**inputs).logits, expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        plain = base(**inputs, use_cache=False).logits
    assert (plain - expected).abs().max() > 0.1, "the adapter must matter for the comparison to mean anything"
    # Other sizes, and no mask, as traced for none in particular.
    other = padded_batch(1, rows=1, length=13)
    torch.testing.assert_close(program(**other).logits, oracle(peft_model, other).logits, atol=1e-5, rtol=0)
    bare = {"input_ids": other["input_ids"]}
    torch.testing.assert_close(program(**bare).logits, oracle(peft_model, bare).logits, atol=1e-5, rtol=0)
    with program.disable_adapter():
        assert torch.equal(program(**inputs).logits, weave(base)(**inputs).logits)


@pytest.mark.parametrize("family", ("llama", "gptj", "mixtral"))
def test_untrained_adapter_leaves_logits_bit_equal(family):
    base = tiny_decoder(family)
    before = weave(base)
    after = before.apply(WeaveShadow(config={"shadow_alpha": 1.0}), verify=True)
    inputs = padded_batch()
    assert torch.equal(before(**inputs).logits, after(**inputs).logits)
    (record,) = after.ir.history
    assert record.errors == {"logits": 0.0}
    assert after.ir.source.fingerprint == before.fingerprint
    assert after.remove("weave-shadow").fingerprint == before.fingerprint


def test_peft_model_is_unwrapped_and_left_alone():
    base, peft_model = pair("llama")
    inputs = padded_batch()
    expected = oracle(peft_model, inputs).logits
    program = lg.optimize(peft_model, ["weave-shadow"])
    torch.testing.assert_close(program(**inputs).logits, expected, atol=1e-5, rtol=0)
    assert torch.equal(oracle(peft_model, inputs).logits, expected)
    assert program.ir.model.cls.endswith(":LlamaForCausalLM")
    assert torch.equal(program(**inputs, adapter=None).logits, weave(base)(**inputs).logits)


@pytest.mark.parametrize(
    ("config", "n_blocks"),
    [
        ({"target_modules": ["model.layers.1"]}, 1),
        ({"target_modules": ["layers.1", "layers.2"]}, 2),
        ({"target_modules": r".*\.layers\.[12]$"}, 2),
        ({"exclude_modules": ["layers.0"]}, 3),
        ({"exclude_modules": r".*layers\.[01]"}, 2),
    ],
)
def test_targets(config, n_blocks):
    base = tiny_decoder("llama", num_hidden_layers=4)
    peft_model = with_adapter(tiny_decoder("llama", num_hidden_layers=4), **config)
    program = weave(base, WeaveShadow(peft_model))
    assert len(program.ir.shadow.geometry["blocks"]) == n_blocks
    inputs = padded_batch()
    torch.testing.assert_close(program(**inputs).logits, oracle(peft_model, inputs).logits, atol=1e-5, rtol=0)


def test_targets_that_are_not_contiguous_are_refused():
    program = weave(tiny_decoder("llama", num_hidden_layers=4))
    before = program.fingerprint
    with pytest.raises(ValueError, match="not contiguous") as caught:
        program.apply(WeaveShadow(config={"target_modules": ["layers.0", "layers.2"]}))
    assert caught.value.path == "model.layers.1"
    assert caught.value.pass_name == "weave-shadow"
    with pytest.raises(LookupError, match="matches no block"):
        program.apply(WeaveShadow(config={"target_modules": ["layers.9"]}))
    assert program.fingerprint == before and not program.ir.history


@pytest.mark.parametrize(
    "config",
    [
        {"r": 3, "update_hidden_size": 5},
        {"shadow_num_hidden_layers": 2},
        {"shadow_hidden_size": 32, "shadow_num_attention_heads": 2, "shadow_intermediate_size": 48},
        {"share_embeddings": False},
        {"modules_to_save": ["lm_head"]},
        {"shadow_alpha": 0.25},
    ],
    ids=lambda config: next(iter(config)),
)
@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_backbones(family, config):
    if family == "gpt2" and "modules_to_save" in config:
        config = {"modules_to_save": ["lm_head"], "shadow_hidden_size": 32, "shadow_num_attention_heads": 2}
    base, peft_model = pair(family, **config)
    if "modules_to_save" in config:
        with torch.no_grad():
            peft_model.get_output_embeddings().modules_to_save["default"].weight.mul_(1.5).add_(0.01)
    program = weave(base, WeaveShadow(peft_model))
    inputs = padded_batch()
    torch.testing.assert_close(program(**inputs).logits, oracle(peft_model, inputs).logits, atol=1e-5, rtol=0)
    assert torch.equal(program(**inputs, adapter=None).logits, weave(base)(**inputs).logits)


def test_seeds_from_embeddings_and_positions():
    base, peft_model = pair("llama")
    batch = padded_batch()
    embeddings = base.get_input_embeddings()(batch["input_ids"]).detach()
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    inputs = {"inputs_embeds": embeddings, "attention_mask": batch["attention_mask"], "position_ids": positions}
    program = weave(base, WeaveShadow(peft_model), example_inputs=inputs)
    torch.testing.assert_close(program(**inputs).logits, oracle(peft_model, inputs).logits, atol=1e-5, rtol=0)
    inputs = {**batch, "position_ids": positions}
    program = weave(base, WeaveShadow(peft_model), example_inputs=inputs)
    torch.testing.assert_close(program(**inputs).logits, oracle(peft_model, inputs).logits, atol=1e-5, rtol=0)


def test_half_precision_base_keeps_a_float32_adapter():
    base = tiny_decoder("llama").to(torch.bfloat16)
    peft_model = with_adapter(tiny_decoder("llama").to(torch.bfloat16))
    program = weave(base, WeaveShadow(peft_model))
    dtypes = {item.name: item.dtype for item in program.ir.forward.interface.inputs}
    assert dtypes["shadow_layers_0_down_weight"] == "float32"
    assert dtypes["shadow_backbone_norm_weight"] == "bfloat16"
    inputs = padded_batch()
    # The same ops in the same order: bit-equal, so no tolerance for bfloat16 is needed.
    assert torch.equal(program(**inputs).logits, oracle(peft_model, inputs).logits)


@pytest.mark.parametrize("tap_first", (True, False))
def test_taps_see_the_injected_state_whichever_pass_came_first(tap_first):
    base, peft_model = pair("llama")
    taps = [
        lg.TapOutputs("hidden_states"),
        lg.TapOutputs("model.layers.1", at="input"),
        lg.TapOutputs("model.layers.0"),
    ]
    item = WeaveShadow(peft_model)
    program = weave(base, *([*taps, item] if tap_first else [item, *taps]))
    inputs = padded_batch()
    found, expected = program(**inputs), oracle(peft_model, inputs, output_hidden_states=True)
    assert len(found.hidden_states) == len(expected.hidden_states) == 3
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    entered = {}
    block = peft_model.base_model.model.model.layers[1].base_layer
    handle = block.register_forward_pre_hook(lambda module, args: entered.update(hidden=args[0]))
    oracle(peft_model, inputs)
    handle.remove()
    torch.testing.assert_close(found["model.layers.1.input"], entered["hidden"], atol=1e-5, rtol=0)
    torch.testing.assert_close(found["model.layers.0"], expected.hidden_states[1], atol=1e-5, rtol=0)
    assert program.remove("tap-outputs").ir.shadow is not None


def test_shadow_states_can_be_tapped():
    base, peft_model = pair("llama")
    program = weave(base, WeaveShadow(peft_model), lg.TapOutputs("shadow.**"))
    inputs = padded_batch()
    found = program(**inputs)
    seen = {}
    layer = peft_model.base_model.model.model.layers[0]
    original = layer.shadow_update
    layer.shadow_update = lambda h, s, name: seen.setdefault("s1", original(h, s, name))
    oracle(peft_model, inputs)
    torch.testing.assert_close(found["shadow.layers.0.update"], seen["s1"], atol=1e-5, rtol=0)
    torch.testing.assert_close(found["shadow.seed"], peft_model.base_model._seed_shadow_state, atol=1e-5, rtol=0)
    assert found["shadow.layers.1.inject"].shape == seen["s1"].shape


def test_two_shadows_are_refused_and_merging_says_why():
    base, peft_model = pair("llama")
    program = weave(base, WeaveShadow(peft_model))
    with pytest.raises(ValueError, match="woven in already"):
        program.apply(WeaveShadow(peft_model))
    for method in (program.merge_adapter, program.merge_and_unload, program.unmerge_adapter):
        with pytest.raises(NotImplementedError, match="unload_shadow"):
            method()
    with pytest.raises(ValueError, match="two ways"):
        WeaveShadow(peft_model, config={})
    with pytest.raises(ValueError, match="no adapter"):
        weave(base).apply("weave-shadow")


def test_text_names_the_shadow():
    base, peft_model = pair("llama")
    program = weave(base, WeaveShadow(peft_model))
    text = str(program)
    assert "shadow.layers.0.inject" in text and "layergraph.shadow_update(" in text
    assert re.search(r"shadow\.backbone\.layers\.0\.self_attn", text)
    assert "made by   weave-shadow" in program.explain("shadow_inject_default")
