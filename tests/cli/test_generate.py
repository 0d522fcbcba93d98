"""``layergraph generate``: text and ids, models and programs, adapters; what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import TextStreamer

import layergraph as lg
from layergraph.cli import cli
from layergraph.demo import run as demo

ADAPTERS = Path(demo.__file__).parent / "adapters"
PROMPT = "If an object"


@pytest.fixture(scope="module")
def woven(tmp_path_factory) -> Path:
    """The bundled model with an adapter, saved; with its tokenizer."""
    folder = tmp_path_factory.mktemp("programs") / "woven"
    model, tokenizer = demo.load_language_model()
    program = lg.optimize(model, [lg.WeaveShadow(ADAPTERS / "code", name="code")], progress=False)
    program.save(folder)
    tokenizer.save_pretrained(folder)
    return folder


def expected(adapter: str | None, woven: Path, count: int) -> tuple[torch.Tensor, str]:
    _, tokenizer = demo.load_language_model()
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    made = lg.load(woven).generate(ids, adapter=adapter, max_new_tokens=count, do_sample=False)[0]
    return made, tokenizer.decode(made, skip_special_tokens=True)


def test_a_model_folder_continues_a_prompt(run, woven) -> None:
    done = run("generate", demo.MODEL, PROMPT, "--max-new-tokens", 8)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == expected(None, woven, 8)[1].strip()
    assert "8 tokens in" in done.stderr and "a second" in done.stderr


def test_a_program_uses_its_adapter_and_takes_another(run, woven) -> None:
    texts = {}
    for name in (None, "code", str(ADAPTERS / "reference")):
        options = () if name is None else ("--adapter", name)
        done = run("generate", woven, PROMPT, "--max-new-tokens", 12, *options)
        assert done.exit_code == 0, done.output
        texts[name] = done.stdout.strip()
    assert texts[None] == texts["code"] == expected("code", woven, 12)[1].strip()  # the active one
    assert texts[str(ADAPTERS / "reference")] != texts["code"]


def test_ids_sampling_and_beams(run, woven) -> None:
    ids = ",".join(map(str, expected("code", woven, 4)[0].tolist()))
    prompt = ",".join(ids.split(",")[:-4])
    assert run("generate", woven, "--ids", prompt, "--max-new-tokens", 4).stdout.strip() == ids
    beams = run("generate", woven, PROMPT, "--num-beams", 2, "--max-new-tokens", 4)
    assert beams.exit_code == 0 and beams.stdout.startswith(PROMPT)
    sampled = [run("generate", woven, PROMPT, "--temperature", 1.5, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((PROMPT, "--ids", "1"), 2, "ways to say the same: give one"),
        (("--prompt-file", "nowhere.txt", "--ids", "1"), 2, "ways to say the same: give one"),
        ((), 2, "there is no prompt"),
        (("--ids", "5,99999"), 1, "expected   0 to 2047"),
        (("--prompt-file", "nowhere.txt"), 1, "the prompt cannot be read"),
        (("--prompt-file", demo.MODEL / "model.safetensors"), 1, "the prompt is not text"),
        ((PROMPT, "--adapter", demo.MODEL), 1, "adapter_config.json is missing"),
        (("--ids", "1,x"), 2, "numbers separated by commas"),
        (("--ids", "-1"), 2, "not negative"),
        ((PROMPT, "--max-new-tokens", 0), 2, "max-new-tokens"),
        ((PROMPT, "--adapter", "nobody"), 1, "no adapter 'nobody'"),
    ],
)
def test_wrong_options_are_named(run, woven, arguments, code, text) -> None:
    done = run("generate", woven, *arguments)
    assert done.exit_code == code and text in done.output


def test_several_adapters_share_one_graph(run, woven) -> None:
    names = ("none", "code", str(ADAPTERS / "reference") + "/")
    done = run(
        "generate", woven, PROMPT, "--max-new-tokens", 8, *(item for name in names for item in ("--adapter", name))
    )
    assert done.exit_code == 0, done.output
    heads = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert heads == ["== none", "== code", "== reference"]
    texts = [part.split("\n", 1)[1].strip() for part in done.stdout.split("== ")[1:]]
    assert len(set(texts)) == 3
    assert texts[:2] == [expected(name, woven, 8)[1].strip() for name in (None, "code")]
    assert done.stderr.splitlines()[-1].endswith("adapter reference")


def test_a_prompt_comes_from_a_file_or_standard_input(woven, tmp_path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    args = ["generate", str(woven), "--max-new-tokens", "6"]
    by_file = CliRunner().invoke(cli, [*args, "--prompt-file", str(tmp_path / "prompt.txt")])
    by_pipe = CliRunner().invoke(cli, args, input=PROMPT)
    assert by_file.exit_code == by_pipe.exit_code == 0, by_file.output
    assert by_file.stdout == by_pipe.stdout and by_file.stdout.startswith(PROMPT)


def test_text_is_written_word_by_word_into_a_pipe(run, woven, monkeypatch) -> None:
    written = []
    monkeypatch.setattr(TextStreamer, "on_finalized_text", lambda self, text, stream_end=False: written.append(text))
    assert run("generate", woven, PROMPT, "--max-new-tokens", 12).exit_code == 0
    assert len(written) > 3 and "".join(written) == expected("code", woven, 12)[1]


def test_what_optimize_wrote_generates(run, tmp_path) -> None:
    adapter = f"weave-shadow:adapter={ADAPTERS / 'code'}"
    assert run("optimize", demo.MODEL, "--pass", adapter, "-o", tmp_path / "out").exit_code == 0
    done = run("generate", tmp_path / "out", PROMPT, "--max-new-tokens", 6)
    assert done.exit_code == 0 and done.stderr.strip().endswith("adapter default"), done.output
    assert done.stdout.startswith(PROMPT)


def test_folders_that_do_not_generate(run, woven, tmp_path) -> None:
    from layergraph.testing.zoo import tiny_model

    assert "no such folder" in run("generate", tmp_path / "nowhere", PROMPT).stderr
    tiny_model("bert").save_pretrained(tmp_path / "bert")
    done = run("generate", tmp_path / "bert", "--ids", "1,2")
    assert done.exit_code == 1 and "no cached graph" in done.output
    lg.load(woven).save(tmp_path / "bare")
    done = run("generate", tmp_path / "bare", PROMPT)
    assert done.exit_code == 1 and "no tokenizer" in done.output and "--ids" in done.output
