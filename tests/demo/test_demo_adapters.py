"""The two bundled adapters are small, load with peft and here alike, and have learnt what they say."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from peft import PeftModel

import layergraph as lg
from layergraph.demo.run import ADAPTERS, load_language_model

NAMES = ("code", "reference")
PROMPT = "If an object"
OWN_CODE = """def add_entry(self, name, value=None):
    if name in self._entries:
        raise ValueError('entry %r is there already' % name)
    self._entries[name] = value
    return self._entries[name]

def __len__(self):
    return len(self._entries)
"""


@cache
def woven() -> lg.Program:
    program = lg.trace(load_language_model()[0], progress=False)
    program = program.apply(lg.WeaveShadow(ADAPTERS / "code", name="code"), progress=False)
    program.add_adapter(ADAPTERS / "reference", "reference")
    return program


@cache
def with_peft() -> PeftModel:
    model = PeftModel.from_pretrained(load_language_model()[0], str(ADAPTERS / "code"), adapter_name="code")
    model.load_adapter(str(ADAPTERS / "reference"), "reference")
    return model.eval()


def record(name: str) -> dict[str, Any]:
    return json.loads((ADAPTERS / name / "training.json").read_text(encoding="utf-8"))


@torch.no_grad()
def loss(adapter: str | None, text: str, context: int = 256) -> float:
    """As the script measures it: whole windows of the context, each predicted from its own first token on."""
    tok = load_language_model()[1]
    ids = torch.tensor([*tok(text)["input_ids"], tok.eos_token_id])
    windows = ids[: max(1, len(ids) // context) * context].view(-1, min(context, len(ids)))
    logits = woven()(input_ids=windows, adapter=adapter).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


@pytest.mark.parametrize("name", NAMES)
def test_files(name: str) -> None:
    folder = ADAPTERS / name
    assert {"adapter_config.json", "adapter_model.safetensors", "training.json"} == {p.name for p in folder.iterdir()}
    assert (folder / "adapter_model.safetensors").stat().st_size < 700_000
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("SHADOW", None)


@pytest.mark.parametrize("name", NAMES)
def test_held_out_loss_is_below_the_base(name: str) -> None:
    made = record(name)
    held = made["held_out"]
    assert held["adapter"]["loss"] < held["base"]["loss"] - 1
    found = {adapter: loss(adapter, made["excerpt"]) for adapter in (None, *NAMES)}
    assert found[None] == pytest.approx(held["base"]["excerpt_loss"], abs=0.01)
    assert found[name] == pytest.approx(held["adapter"]["excerpt_loss"], abs=0.01)
    assert min(found, key=lambda adapter: found[adapter]) == name  # the other adapter does not help as much


def test_loss_on_code_of_our_own() -> None:
    assert loss("code", OWN_CODE) < loss(None, OWN_CODE) - 1


@pytest.mark.parametrize("name", NAMES)
def test_peft_and_layergraph_agree(name: str) -> None:
    ids = load_language_model()[1](record(name)["excerpt"], return_tensors="pt")["input_ids"][:, :128]
    with_peft().set_adapter(name)
    with torch.no_grad():
        theirs = with_peft()(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(woven()(input_ids=ids, adapter=name).logits, theirs, rtol=0, atol=1e-5)


def test_switching_changes_the_text_and_not_the_graph() -> None:
    tok = load_language_model()[1]
    inputs, fingerprint = tok(PROMPT, return_tensors="pt"), woven().fingerprint
    options = {"max_new_tokens": 24, "do_sample": False}
    texts = {name: tok.decode(woven().generate(**inputs, adapter=name, **options)[0]) for name in (None, *NAMES)}
    assert len(set(texts.values())) == 3
    assert "raise" in texts["code"] and "__name__" in texts["reference"]
    assert woven().fingerprint == fingerprint
    for name in NAMES:  # without a cache: peft's own cached tokens are wrong with this transformers
        with_peft().set_adapter(name)
        theirs = with_peft().generate(**inputs, use_cache=False, **options)[0]
        assert tok.decode(theirs) == texts[name]
