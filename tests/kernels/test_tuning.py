"""The table, the choice by T, d, r and architecture, and opt-in autotune that can be saved and loaded."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json

import pytest

from layergraph.errors import FormatError, InputError, MissingFileError
from layergraph.kernels import tuning
from layergraph.kernels.common import launch
from layergraph.kernels.tuning import Config, Problem

PREFILL = Problem("shadow_inject", "sm_90", 4096, 4096, 8, 4, 2)


@pytest.fixture(autouse=True)
def untuned():
    tuning.forget()
    yield
    tuning.forget()


def choose(**changes):
    return tuning.choose(dataclasses.replace(PREFILL, **changes))


def test_families_by_rows_as_the_spec_has_them():
    """spec/5: row at T = 1 and d <= 1,024, split-d from 1 to about 2,048, tile above."""
    assert choose(tokens=1, d=1024).family == "row"
    assert [choose(tokens=tokens).family for tokens in (1, 2, 16, 2048)] == ["split"] * 4
    assert [choose(tokens=tokens).family for tokens in (2049, 4096, 100_000)] == ["tile"] * 3
    assert choose(tokens=4096, rank=64).family == "split"  # tiles alone are too few programs for a chip


@pytest.mark.parametrize("weight_bytes", [2, 4])
def test_tile_rows_hide_the_weights_reads(weight_bytes):
    """spec/5: BT >= 0.6 * r * bytes per weight, at the ranks adapters are trained with."""
    for rank in (1, 4, 8):
        assert choose(rank=rank, weight_bytes=weight_bytes).block_t >= 0.6 * rank * weight_bytes


@pytest.mark.parametrize("arch", [*tuning.SHARED_MEMORY_LIMITS, "sm_86", "sm_120", "gfx1100"])
def test_every_problem_has_a_configuration(arch):
    for tokens in (None, 1, 2, 5, 17, 300, 3000, 10**6):
        for rank in (1, 8, 16, 17, tuning.MAX_RANK):
            for d in (1, 97, 1024, 8192):
                for size in (2, 4):
                    problem = Problem("shadow_update", arch, tokens, d, rank, size, 2)
                    config = tuning.choose(problem)
                    prepared = launch.plan(problem, config, rank, rank)
                    assert prepared.slices <= tuning.MAX_SLICES
                    if config.family == "split":
                        assert prepared.slices * prepared.slice_d >= d > (prepared.slices - 1) * prepared.slice_d
                        assert prepared.slice_d % config.block_d == 0


def test_wide_bottlenecks_are_refused_by_name():
    with pytest.raises(InputError, match="no kernel configuration"):
        choose(rank=tuning.MAX_RANK + 1)


def test_every_row_has_a_reason_and_can_be_reached():
    for index, row in enumerate(tuning.TABLE):
        assert row.reason
        arch = "sm_90" if row.arch == "*" else row.arch
        reached = {
            tuning.choose(Problem("shadow_inject", some, tokens, d, rank, size, 2))
            for some in (arch, "sm_86")
            for tokens in (1, 4, 16, 256, 2048, 4096)
            for d in (512, 4096)
            for rank in (16, 64)
            for size in (2, 4)
        }
        assert row.config in reached, index


@pytest.mark.parametrize(
    "changes,name",
    [
        ({"family": "fast"}, "family"),
        ({"block_t": 8}, "block_t"),
        ({"block_t": 24}, "block_t"),
        ({"block_d": 48}, "block_d"),
        ({"slice_d": 0}, "slice_d"),
        ({"slice_d": 100}, "slice_d"),
        ({"family": "tile"}, "slice_d"),
        ({"warps": 3}, "warps"),
        ({"warps": 64}, "warps"),
        ({"stages": 0}, "stages"),
    ],
)
def test_configurations_that_cannot_launch_are_refused(changes, name):
    with pytest.raises(InputError, match=name):
        dataclasses.replace(Config("split", 16, 64, 128, 4, 2), **changes)


def test_autotune_keeps_the_fastest_for_its_bucket_only():
    wanted = tuning.candidates(PREFILL)[-1]
    assert wanted != tuning.choose(PREFILL)

    def measure(config):
        if config.warps == 2:
            raise RuntimeError("out of resources: shared memory")
        return 1.0 if config == wanted else 2.0

    assert tuning.autotune(PREFILL, measure) == (wanted, 1.0)
    assert choose() == wanted and choose(tokens=2000) == wanted  # one bucket: 1,025 to 4,096
    assert choose(tokens=1000) != wanted and choose(d=2048) != wanted and choose(arch="sm_80") != wanted
    tuning.forget()
    assert choose() != wanted


def test_autotune_says_why_nothing_ran():
    def measure(config):
        raise RuntimeError("no device")

    with pytest.raises(InputError, match="no configuration of shadow_inject ran") as caught:
        tuning.autotune(PREFILL, measure)
    assert "no device" in str(caught.value)


@pytest.mark.parametrize("op", tuning.OPS)
@pytest.mark.parametrize("tokens", [1, 64, 4096, None])
def test_candidates_are_launchable_and_start_from_the_table(op, tokens):
    problem = dataclasses.replace(PREFILL, op=op, tokens=tokens)
    found = tuning.candidates(problem)
    assert tuning.choose(problem) in found and len(found) == len(set(found)) > 5
    assert tokens == 1 or all(config.family != "row" for config in found)


def test_save_and_load(tmp_path):
    problems = [PREFILL, dataclasses.replace(PREFILL, tokens=1), dataclasses.replace(PREFILL, tokens=None)]
    for problem in problems:
        tuning.autotune(problem, lambda config: 1.0, [Config("split", 16, 16, 32, 2, 3)])
    tuning.save(tmp_path / "tuned.json")
    tuning.forget()
    assert tuning.load(tmp_path / "tuned.json") == 3
    assert all(tuning.choose(problem) == Config("split", 16, 16, 32, 2, 3) for problem in problems)
    first = (tmp_path / "tuned.json").read_text()
    tuning.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == first


def broken(change):
    entry = {
        "problem": dataclasses.asdict(PREFILL),
        "config": dataclasses.asdict(Config("tile", 16, 64, 0, 4, 2)),
    }
    document = {"format": "layergraph-kernel-tuning", "version": 1, "entries": [entry]}
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    "text,match",
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "not a kernel tuning file"),
        ("{}", "not a kernel tuning file"),
        (broken(lambda d: d.update(version=2)), "another version"),
        (broken(lambda d: d.update(entries=None)), "without entries"),
        (broken(lambda d: d["entries"].append(3)), "entry 1 is damaged"),
        (broken(lambda d: d["entries"][0].pop("config")), "entry 0 is damaged"),
        (broken(lambda d: d["entries"][0]["config"].pop("warps")), "entry 0 is damaged"),
        (broken(lambda d: d["entries"][0]["config"].update(warps="4")), "entry 0 is damaged"),
        (broken(lambda d: d["entries"][0]["config"].update(warps=True)), "entry 0 is damaged"),
        (broken(lambda d: d["entries"][0]["config"].update(warps=5)), "entry 0 is damaged"),
        (broken(lambda d: d["entries"][0]["problem"].update(d=None)), "entry 0 is damaged"),
    ],
)
def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path, text, match):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    before = choose()
    with pytest.raises(FormatError, match=match):
        tuning.load(path)
    assert choose() == before


def test_bytes_that_are_no_text_and_missing_files(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="cannot be read"):
        tuning.load(tmp_path / "binary")
    with pytest.raises(MissingFileError, match="no kernel tuning file"):
        tuning.load(tmp_path / "missing.json")


def test_two_threads_may_tune_and_choose_at_once():
    def tune(index):
        problem = dataclasses.replace(PREFILL, d=1024 + index)
        tuning.autotune(problem, lambda config: 1.0, [Config("tile", 16, 16, 0, 1, 1)])
        return tuning.choose(problem)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(tune, range(200))) == {Config("tile", 16, 16, 0, 1, 1)}
    assert all(choose(d=1024 + index).stages == 1 for index in range(200))
