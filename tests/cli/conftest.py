"""Folders as save_pretrained writes them, made once, and a runner of the command line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from layergraph.cli import cli
from layergraph.testing.zoo import tiny_model

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run the command line in this process; stdout and stderr are kept apart."""

    def call(*args: object) -> Result:
        return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="layergraph")

    return call


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny_model("llama").save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vlm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-VL, its tower in ``model.visual``."""
    folder = tmp_path_factory.mktemp("models") / "qwen2-vl"
    tiny_model("qwen2_vl", "vlm").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def _tapped(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("programs") / "tapped"
    args = ["optimize", str(llama_folder), "--tap", "hidden_states:entries=0,-1", "-o", str(out)]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0, result.stderr
    return out


@pytest.fixture
def tapped_folder(_tapped: Path, tmp_path: Path) -> Path:
    """A program saved by the command line; each test has its own copy."""
    return Path(shutil.copytree(_tapped, tmp_path / "tapped"))
