"""``layergraph demo``: runs to the end, all of its checks hold, and it reads well in a plain log."""

from __future__ import annotations

import importlib.util
import io
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console

import layergraph as lg
from layergraph.cli import cli
from layergraph.demo import run, run_demo
from layergraph.demo.timing import interleaved

needs_model = pytest.mark.skipif(not (run.MODEL / "config.json").is_file(), reason="the demo's model is not made yet")


@needs_model
def test_quick_demo() -> None:
    out = io.StringIO()
    demo = run_demo(quick=True, console=Console(file=out, width=120))
    text = out.getvalue()
    assert demo.checks and all(demo.checks.values()), text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines() if "=" not in line) <= 120
    for part in (
        "additive",
        "exact",
        "same text:",
        "conv3d [1280, 3, 2, 14, 14] -> linear [1280, 1176]",
        "time / eager",
        "reference, detached",
    ):
        assert part in text
    assert demo.errors["logits"] == 0.0
    assert 0.0 < demo.errors["pooler_output"] <= 1e-5
    assert set(demo.timings["patch embed"]) == {"eager Conv3d", "program, fused", "bare F.linear"}


@needs_model
def test_without_peft_the_comparison_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    out = io.StringIO()
    demo = run.Demo(quick=True, console=Console(file=out, width=120))
    demo.shadow_adapters(lg.trace(run.load_language_model()[0], progress=False))
    assert "peft is not installed: the comparison with it is left out" in out.getvalue()
    assert demo.checks and all(demo.checks.values()) and not any("peft" in name for name in demo.checks)


def test_missing_model_is_a_named_error(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(run, "MODEL", tmp_path)
    result = CliRunner().invoke(cli, ["demo", "--quick"], prog_name="layergraph")
    assert result.exit_code == 1
    assert "make it with scripts/make_demo_model.py" in result.stderr


def test_timing_is_interleaved_and_relative() -> None:
    order: list[str] = []
    timings = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=4, warmup=1)
    assert len(order) == 10
    assert order[:4] in (["a", "b", "b", "a"], ["b", "a", "a", "b"])
    assert timings["a"].ratio == 1.0
    assert timings["b"].median > 0 and timings["b"].spread >= 0 and len(timings["b"].runs) == 4
