"""Tiny decoders and their programs, traced once for all tests of this folder."""

from functools import cache

import pytest
import torch

import layergraph as lg
from layergraph.testing.zoo import tiny_model


@cache
def pair(model_type):
    """The eager model, which is the oracle without its cache, and its program."""
    model = tiny_model(model_type, "lm")
    return model, lg.trace(model, cached=True)


@pytest.fixture(scope="session", params=["qwen3", "gemma3_text"])
def each(request):
    """A model that holds everything, and one that holds windows of 4 tokens beside that."""
    return pair(request.param)


@pytest.fixture(scope="session")
def qwen3():
    return pair("qwen3")


@pytest.fixture(scope="session")
def gemma3():
    return pair("gemma3_text")


@pytest.fixture
def batch():
    """Three prompts of 5, 8 and 9 tokens, padded on the left."""
    ids = torch.randint(3, 90, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :1] = 0, 0
    return ids, mask


@pytest.fixture
def reference():
    """Logits of an eager model for whole rows, without a cache."""

    def logits(model, ids, mask=None):
        mask = torch.ones_like(ids) if mask is None else mask
        place = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False).logits

    return logits
