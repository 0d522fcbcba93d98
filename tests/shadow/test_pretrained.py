"""Backbones that were trained before: a plain checkpoint, and one with a projection to the base's width."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from shadow_oracle import oracle, padded_batch, tiny_decoder, weave, with_adapter

from layergraph.passes.weave_shadow import WeaveShadow
from layergraph.testing import check_pass

INPUTS = padded_batch()
SMALL = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def small():
    return tiny_decoder("llama", "AutoModel", **SMALL)


def projected(folder, small, width=64, drop=None):
    folder.mkdir()
    config = {"model_type": "causal_lm_with_hidden_projection", "shadow_model_config": small.config.to_dict()}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"shadow_model.{key}": value for key, value in small.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    tensors["shadow_hidden_projection.weight"] = torch.randn(width, 32, generator=generator) / 6
    if drop:
        tensors.pop(drop)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("kind", ("plain", "projected"))
def test_pretrained_backbones(small, tmp_path, kind):
    base = tiny_decoder("llama")
    if kind == "plain":
        small.save_pretrained(tmp_path / "shadow")
    source = str(tmp_path / "shadow") if kind == "plain" else projected(tmp_path / "shadow", small)
    peft_model = with_adapter(copy.deepcopy(base), shadow_model=source)
    program = weave(base, WeaveShadow(peft_model))
    torch.testing.assert_close(program(**INPUTS).logits, oracle(peft_model, INPUTS).logits, atol=1e-5, rtol=0)
    # A fresh adapter keeps the checkpoint's own weights; only what it lacks is new.
    fresh = weave(base, WeaveShadow(config={"shadow_model": source}))
    key = "base_model.shadow_backbone.default.layers.0.mlp.up_proj.weight"
    assert torch.equal(fresh.adapters["default"].tensors[key], small.state_dict()["layers.0.mlp.up_proj.weight"])
    if kind == "projected":
        key = "base_model.shadow_projection.default.weight"
        weight = load_file(tmp_path / "shadow" / "model.safetensors")["shadow_hidden_projection.weight"]
        assert torch.equal(fresh.adapters["default"].tensors[key], weight)
    slots = {slot.key: slot.frozen for slot in program.ir.shadow.slots}
    assert [key for key, frozen in slots.items() if frozen] == [
        "base_model.shadow_backbone.default.embed_tokens.weight"
    ], "embeddings of a pretrained backbone stay as they are, as in peft"


def test_checkpoints_that_do_not_fit(small, tmp_path):
    program = weave(tiny_decoder("llama"))

    def apply(source):
        return program.apply(WeaveShadow(config={"shadow_model": source}))

    with pytest.raises(ValueError, match="projection of the shadow checkpoint does not fit") as caught:
        apply(projected(tmp_path / "wide", small, width=48))
    assert caught.value.expected == "shadow width 32 to base width 64" and caught.value.found == "32 to 48"
    with pytest.raises(ValueError, match="has no projection"):
        apply(projected(tmp_path / "bare", small, drop="shadow_hidden_projection.weight"))
    with pytest.raises(ValueError, match="do not fit its own config"):
        apply(projected(tmp_path / "part", small, drop="shadow_model.norm.weight"))
    with pytest.raises(LookupError, match="cannot be read"):
        apply(str(tmp_path / "nowhere"))
    assert not program.ir.history and program.ir.shadow is None


def test_what_every_pass_owes(twins):
    """check_pass: find is pure, torch's tools take the result, saving and removing lead back."""
    checked = check_pass(WeaveShadow(twins.folders["first"]), weave(twins.base), n_sites=4)
    assert checked.removed
    assert checked.after.remove(WeaveShadow(twins.folders["first"])).fingerprint == checked.before.fingerprint
