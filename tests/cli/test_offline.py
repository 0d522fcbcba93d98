"""The command line never asks the network: seen by the interpreter's own audit of sockets, whatever the environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import layergraph.demo.run as demo

ADAPTER = Path(demo.__file__).parent / "adapters" / "code"
RUNNER = """
import json, sys
asked = []
sys.addaudithook(lambda event, args: asked.append(event) if event in (
    "socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "urllib.Request") else None)
from click.testing import CliRunner
from layergraph.cli import cli
for args in json.loads(sys.argv[1]):
    done = CliRunner().invoke(cli, args, prog_name="layergraph")
    print(json.dumps([done.exit_code, done.output, asked]), flush=True)
"""


def test_no_command_asks_the_network(llama_folder: Path, tmp_path: Path) -> None:
    """Names that look like ids of a hub, in options and inside of folders, included."""
    hub = Path(shutil.copytree(ADAPTER, tmp_path / "hub-adapter"))
    config = json.loads((hub / "adapter_config.json").read_text())
    shapes = dict.fromkeys(
        field for field in config if field.startswith("shadow_") and field.endswith(("size", "heads", "layers"))
    )
    (hub / "adapter_config.json").write_text(json.dumps(config | shapes | {"shadow_model": "owner/name"}))
    model, weave = str(demo.MODEL), "weave-shadow:adapter="
    commands = [
        (["optimize", model, "--pass", f"{weave}{ADAPTER}", "-o", "out"], 0, "saved to out"),
        (["report", "out"], 0, "weave-shadow"),
        (["dump", "out"], 0, "layer 0"),
        (["diff", "out", "out"], 0, "no difference"),
        (["explain", "out", "model.layers.0"], 0, "module"),
        (["generate", "out", "If", "--max-new-tokens", "1"], 0, "If"),
        (["optimize", model, "--pass", f"{weave}typo", "-o", "x"], 1, "typo"),
        (["optimize", model, "--pass", f"{weave}owner/name", "-o", "x"], 1, "must be downloaded first"),
        (["generate", model, "If", "--adapter", "owner/name"], 1, "must be downloaded first"),
        (["generate", "owner/name", "If"], 1, "no such folder"),
        (["optimize", model, "--pass", f"{weave}{hub}", "-o", "x"], 1, "owner/name"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps([args for args, _, _ in commands])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for (args, expected, text), (code, output, asked) in zip(commands, results, strict=True):
        assert code == expected and text in output, (args, output)
        assert asked == [], args


def test_help_says_so(run) -> None:
    for args in (["--help"], ["optimize", "--help"], ["generate", "--help"]):
        assert "the network is never asked" in " ".join(run(*args).stdout.split()).lower()
