"""Rewriting a model of Llama-3.1-405B's widths on fake tensors, against tracing it."""

from __future__ import annotations

import os

import torch
from registry import Case, Forms, register
from transformers import LlamaConfig, LlamaForCausalLM

import layergraph as lg

LAYERS = int(os.environ.get("LAYERGRAPH_BENCH_LAYERS_405B", "126"))


def _build() -> Forms:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=LAYERS,
        num_attention_heads=128,
        num_key_value_heads=8,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    found = {"program": lg.trace(model, cached=False, progress=False)}

    def trace() -> None:
        found["program"] = lg.trace(model, cached=False, progress=False)

    def rewrite() -> None:
        taps = lg.TapOutputs("hidden_states", entries=[2, LAYERS // 2, -3])
        lg.optimize(found["program"], passes=[taps, lg.FusePatchEmbed()], progress=False)

    return {"trace": trace, "taps and fusion": rewrite}


register(
    Case("rewriting/405b", _build, (("taps and fusion", "trace"),), "at most 15 % of the time of the trace", repeats=2)
)
