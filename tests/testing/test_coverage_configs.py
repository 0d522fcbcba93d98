"""Sizes that the coverage check tries, and what it knows of single model types."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, BertConfig, DetrConfig, SwinConfig

from layergraph.testing import coverage, coverage_configs
from layergraph.testing.coverage import check_model_type
from layergraph.testing.coverage_configs import build_sized, find_recipe, list_sizes
from layergraph.testing.coverage_overrides import OVERRIDES
from layergraph.testing.zoo_shrink import KINDS, shrink_config, shrink_only
from layergraph.trace.inputs import make_example_inputs

TINY, OWN_WIDTHS, OWN_SIZES = list_sizes()


def test_all_kinds_of_sizes_are_what_shrink_config_does():
    config = SwinConfig()
    assert shrink_only(KINDS, config, {}).to_dict() == shrink_config(config).to_dict()


def test_what_is_not_asked_for_stays():
    config = BertConfig()
    deep = shrink_only({"depth"}, config, {})
    assert deep.num_hidden_layers == 2
    assert (deep.hidden_size, deep.vocab_size, deep.max_position_embeddings) == (768, 30522, 512)
    wide = shrink_only(KINDS - {"widths"}, config, {"hidden_act": "relu"})
    assert (wide.hidden_size, wide.num_attention_heads, wide.hidden_act) == (768, 12, "relu")
    assert wide.vocab_size < 100


def test_sizes_that_a_parent_gives_a_config_inside_stay():
    config = DetrConfig(backbone_config={"model_type": "resnet", "hidden_sizes": [8, 16, 32, 64]})
    assert shrink_only({"depth"}, config, {}).backbone_config.hidden_sizes == [8, 16, 32, 64]


def test_a_model_type_that_is_right_tiny_is_checked_once(monkeypatch):
    tried = []

    def building(model_type, sizes):
        tried.append(sizes.name)
        return build_sized(model_type, sizes)

    monkeypatch.setattr(coverage, "build_sized", building)
    row = check_model_type("bert")
    assert (row.stage, row.taps["state"], row.sizes) == ("done", "pass", "tiny")
    assert tried == ["tiny"]


def test_the_next_sizes_are_tried_where_eager_fails():
    """LiLT divides its width by a factor, for the width of the layout."""
    row = check_model_type("lilt")
    assert (row.stage, row.taps["state"]) == ("done", "pass")
    assert row.sizes != "tiny"


def test_inputs_that_cannot_be_made_end_the_trying(monkeypatch):
    tried = []

    def building(model_type, sizes):
        tried.append(sizes.name)
        return torch.nn.Linear(2, 2)

    monkeypatch.setattr(coverage, "build_sized", building)
    row = check_model_type("bert")
    assert (row.stage, row.taps["state"], tried) == ("inputs", "untraced", ["tiny"])


def test_the_first_row_stays_where_no_sizes_are_better(monkeypatch):
    def failing(model_type, sizes):
        raise ValueError(f"no {sizes.name}")

    monkeypatch.setattr(coverage, "build_sized", failing)
    row = check_model_type("bert")
    assert (row.stage, row.sizes, row.reason) == ("config", "tiny", "ValueError: no tiny")


def test_a_large_model_is_counted_and_not_built(monkeypatch):
    monkeypatch.setattr(coverage_configs, "build_model", lambda *args, **kwargs: pytest.fail("it was built"))
    with pytest.raises(ValueError, match="parameters with own sizes"):
        build_sized("llama", OWN_SIZES)


def test_sizes_under_the_cap_are_built():
    assert build_sized("lilt", OWN_WIDTHS).config.hidden_size == 768


@pytest.mark.parametrize("model_type", ["sam_mask_decoder", "layoutxlm"])
def test_a_config_without_a_model_says_so(model_type):
    with pytest.raises(LookupError, match="no model class for this config"):
        find_recipe(model_type)


def test_overrides_are_for_model_types_that_there_are():
    assert [name for name in OVERRIDES if name not in CONFIG_MAPPING] == []


# One for each kind of reason; the coverage check goes through all.
@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v2",
        "cohere_compass_text",
        "esm",
        "xmod",
        "step3p5",
        "mistral_large4_text",
        "molmo2",
        "reformer",
        "zamba",
    ],
)
def test_a_model_with_its_overrides_runs(model_type):
    model = build_sized(model_type, TINY)
    with torch.no_grad():
        model(**make_example_inputs(model))
