"""``layergraph bench kernels``: bytes, floors, percent of floor, refusal to time wrong numbers, JSON, plot."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from layergraph.errors import InputError, PromiseError
from layergraph.kernels import bench, bench_report, ops

REFERENCE = ops.DECOMPOSITIONS[ops.INJECT]


def quick(**changes):
    """A run that takes milliseconds: nothing is compiled."""
    request = {"op": "shadow_inject", "d": 64, "r": 8, "tokens": [1, 4], "dtype": "bfloat16", "against": ["eager"]}
    return bench.run(**{**request, "seconds": 0.01, **changes})


def test_results_have_bytes_floor_median_spread_and_error():
    results = quick()
    assert [(x.variant, x.tokens) for x in results] == [("op", 1), ("eager", 1), ("op", 4), ("eager", 4)]
    for x in results:
        assert 0 < x.best_us <= x.lower_us <= x.median_us <= x.upper_us and x.rounds >= 5
        assert 0 < x.floor_best_us <= x.floor_us and x.error < 8e-3
        assert x.percent_of_floor == pytest.approx(100 * x.floor_us / x.median_us)
        assert x.gb_per_s == pytest.approx(x.bytes / (x.median_us * 1e-6) / 1e9)


@pytest.mark.parametrize(
    "op,states,weights",
    [("shadow_inject", 3, 2 * 8), ("shadow_update", 3, 4 * 6), ("shadow_update_inject", 4, 2 * 8 + 4 * 6)],
)
def test_bytes_are_each_input_and_result_once(op, states, weights):
    """docs/kernels.md counts the same: states of 2 bytes, adapters of 4."""
    d, tokens = 64, 10
    given = bench.arguments(op, tokens, d, 8, 6, torch.bfloat16, torch.float32, "cpu")
    biases = 0 if op == "shadow_inject" else 2 * (6 + d)
    alpha = 0 if op == "shadow_update" else 1
    assert bench.bytes_moved(op, given) == states * tokens * d * 2 + (weights * d + biases + alpha) * 4


@pytest.mark.parametrize(
    "wrong",
    [lambda *a: REFERENCE(*a) * 1.05, lambda *a: REFERENCE(*a) * float("nan"), lambda *a: torch.zeros_like(a[0])],
    ids=["a little", "nan", "zeros"],
)
def test_wrong_numbers_are_not_timed(wrong):
    with pytest.raises(PromiseError, match=r"gives wrong numbers.*not timed"):
        quick(variants={"op": ops.INJECT, "mine": wrong})


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"op": "shadow"}, "unknown op"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"against": ["cuda"]}, "unknown variant"),
        ({"tokens": [4, 0]}, "tokens is too small"),
        ({"r": 0}, "r is too small"),
    ],
)
def test_requests_that_cannot_be_met(changes, match):
    with pytest.raises(InputError, match=match):
        quick(**changes)


def test_command_prints_and_writes_json_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    threads = torch.get_num_threads()
    options = "--op shadow_inject --op shadow_update --d 64 --tokens 1,4 --against eager --seconds 0.01 --threads 1"
    files = ["--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    result = CliRunner().invoke(bench.kernels_command, [*options.split(), *files])
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    assert "floor us" in result.output and "GB/s" in result.output and "threads 1" in result.output
    document = json.loads((tmp_path / "x.json").read_text())
    assert set(document["machine"]) >= {"cpu", "threads", "torch", "python"}
    assert len(document["results"]) == 8 and document["results"][0]["percent_of_floor"] > 0
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_machine_line_names_no_host_and_no_path():
    text = json.dumps(bench_report.machine_line())
    assert platform.node() not in text and os.getcwd() not in text


@pytest.mark.parametrize(
    "options,message",
    [
        ("--tokens 1,x", "expected numbers separated by commas"),
        ("--against nothing", "unknown variant"),
        ("--d 0", "d is too small"),
    ],
)
def test_command_refuses_in_words(options, message):
    result = CliRunner().invoke(bench.kernels_command, options.split())
    assert result.exit_code != 0 and message in result.output
    assert "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said():
    result = CliRunner().invoke(bench.kernels_command, ["--device", "cuda"])
    assert result.exit_code == 2 and "no GPU" in result.output


@pytest.mark.slow
def test_gpu_script_rehearses_every_step(tmp_path):
    """benchmarks/gpu.sh cannot be run here for real; its steps can, through Triton's interpreter."""
    pytest.importorskip("triton")
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
    environ = {**os.environ, "PYTHON": sys.executable}
    ran = subprocess.run(["bash", script, "--rehearse", tmp_path], env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    document = json.loads((tmp_path / "kernels_gpu_rehearsal.json").read_text())
    assert document["rehearsal"] is True
    assert not [key for key in document if key.endswith("_failed")]
    assert all(document[step] for step in ("numbers", "package", "timings", "precisions", "rows"))
    assert all(line["ok"] for line in document["numbers"] + document["package"])
