"""DualCache by itself: rows C1 to C4 of the dual cache, on geometries made by hand."""

import pytest
import torch

from layergraph.errors import InputError, NotSupportedError
from layergraph.ir.cache_geometry import CacheGeometry, CacheGroup, CacheState, CacheTensor
from layergraph.runtime.cache import BUCKET, CHUNK, DualCache

FULL, WINDOW = CacheGroup("full"), CacheGroup("window8", window=8)


def tensors(layer, group, heads=2, features=4):
    return [CacheTensor(f"cache_{layer}_{role}", layer, role, group, heads, features, "float32") for role in "kv"]


# Layer 2 is skipped; layers differ in heads, width and reach.
GEOMETRY = CacheGeometry((FULL, WINDOW), (*tensors(0, "full"), *tensors(1, "window8", heads=1), *tensors(3, "full", 3)))
STATEFUL = CacheGeometry(
    (FULL,), tuple(tensors(0, "full")), (CacheState("cache_1_conv_0", 1, "conv_0", (6, 3), "float32"),)
)


def write(cache, real):
    """Do what a program does with the tensors it is given: write, for every token, 1 + its position."""
    real = torch.as_tensor(real).bool()
    cache.reserve(real)
    order = cache.n_tokens[:, None] + real.cumsum(1) - 1 if cache.is_initialized else real.cumsum(1) - 1
    tokens = torch.where(real, order, -1)
    views, places = cache.views(real), cache.slots(tokens, real)
    rows = torch.arange(real.shape[0])[None, :]
    for group in cache.geometry.groups:
        index = (places[group.write].t(), rows)
        views[group.positions].index_put_(index, tokens.t())
        for tensor in cache.geometry.tensors:
            if tensor.group == group.name:
                value = (1.0 + tokens.t())[..., None, None].expand(-1, -1, tensor.heads, tensor.features)
                views[tensor.name].index_put_(index, value)
    for state in cache.geometry.states:
        views[state.name].add_(real.sum(1)[:, None, None])
    cache.advance(real)


def held(cache, group=FULL):
    """Positions that each row holds in ``group``, sorted; every value must be the one written for its position."""
    step = torch.ones(cache.batch_size, 1, dtype=torch.bool)
    views = cache.views(step)
    positions = views[group.positions]
    for tensor in cache.geometry.tensors:
        if tensor.group == group.name:
            values = views[tensor.name][..., 0, 0]
            assert torch.equal(values[positions >= 0], 1.0 + positions[positions >= 0])
    return [sorted(row[row >= 0].tolist()) for row in positions.t()]


def test_each_layer_has_its_own_heads_and_reach_and_a_skipped_one_nothing():
    cache = DualCache(GEOMETRY, batch_size=2, capacity=300)
    shapes = {name: tuple(view.shape) for name, view in cache.views(torch.ones(2, 1, dtype=torch.bool)).items()}
    assert shapes["cache_0_k"] == (BUCKET, 2, 2, 4) and shapes["cache_3_v"] == (BUCKET, 2, 3, 4)
    assert shapes["cache_1_k"][1:] == (2, 1, 4)
    assert not any(name.startswith("cache_2") for name in shapes)
    assert cache.is_sliding == [False, True, False] and len(cache) == 3
    write(cache, torch.ones(2, 100))
    write(cache, torch.ones(2, 100))
    assert cache.views(torch.ones(2, 1, dtype=torch.bool))["cache_1_k"].shape[0] == 8 + CHUNK  # not 200


def test_batch_operations_keep_every_tensor_in_step():
    cache = DualCache(GEOMETRY)
    write(cache, [[0, 0, 1, 1], [1, 1, 1, 1]])
    cache.batch_repeat_interleave(2)
    assert held(cache) == [[0, 1]] * 2 + [[0, 1, 2, 3]] * 2 and cache.n_tokens.tolist() == [2, 2, 4, 4]
    cache.reorder_cache(torch.tensor([3, 0, 0, 2]))
    assert cache.n_tokens.tolist() == [4, 2, 2, 4] and held(cache, WINDOW)[1] == [0, 1]
    cache.batch_select_indices(torch.tensor([True, False, True, False]))
    assert held(cache) == [[0, 1, 2, 3], [0, 1]] and cache.batch_size == 2
    write(cache, [[1], [1]])
    assert held(cache) == [[0, 1, 2, 3, 4], [0, 1, 2]]


def test_reset_forgets_tokens_and_keeps_storage():
    cache = DualCache(GEOMETRY)
    write(cache, torch.ones(2, 10))
    before = [tensor.data_ptr() for tensor in cache]
    cache.reset()
    assert cache.length == 0 and held(cache) == [[], []] and [tensor.data_ptr() for tensor in cache] == before
    write(cache, torch.ones(2, 3))
    assert held(cache) == [[0, 1, 2]] * 2


@pytest.mark.parametrize("count", [-3, 7])  # three fewer; seven long
def test_crop_takes_back_the_last_tokens_padding_among_them(count):
    cache = DualCache(GEOMETRY)
    write(cache, [[0, 0] + [1] * 6, [1] * 8])
    write(cache, [[1, 1], [1, 0]])
    cache.crop(count)
    assert cache.length == 7 and cache.n_tokens.tolist() == [5, 7]
    assert held(cache) == [list(range(5)), list(range(7))]


