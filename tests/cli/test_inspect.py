"""report, dump, diff and explain say about a folder what the library says about the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

import layergraph as lg

Run = Callable[..., Result]


def test_dump_of_program_and_model(run: Run, llama_folder: Path, tapped_folder: Path) -> None:
    result = run("dump", tapped_folder)
    assert result.exit_code == 0
    assert result.stdout == f"{lg.load(tapped_folder)}\n"
    assert "same text: 1" in run("dump", llama_folder).stdout


def test_dump_of_an_unknown_graph(run: Run, tapped_folder: Path) -> None:
    result = run("dump", tapped_folder, "--graph", "backward")
    assert result.exit_code == 1
    assert "no graph named 'backward'" in result.stderr


def test_diff(run: Run, llama_folder: Path, tapped_folder: Path) -> None:
    assert "+ hidden_states.0 = %embedding" in run("diff", llama_folder, tapped_folder).stdout
    assert run("diff", tapped_folder, tapped_folder).stdout == "no difference\n"


def test_explain(run: Run, tapped_folder: Path) -> None:
    assert "class     transformers.models.llama" in run("explain", tapped_folder, "model.layers.0.mlp").stdout
    result = run("explain", tapped_folder, "model.layrs.0.mlp")
    assert result.exit_code == 1
    assert "nearest: model.layers.0.mlp" in result.stderr


def test_report(run: Run, tapped_folder: Path) -> None:
    program = lg.load(tapped_folder)
    assert run("report", tapped_folder).stdout == f"{program.report()}\n"
    assert json.loads(run("report", tapped_folder, "--json").stdout) == program.report().as_dict()
