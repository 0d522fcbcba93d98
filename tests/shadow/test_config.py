"""ShadowConfig as data: peft's fields, defaults and errors; which blocks a configuration means."""

from __future__ import annotations

import dataclasses

import pytest
from peft import LoraConfig, ShadowConfig

from layergraph.errors import LayerGraphError
from layergraph.trace.adapter_config import ShadowSettings, find_blocks, read_config

STACK = tuple(f"model.layers.{index}" for index in range(4))


def test_fields_and_defaults_are_pefts():
    theirs = {field.name: getattr(ShadowConfig(), field.name) for field in dataclasses.fields(ShadowConfig)}
    ours = dataclasses.asdict(ShadowSettings())
    common = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
    assert set(theirs) - set(ours) <= common | {"inference_mode"}
    assert {key: theirs[key] for key in ours} == ours
    assert ShadowConfig.from_peft_type(**read_config(ShadowConfig(r=3)).to_dict()).r == 3


BAD = [
    {"target_modules": r".*layers\.\d+", "layers_to_transform": [1]},
    {"target_modules": r".*layers\.\d+", "layers_pattern": "layers"},
    {"layers_pattern": "layers"},
    {"shadow_model": "some/model", "shadow_hidden_size": 32},
    {"shadow_model": "some/model", "shadow_num_hidden_layers": 1},
    {"shadow_model": "some/model", "shadow_num_attention_heads": 1},
    {"shadow_model": "some/model", "shadow_intermediate_size": 1},
]


@pytest.mark.parametrize("config", BAD, ids=str)
def test_what_peft_refuses_is_refused(config):
    with pytest.raises(ValueError):
        ShadowConfig(**config)
    with pytest.raises(ValueError) as caught:
        read_config(config)
    assert isinstance(caught.value, LayerGraphError) and caught.value.found


@pytest.mark.parametrize(
    "config",
    [{"r": 0}, {"r": -1}, {"update_hidden_size": 0}, {"shadow_dropout": 1.5}, {"rank": 8}, {"peft_type": "LORA"}],
    ids=str,
)
def test_other_faults_are_named(config):
    with pytest.raises(ValueError) as caught:
        read_config(config)
    assert next(iter(config)) in str(caught.value)


def test_other_kinds():
    with pytest.raises(ValueError, match="another kind"):
        read_config(LoraConfig())
    with pytest.raises(TypeError, match="no adapter configuration"):
        read_config(3)
    with pytest.raises(NotImplementedError, match="another task"):
        read_config({"task_type": "SEQ_2_SEQ_LM"})


@pytest.mark.parametrize(
    ("config", "indices"),
    [
        ({}, [0, 1, 2, 3]),
        ({"target_modules": ["layers.1", "layers.2"]}, [1, 2]),
        ({"target_modules": ["model.layers.3"]}, [3]),
        ({"target_modules": r".*\.[01]"}, [0, 1]),
        ({"exclude_modules": ["layers.0"]}, [1, 2, 3]),
        ({"exclude_modules": r".*\.3"}, [0, 1, 2]),
        ({"layers_to_transform": 2}, [2]),
        ({"layers_to_transform": [1, 2], "layers_pattern": "layers"}, [1, 2]),
        ({"layers_to_transform": [1, 2], "layers_pattern": ["h", "layers"]}, [1, 2]),
    ],
    ids=str,
)
def test_blocks(config, indices):
    found = find_blocks(read_config(config), STACK, by_index=True)
    assert found == tuple(STACK[index] for index in indices)


@pytest.mark.parametrize(
    "config",
    [{"target_modules": ["blocks.1"]}, {"layers_to_transform": [1], "layers_pattern": "h"}, {"exclude_modules": ".*"}],
    ids=str,
)
def test_no_block(config):
    with pytest.raises(LookupError, match="matches no block"):
        find_blocks(read_config(config), STACK, by_index=True)


def test_gaps():
    with pytest.raises(ValueError, match="not contiguous") as caught:
        find_blocks(read_config({"layers_to_transform": [0, 3]}), STACK, by_index=True)
    assert "model.layers.1, model.layers.2 left out" in str(caught.value)
    # peft 0.21 ignores layers_to_transform where target_modules names blocks in full: so must its checkpoints.
    config = {"target_modules": list(STACK), "layers_to_transform": [0, 3]}
    assert find_blocks(read_config(config), STACK, by_index=False) == STACK
