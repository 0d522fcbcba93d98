"""Bad input: one message that says what to do, the right exit code, no traceback, nothing written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import layergraph as lg

Run = Callable[..., Result]


def changed(folder: Path, out: Path, **config: object) -> Path:
    """A copy of a model folder with other fields in its config; None removes one."""
    shutil.copytree(folder, out)
    data = json.loads((out / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return out


def truncated(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return out


def lacking(folder: Path, out: Path) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def with_file(out: Path, name: str, text: str = "") -> Path:
    out.mkdir()
    (out / name).write_text(text)
    return out


INPUTS: dict[str, tuple[Callable[[Path, Path], Path], str, str]] = {
    "missing": (lambda llama, tmp: tmp / "nowhere", "no such folder", "do         give a folder"),
    "a file": (lambda llama, tmp: llama / "config.json", "this is a file, not a folder", "give a folder"),
    "no config": (
        lambda llama, tmp: with_file(tmp / "x", "notes.txt"),
        "neither a model nor a program",
        "found      notes.txt",
    ),
    "corrupt config": (
        lambda llama, tmp: with_file(tmp / "x", "config.json", '{"architectures'),
        "config.json is damaged",
        "copy the folder again",
    ),
    "config of another shape": (
        lambda llama, tmp: with_file(tmp / "x", "config.json", "[1]"),
        "config.json is damaged",
        "expected   an object",
    ),
    "no architecture": (
        lambda llama, tmp: changed(llama, tmp / "x", architectures=None),
        "does not say which class",
        "save_pretrained",
    ),
    "unknown class": (
        lambda llama, tmp: changed(llama, tmp / "x", architectures=["OursForCausalLM"], auto_map={"AutoModel": "m.M"}),
        "OursForCausalLM is not a class of transformers",
        "load the model in Python",
    ),
    "no weights": (
        lambda llama, tmp: with_file(tmp / "x", "config.json", (llama / "config.json").read_text()),
        "transformers cannot load LlamaForCausalLM",
        "weights as safetensors",
    ),
    "truncated weights": (
        lambda llama, tmp: truncated(llama, tmp / "x"),
        "transformers cannot load LlamaForCausalLM",
        "check that the folder is complete",
    ),
    "a missing weight": (lambda llama, tmp: lacking(llama, tmp / "x"), "lacks weights", "model.norm.weight"),
}


@pytest.mark.parametrize("case", INPUTS)
def test_bad_folder(run: Run, llama_folder: Path, tmp_path: Path, case: str) -> None:
    make, what, more = INPUTS[case]
    out = tmp_path / "out"
    result = run("optimize", make(llama_folder, tmp_path), "--tap", "hidden_states", "-o", out)
    assert result.exit_code == 1, result.stderr
    assert result.stderr.startswith("error: ")
    assert what in result.stderr
    assert more in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--pass", "fuse-patch-embd"], 2, "Did you mean 'fuse-patch-embed'?"),
        (["--tap", "hidden_states:entrys=1"], 2, "Did you mean 'entries'?"),
        (["--tap", "hiden_states"], 1, "nearest: hidden_states"),
        (["--tap", "model.layrs.0.mlp"], 1, "nearest: model.layers.0.mlp"),
        (["--tap", "hidden_states:entries=7"], 1, "expected   -3 to 2"),
        (["--submodule", "model.layer.0"], 1, "did you mean 'model.layers.0'?"),
        (["--nonsense"], 2, "No such option"),
    ],
)
def test_bad_request(run: Run, llama_folder: Path, tmp_path: Path, args: list[str], code: int, says: str) -> None:
    result = run("optimize", llama_folder, *args, "-o", tmp_path / "out")
    assert result.exit_code == code
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_submodule_of_a_program(run: Run, tapped_folder: Path, tmp_path: Path) -> None:
    result = run("optimize", tapped_folder, "--submodule", "model", "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "this folder holds a program" in result.stderr


def test_output_is_a_file(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    result = run("optimize", llama_folder, "--tap", "hidden_states", "-o", out)
    assert result.exit_code == 1
    assert "the output is a file" in result.stderr
    assert out.read_text() == "precious"


def test_output_holds_another_checkpoint(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(llama_folder, tmp_path / "other"))
    for folder in (out, llama_folder):
        result = run("optimize", llama_folder, "--tap", "hidden_states", "-o", folder)
        assert result.exit_code == 1
        assert "holds a model's checkpoint already" in result.stderr
        assert not (folder / "manifest.json").exists()


def test_verbose_shows_the_traceback(llama_folder: Path, tmp_path: Path) -> None:
    for args in (["-v", "dump", str(tmp_path)], ["dump", str(tmp_path), "-v"]):
        command = [sys.executable, "-c", "from layergraph.cli import main; main()", *args]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert "MissingFileError" in done.stderr


def test_full_disk_leaves_the_old_program(llama_folder: Path, tapped_folder: Path) -> None:
    """Files may not grow beyond 100 KB in the child process: neither graphs nor weights fit."""
    before = {path.name: path.read_bytes() for path in tapped_folder.iterdir()}
    code = (
        "import resource, sys; from layergraph.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "main()"
    )
    args = ["optimize", str(llama_folder), "--tap", "hidden_states", "-o", str(tapped_folder)]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(("error: cannot write", "error: saving failed")), done.stderr
    assert "what was there before is still there" in done.stderr
    assert "Traceback" not in done.stderr
    after = {path.name: path.read_bytes() for path in tapped_folder.iterdir() if path.name != ".lock"}
    assert after == {name: data for name, data in before.items() if name != ".lock"}
    lg.load(tapped_folder)
