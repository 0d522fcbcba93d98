"""Models traced once for all tests of passes, and eager transformers as the oracle of what a tap must give."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

import layergraph as lg
from layergraph.testing.zoo import tiny_model
from layergraph.trace.flatten import flatten_output
from layergraph.trace.inputs import make_example_inputs


@dataclass(frozen=True)
class Case:
    """A tiny model, its untouched program and inputs for both."""

    model: nn.Module
    program: lg.Program
    inputs: Mapping[str, Any]

    def eager(self, inputs: Mapping[str, Any] | None = None, **flags: Any) -> Any:
        """What the model itself returns."""
        given = dict(self.inputs if inputs is None else inputs)
        if "use_cache" in inspect.signature(self.model.forward).parameters:
            flags["use_cache"] = False
        with torch.no_grad():
            return self.model(**given, **flags)

    def tapped(self, *args: Any, **options: Any) -> Any:
        """What the program returns with one more tap."""
        return self.program.apply(lg.TapOutputs(*args, **options))(**self.inputs)


@functools.cache
def _case(model_type: str, kind: str | None, attention: str | None, config: tuple[tuple[str, Any], ...]) -> Case:
    model = tiny_model(model_type, kind, attn_implementation=attention, **dict(config))
    inputs = make_example_inputs(model)
    return Case(model, lg.trace(model, inputs, cached=False, progress=False), inputs)


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """``case(model_type, kind=None, attention=None, **config)``; the same arguments give the same case."""

    def make(model_type: str, kind: str | None = None, attention: str | None = None, **config: Any) -> Case:
        return _case(model_type, kind, attention, tuple(sorted(config.items())))

    return make


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    """Both return the same fields holding the same bits; within ``atol`` where the graph sums in another order."""

    def check(found: Any, expected: Any, atol: float = 0.0) -> None:
        _, ours = flatten_output(found)
        _, theirs = flatten_output(expected)
        assert sorted(ours) == sorted(theirs)
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype, name
            if atol:
                torch.testing.assert_close(ours[name], value, rtol=0, atol=atol, msg=name)
            else:
                assert torch.equal(ours[name], value), name

    return check


# A model of our own under transformers' own machinery, with every field of a recorder in use ------------------------


class RecordedConfig(PreTrainedConfig):
    model_type = "recorded"

    def __init__(self, hidden_size: int = 8, n_blocks: int = 3, **kwargs: Any) -> None:
        self.hidden_size, self.n_blocks, self.vocab_size = hidden_size, n_blocks, 11
        super().__init__(**kwargs)


class Mixer(nn.Module):
    """Returns (hidden, weights, None or a side value): what recorders index from either end."""

    def __init__(self, width: int, has_side: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.side = nn.Linear(width, 3) if has_side else None

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        weights = torch.softmax(hidden @ hidden.transpose(1, 2), -1)
        side = self.side(hidden) if self.side is not None else None
        return weights @ self.linear(hidden), weights, side


class Dense(nn.Linear):
    pass


class Block(nn.Module):
    def __init__(self, width: int, has_side: bool) -> None:
        super().__init__()
        self.first, self.second = Mixer(width, has_side), Mixer(width, False)
        self.dense = Dense(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.first(hidden)[0]
        hidden = hidden + self.second(hidden)[0]
        return hidden + torch.tanh(self.dense(hidden))


class RecordedModel(PreTrainedModel):
    config_class = RecordedConfig
    _can_record_outputs = {  # noqa: RUF012 (as in transformers)
        "hidden_states": OutputRecorder(Block, num_hidden_layers_key="n_blocks"),
        "late_hidden_states": OutputRecorder(Block, capture_initial_hidden_state=False),
        "attentions": OutputRecorder(Mixer, index=1, layer_name="first"),
        "second_attentions": OutputRecorder(Mixer, index=1, layer_name=".second."),
        "weights_from_the_end": OutputRecorder(Mixer, index=-2, layer_name="blocks.1.first"),
        "side_values": OutputRecorder(Mixer, index=-1),
        "by_suffix": OutputRecorder(target_class=None, index=1, class_name="ks.2.first"),
        "plain_class": Mixer,
        "plain_name": "dense",
        "whole": OutputRecorder(Dense, index=4),
        "several": [OutputRecorder(Mixer, index=0, layer_name="second"), Dense],
    }

    def __init__(self, config: RecordedConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        # Only some blocks have the side value: the others record None there
        self.blocks = nn.ModuleList(Block(config.hidden_size, i != 1) for i in range(config.n_blocks))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    @capture_outputs
    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> BaseModelOutput:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))


@pytest.fixture(scope="session")
def recorded() -> Case:
    """A small model whose table uses every form of recorder, and nothing of it in its own return value."""
    torch.manual_seed(0)
    model = RecordedModel(RecordedConfig()).eval()
    inputs = {"input_ids": torch.randint(11, (2, 5))}
    return Case(model, lg.trace(model, inputs, cached=False, progress=False), inputs)


@pytest.fixture(scope="session")
def recorded_class() -> type[PreTrainedModel]:
    return RecordedModel
