"""``layergraph generate``: text and ids, models and programs, adapters; what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import layergraph as lg
from layergraph.demo import run as demo

ADAPTERS = Path(demo.__file__).parent / "adapters"
PROMPT = "The import statement"


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
        ((PROMPT, "--ids", "1"), 2, "two ways to say the same"),
        (("--ids", "1,x"), 2, "numbers separated by commas"),
        (("--ids", "-1"), 2, "not negative"),
        ((PROMPT, "--max-new-tokens", 0), 2, "max-new-tokens"),
        ((PROMPT, "--adapter", "nobody"), 1, "no adapter 'nobody'"),
    ],
)
def test_wrong_options_are_named(run, woven, arguments, code, text) -> None:
    done = run("generate", woven, *arguments)
    assert done.exit_code == code and text in done.output


def test_folders_that_do_not_generate(run, woven, tmp_path) -> None:
    from layergraph.testing.zoo import tiny_model

    tiny_model("bert").save_pretrained(tmp_path / "bert")
    done = run("generate", tmp_path / "bert", "--ids", "1,2")
    assert done.exit_code == 1 and "no cached graph" in done.output
    lg.load(woven).save(tmp_path / "bare")
    done = run("generate", tmp_path / "bare", PROMPT)
    assert done.exit_code == 1 and "no tokenizer" in done.output and "--ids" in done.output
