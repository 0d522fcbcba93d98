"""Training: gradients of every adapter tensor equal peft's, the base gets none; auxiliary loss; dropout."""

from __future__ import annotations

import copy

import pytest
import torch
from shadow_oracle import padded_batch, tiny_decoder, weave, with_adapter

from layergraph.passes.weave_shadow import WeaveShadow


def labelled(batch):
    labels = batch["input_ids"].clone()
    labels[batch["attention_mask"] == 0] = -100
    return {**batch, "labels": labels}


def peft_gradients(peft_model, inputs):
    peft_model.zero_grad()
    out = peft_model(**inputs, use_cache=False)
    out.loss.backward()
    grads = {}
    for path, tensor in peft_model.named_parameters():
        if tensor.requires_grad and tensor.grad is not None:
            grads[path.replace(".modules_to_save.default", "")] = tensor.grad
    return out, grads


def compare(program, peft_model, inputs, *, same_seed=False):
    torch.manual_seed(7)
    expected, wanted = peft_gradients(peft_model, inputs)
    torch.manual_seed(7)
    found = program(**inputs)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)
    found.loss.backward()
    adapter = program.adapters["default"]
    got = {key: tensor.grad for key, tensor in adapter.tensors.items() if tensor.grad is not None}
    assert got.keys() == wanted.keys()
    for key, grad in wanted.items():
        torch.testing.assert_close(got[key], grad, atol=1e-5, rtol=0, msg=lambda text, key=key: f"{key}: {text}")
    assert not [
        name for name, tensor in program.state_dict().items() if tensor.requires_grad or tensor.grad is not None
    ]
    return found, expected


@pytest.mark.parametrize("family", ("llama", "gpt2"))
@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_gradients_equal_pefts(family, dropout):
    base = tiny_decoder(family)
    peft_model = with_adapter(copy.deepcopy(base), shadow_dropout=dropout, auxiliary_loss_weight=0.5)
    if family == "gpt2":
        # Its own dropout draws numbers at other places in a graph than in eager.
        for module in (*base.modules(), *peft_model.modules()):
            if isinstance(module, torch.nn.Dropout) and module.p == 0.1:
                module.p = 0.0
        for config in (base.config, peft_model.base_model.model.config):
            config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
        peft_model = with_adapter(copy.deepcopy(base), shadow_dropout=dropout, auxiliary_loss_weight=0.5)
    inputs = labelled(padded_batch())
    program = weave(base.train(), WeaveShadow(peft_model), example_inputs=inputs, training=True)
    found, expected = compare(program, peft_model.train(), inputs)
    torch.testing.assert_close(found["shadow_loss"], expected.shadow_loss, atol=1e-5, rtol=0)
    assert not found["shadow_loss"].requires_grad
    n_trained = sum(tensor.requires_grad for tensor in program.adapters["default"].tensors.values())
    assert n_trained == len(program.adapters["default"].parameters()) > 20
    assert all(parameter.requires_grad for parameter in base.parameters()), "the source model is never changed"


def test_dropout_is_alive():
    base = tiny_decoder("llama").train()
    config = {"task_type": "CAUSAL_LM", "shadow_dropout": 0.5, "init_weights": False, "shadow_alpha": 1.0}
    batch = padded_batch()
    program = weave(base, WeaveShadow(config=config), example_inputs=batch, training=True)
    assert not torch.equal(program(**batch).logits, program(**batch).logits)
    still = weave(base.eval(), WeaveShadow(config=config), example_inputs=batch)
    assert torch.equal(still(**batch).logits, still(**batch).logits)


def test_auxiliary_loss_in_evaluation():
    base = tiny_decoder("llama")
    peft_model = with_adapter(copy.deepcopy(base), auxiliary_loss_weight=0.25)
    inputs = labelled(padded_batch())
    program = weave(base, WeaveShadow(peft_model), example_inputs=inputs)
    with torch.no_grad():
        expected = peft_model(**inputs, use_cache=False)
        plain = base(**inputs, use_cache=False)
    found = program(**inputs)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(found["shadow_loss"], peft_model.base_model.last_shadow_loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(program(**inputs, adapter=None).loss, plain.loss, atol=0, rtol=0)


def test_saved_modules_train_too():
    base = tiny_decoder("llama")
    peft_model = with_adapter(copy.deepcopy(base), modules_to_save=["lm_head"], shadow_dropout=0.0)
    inputs = labelled(padded_batch())
    program = weave(base.train(), WeaveShadow(peft_model), example_inputs=inputs, training=True)
    compare(program, peft_model.train(), inputs)


@pytest.mark.parametrize("labels", ("classes", "regression", "several"))
def test_sequence_classification(labels):
    count = 1 if labels == "regression" else 3
    base = tiny_decoder("llama", "AutoModelForSequenceClassification", num_labels=count)
    peft_model = with_adapter(copy.deepcopy(base), task_type="SEQ_CLS", shadow_dropout=0.0, auxiliary_loss_weight=0.5)
    batch = padded_batch()
    right = {key: value.flip(1) for key, value in batch.items()}
    for item in (batch, right):
        item["input_ids"] = item["input_ids"].masked_fill(item["attention_mask"] == 0, base.config.pad_token_id)
    target = {
        "classes": torch.tensor([0, 2, 1]),
        "regression": torch.tensor([0.5, -1.0, 2.0]),
        "several": torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]]),
    }[labels]
    inputs = {**batch, "labels": target}
    program = weave(base.train(), WeaveShadow(peft_model), example_inputs=inputs, training=True)
    compare(program, peft_model.train(), inputs)
    for item in (right, {**right, "attention_mask": right["attention_mask"] * torch.tensor([[1], [1], [0]])}):
        item = {**item, "labels": target}
        with torch.no_grad():
            expected = peft_model(**item, use_cache=False)
        found = program(**item)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.loss, expected.loss, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["shadow_loss"], expected.shadow_loss, atol=1e-5, rtol=0)
