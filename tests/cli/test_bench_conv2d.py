"""``layergraph bench conv2d`` writes a table that the pass takes."""

from __future__ import annotations

import json

import pytest
import torch

import layergraph as lg


def test_table_is_written_and_decides(run, tmp_path) -> None:
    path = tmp_path / "conv2d.json"
    done = run(
        "bench",
        "conv2d",
        "--dtype",
        "float32",
        "--shape",
        "3,16,4,8",
        "--batch",
        "1",
        "--repeats",
        "1",
        "-o",
        str(path),
    )
    assert done.exit_code == 0 and "convolution over linear" in done.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row[:3] == ["float32", 48, 8] and row[3] > 0
    conv = torch.nn.Conv2d(3, 8, 4, stride=4)
    program = lg.optimize(conv, [lg.FusePatchEmbed(conv2d=str(path))], example_inputs=torch.randn(2, 3, 16, 16))
    (record,) = program.report().as_dict()["passes"]
    assert bool(record["sites"]) == (row[3] > 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--shape", "3,4,8"), "expected four numbers"),
        (("--shape", "3,4,8,8"), "no patch fits"),
        (("--dtype", "int8"), "no floating-point dtype 'int8'"),
        (("--repeats", "0"), "at least 1"),
    ],
)
def test_bad_options_are_named(run, arguments, text) -> None:
    done = run("bench", "conv2d", *arguments)
    assert done.exit_code == 2 and text in done.output
