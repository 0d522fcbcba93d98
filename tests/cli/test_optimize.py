"""A folder of save_pretrained in, a program out that computes the same and is a checkpoint still."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from click.testing import Result
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2VLForConditionalGeneration

import layergraph as lg

Run = Callable[..., Result]
IDS = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11]])}


def test_tapped_llama_equals_eager_and_stays_a_checkpoint(llama_folder: Path, tapped_folder: Path) -> None:
    eager = AutoModelForCausalLM.from_pretrained(llama_folder).eval()
    with torch.no_grad():
        expected = eager(**IDS, output_hidden_states=True)
    found = lg.load(tapped_folder)(**IDS)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.hidden_states[0], expected.hidden_states[0])
    assert found.hidden_states[1] is None
    assert torch.equal(found.hidden_states[-1], expected.hidden_states[-1])
    again = AutoModelForCausalLM.from_pretrained(tapped_folder).eval()
    with torch.no_grad():
        assert torch.equal(again(**IDS).logits, expected.logits)
    assert AutoTokenizer.from_pretrained(tapped_folder)("one two")["input_ids"] == [1, 2]
    assert (tapped_folder / "generation_config.json").is_file()


def test_report_and_place_are_printed(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    result = run("optimize", llama_folder, "--tap", "hidden_states", "--verify", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "tap-outputs   additive" in result.stdout
    assert f"saved to {tmp_path / 'out'}, with tokenizer.json, tokenizer_config.json" in result.stdout
    assert result.stderr == ""  # no terminal, no progress


def test_tower_inside_a_vlm(run: Run, vlm_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tower"
    args = ("--submodule", "model.visual", "--pass", "fuse-patch-embed", "--verify", "-o", out)
    result = run("optimize", vlm_folder, *args)
    assert result.exit_code == 0, result.stderr
    assert "conv3d [64, 3, 2, 8, 8] -> linear [64, 384]" in result.stdout
    assert (out / "preprocessor_config.json").is_file()
    assert not (out / "generation_config.json").exists()
    tower = Qwen2VLForConditionalGeneration.from_pretrained(vlm_folder).eval().model.visual
    inputs = {"hidden_states": torch.randn(24, 384), "grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]])}
    with torch.no_grad():
        expected = tower(**inputs).pooler_output
    torch.testing.assert_close(lg.load(out)(**inputs).pooler_output, expected, rtol=0, atol=1e-5)
    # A tower's folder is a model folder of a class that transformers does not export.
    assert run("dump", out).exit_code == 0
    (out / "manifest.json").unlink()
    assert "conv3d" in run("dump", out).stdout


def test_program_in_program_out_in_place(run: Run, tapped_folder: Path) -> None:
    before = lg.load(tapped_folder).fingerprint
    result = run("optimize", tapped_folder, "--tap", "model.layers.*.mlp", "-o", tapped_folder)
    assert result.exit_code == 0, result.stderr
    program = lg.load(tapped_folder)
    assert [record.label for record in program.report().records] == ["tap-outputs", "tap-outputs#2"]
    assert program.remove("tap-outputs#2").fingerprint == before
    assert AutoTokenizer.from_pretrained(tapped_folder)("one")["input_ids"] == [1]


def test_without_passes_the_config_decides(run: Run, vlm_folder: Path, tmp_path: Path) -> None:
    result = run("optimize", vlm_folder, "--submodule", "model.visual", "-o", tmp_path / "plain")
    assert result.exit_code == 0, result.stderr
    assert "no pass has run" in result.stdout


def test_graph_layout(run: Run, vlm_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tower"
    args = ("--submodule", "model.visual", "--pass", "fuse-patch-embed", "--layout", "graph", "-o", out)
    assert run("optimize", vlm_folder, *args).exit_code == 0
    assert not (out / "config.json").exists()
    assert json.loads((out / "manifest.json").read_text())["layout"] == "graph"
    assert lg.load(out).state_dict()["patch_embed.proj.weight"].shape == (64, 3, 2, 8, 8)


def test_strict(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("optimize", llama_folder, "--pass", "fuse-patch-embed", "--strict", "-o", out)
    assert result.exit_code == 3
    assert "fuse-patch-embed found nothing to do" in result.stderr
    assert not out.exists()
    assert run("optimize", llama_folder, "--strict", "-o", out).exit_code == 3
    assert run("optimize", llama_folder, "--pass", "fuse-patch-embed", "-o", out).exit_code == 0
