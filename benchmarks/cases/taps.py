"""Taps under Inductor: all hidden states against none, and only=True against the model cut by hand."""

from __future__ import annotations

import functools
import os

import torch
from registry import Case, Forms, register
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import layergraph as lg

# The 135M shape has 30 layers; compiling all of them takes minutes, so the number can be chosen.
LAYERS = int(os.environ.get("LAYERGRAPH_BENCH_LAYERS", "30"))


def _model(cls: type, n_layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=n_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return cls(config).eval()


def _compiled(program: lg.Program, ids: torch.Tensor):
    module = torch.compile(program.exported.module(), dynamic=False)
    mask = torch.ones_like(ids)
    return lambda: module(input_ids=ids, attention_mask=mask)


def _all_states(length: int) -> Forms:
    program = lg.trace(_model(LlamaForCausalLM, LAYERS), cached=False, progress=False)
    tapped = program.apply(lg.TapOutputs("hidden_states"))
    ids = torch.randint(49152, (1, length))
    return {"tapped": _compiled(tapped, ids), "untapped": _compiled(program, ids)}


class Cut(nn.Module):
    """The model cut by hand behind a block: no norm, no head."""

    def __init__(self, model: LlamaModel, n_layers: int) -> None:
        super().__init__()
        self.model = model
        model.layers = model.layers[:n_layers]
        model.norm = nn.Identity()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state


def _only(length: int) -> Forms:
    keep = max(1, LAYERS // 2)
    ids = torch.randint(49152, (1, length))
    model = _model(LlamaForCausalLM, LAYERS)
    tap = lg.TapOutputs("hidden_states", entries=[keep], only=True)
    program = lg.trace(model, cached=False, progress=False).apply(tap)
    by_hand = Cut(_model(LlamaForCausalLM, LAYERS).model, keep).eval()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names = {name: {0: "batch", 1: "sequence"} for name in inputs}
    hand = lg.trace(by_hand, inputs, dynamic=names, progress=False)
    return {"only=True": _compiled(program, ids), "cut by hand": _compiled(hand, ids)}


for _length in (1, 512):
    _repeats = 41 if _length == 1 else 11
    register(
        Case(
            f"taps/all-hidden-states-T{_length}",
            functools.partial(_all_states, _length),
            (("tapped", "untapped"),),
            "within 3 % of the untapped program",
            _repeats,
        )
    )
register(
    Case(
        "taps/only-T64",
        functools.partial(_only, 64),
        (("only=True", "cut by hand"),),
        "at most 1.05 times the model cut by hand",
        21,
    )
)