def test_windows_keep_enough_for_assisted_decoding_and_say_when_they_do_not():
    cache = DualCache(GEOMETRY)
    for _ in range(3):
        write(cache, torch.ones(1, CHUNK))
    cache.activate_past_recording()
    assert cache.is_croppable
    cache.crop(-CHUNK)
    assert held(cache, WINDOW)[0][-8:] == list(range(2 * CHUNK - 8, 2 * CHUNK))
    with pytest.raises(InputError, match="no longer holds what lies before"):
        cache.crop(-1)  # one more would reach behind what was overwritten
    assert cache.length == 2 * CHUNK
    write(cache, torch.ones(1, 5))
    cache.crop(-5)
    cache.crop(-(2 * CHUNK))  # all: nothing lies before
    assert cache.length == 0 and held(cache, WINDOW) == [[]]


def test_a_row_that_waits_keeps_its_window():
    cache = DualCache(GEOMETRY)
    write(cache, torch.ones(2, 10))
    for _ in range(3):
        write(cache, torch.tensor([[1], [0]]).expand(2, CHUNK))
    assert set(range(3, 10)) <= set(held(cache, WINDOW)[1])
    assert cache.n_tokens.tolist() == [10 + 3 * CHUNK, 10]


def test_capacity_grows_and_nothing_is_lost():
    cache = DualCache(GEOMETRY, capacity=20)
    for size in (15, 10, 200, 1):
        write(cache, torch.ones(2, size))
    assert held(cache) == [list(range(226))] * 2 and cache.capacity >= 226


def test_a_fixed_capacity_overflows_by_name_and_nothing_is_lost():
    cache = DualCache(GEOMETRY, batch_size=2, capacity=12, fixed=True)
    write(cache, [[0] * 4 + [1] * 6, [1] * 10])  # padding takes no room
    with pytest.raises(InputError, match="the cache is full") as caught:
        write(cache, torch.ones(2, 3))
    assert "13 needed: 10 held, 2 free" in str(caught.value) and "at most 12" in str(caught.value)
    assert cache.length == 10 and held(cache)[1] == list(range(10))
    write(cache, [[1, 1], [1, 1]])
    write(cache, [[0], [0]])  # padding fits even when full
    assert held(cache)[1] == list(range(12)) and cache.get_max_length() == 12


def test_views_are_contiguous_prefixes_that_follow_the_tokens_held():
    small, large = (DualCache(GEOMETRY, batch_size=1, capacity=capacity) for capacity in (256, 4096))
    for cache in (small, large):
        write(cache, torch.ones(1, 100))
    one = torch.ones(1, 1, dtype=torch.bool)
    assert {n: v.shape for n, v in small.views(one).items()} == {n: v.shape for n, v in large.views(one).items()}
    views = large.views(one)
    assert views["cache_0_k"].shape[0] == 2 * BUCKET and all(view.is_contiguous() for view in views.values())
    assert views["cache_0_k"].data_ptr() == large._tensors["cache_0_k"].data_ptr()
    assert not any(view.numel() and view.stride() != torch.empty(view.shape).stride() for view in views.values())


def test_strides_are_checked_before_every_call():
    cache = DualCache(GEOMETRY, batch_size=2)
    cache._tensors["cache_0_k"] = cache._tensors["cache_0_k"].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(InputError, match="cache_0_k is not contiguous"):
        cache.views(torch.ones(2, 1, dtype=torch.bool))


def test_states_follow_rows_and_refuse_to_go_back():
    cache = DualCache(STATEFUL)
    write(cache, [[0, 1], [1, 1]])
    cache.reorder_cache(torch.tensor([1, 0]))
    state = cache.views(torch.ones(2, 1, dtype=torch.bool))["cache_1_conv_0"]
    assert state[:, 0, 0].tolist() == [2, 1] and not cache.is_croppable and cache.is_linear == [False, True]
    with pytest.raises(NotSupportedError, match="cannot be taken back"):
        cache.crop(-1)
    with pytest.raises(InputError, match="padding after a row's first token"):
        write(cache, [[1, 1], [1, 0]])
    cache.reset()
    assert float(cache.views(torch.ones(2, 1, dtype=torch.bool))["cache_1_conv_0"].abs().max()) == 0


def test_other_rows_other_writers_and_bad_sizes_are_named():
    cache = DualCache(GEOMETRY, batch_size=2)
    with pytest.raises(InputError, match="another number of rows"):
        write(cache, torch.ones(3, 1))
    with pytest.raises(NotSupportedError, match="written by a layergraph program"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(InputError, match="needs a capacity"):
        DualCache(GEOMETRY, fixed=True)
    with pytest.raises(InputError, match="at least one token"):
        DualCache(GEOMETRY, capacity=0)


def test_geometry_survives_json():
    import json

    for geometry in (GEOMETRY, STATEFUL):
        assert CacheGeometry.from_dict(json.loads(json.dumps(geometry.to_dict()))) == geometry
