"""Advice on the command line is given in its own words: each error that speaks Python has a remedy for both."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

import layergraph as lg
from layergraph.errors import InputError, RefusedError
from layergraph.testing.zoo import tiny_model

Run = Callable[..., Result]
SOURCE = Path(lg.__file__).parent
# Words that mean something to who writes Python only.
PYTHON = re.compile(
    r"\w\(|\b(True|False)\b|\w=[\[{\"]|example_inputs|\bprogram\.|\blg\.|\blayergraph\.\w|(?<!-)\bimport\b"
)
# Errors that no command meets, by what raises them.
UNREACHED = {
    "ir/edit": "a pass at fault",
    "ir/exported.py": "a pass at fault, or sizes that were fixed on purpose",
    "ir/inline.py": "a pass at fault",
    "ir/match.py": "a pass at fault",
    "ir/pattern.py": "a pass at fault",
    "ir/weights.py:register_remap": "a pass at fault",
    "ir/interface.py": "inputs given by hand",
    "ir/placement.py": "program.to",
    "ir/safetensors_io.py": "a program on the meta device",
    "ir/checkpoint.py": "program.load_weights",
    "placement.py": "program.to",
    "ir/adapter.py:with_adapter": "program.add_adapter; a command finds a free name",
    "program.py": "a call by hand",
    "program_module.py": "a call by hand",
    "api.py:passes_of": "fusion_config, which a config holds as JSON",
    "adapters.py:merge_adapter": "a call by hand",
    "passes/base.py": "a pass at fault",
    "passes/guard.py": "a pass at fault",
    "passes/registry.py:register_pass": "a pass at fault",
    "passes/pipeline.py:resolve": "passes=[...]",
    "passes/pipeline.py:_position": "program.remove",
    "passes/tap_outputs.py:_is_chosen": "a predicate, which is a function",
    "passes/weave_shadow.py:_plan": "the pass run by hand",
    "runtime/cache.py": "a cache used by hand",
    "runtime/generate.py:forward": "use_cache, inputs_embeds",
    "runtime/generate.py:_prepare_cache_for_generation": "a cache given by hand",
    "runtime/generate.py:_config_of": "no folder holds such a program and a tokenizer",
    "runtime/ownership.py": "a cache used by hand",
    "runtime/session.py": "a session used by hand",
    "testing/": "for tests",
    "kernels/": "for authors of kernels",
    "trace/adapter_detach.py": "a detached shadow by hand",
    "trace/adapter_read.py": "writing an adapter again, which is done in Python",
    "trace/cached": "cached=True, given by hand",
    "trace/flatten.py": "example inputs, or the model's own code",
    "ir/execute.py:_check_devices": "inputs made by hand",
    "trace/hf_vision_grid.py": "grids given by hand",
    "trace/isolate.py:isolate": "a model made by hand",
    "trace/isolate.py:_refuse": "a model made by hand",
    "trace/inputs.py:batch_like": "inputs made by hand",
    "trace/export.py:_trace_step": "cached=True, given by hand",
    "trace/peft_model.py": "a PeftModel, made by hand",
    "trace/sizes.py": "dynamic, given by hand",
    "trace/source.py": "program.to",
}


def remedies() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call in the library with ``do=``: where it stands, what it says, and the call."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(("cli/", "demo/")):
            continue
        owner: dict[ast.AST, str] = {}
        for node in ast.walk(ast.parse(path.read_text())):
            for child in ast.walk(node) if isinstance(node, ast.FunctionDef) else ():
                owner[child] = node.name
            do = next((item.value for item in getattr(node, "keywords", ()) if item.arg == "do"), None)
            if do is not None:
                texts = [part.value for part in ast.walk(do) if isinstance(part, ast.Constant)]
                yield f"{name}:{owner.get(node, '')}", " ".join(map(str, texts)), node  # type: ignore[misc]


def test_each_remedy_in_python_has_one_for_the_command_line() -> None:
    lacking = [
        f"{place}: {text}"
        for place, text, call in remedies()
        if PYTHON.search(text)
        and not any(item.arg == "shell" for item in call.keywords)
        and ast.unparse(call.func) != "RefusedError"
        and not place.startswith(tuple(UNREACHED))
    ]
    assert not lacking, "give these errors shell=, or say why no command meets them:\n" + "\n".join(lacking)


def test_remedies_of_the_command_line_speak_its_language() -> None:
    for place, _, call in remedies():
        for item in call.keywords:
            if item.arg == "shell" and isinstance(item.value, ast.Constant) and item.value.value:
                assert not PYTHON.search(item.value.value), f"{place}: {item.value.value}"


def test_an_error_tells_either() -> None:
    both = InputError("no", do="write x=1", shell="add --x 1")
    assert str(both) == "no\n  do         write x=1" and both.message(shell=True) == "no\n  do         add --x 1"
    one = InputError("no", do="check the path")
    assert str(one) == one.message(shell=True)
    refused = RefusedError("no", do="strict=False")
    assert "strict=False" in str(refused) and "--strict" in refused.message(shell=True)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--pass", "fuse-patch-embed", "--strict"], 3, "without --strict the rest is done"),
        (["--strict"], 3, "add --pass or --tap"),
        (["--pass", "weave-shadow"], 1, "--pass weave-shadow:adapter=FOLDER"),
    ],
)
def test_optimize_advises_in_options(
    run: Run, llama_folder: Path, tmp_path: Path, args: list[str], code: int, says: str
) -> None:
    done = run("optimize", llama_folder, *args, "-o", tmp_path / "out")
    assert done.exit_code == code and says in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_explain_advises_dump(run: Run, tapped_folder: Path) -> None:
    assert "layergraph dump FOLDER" in run("explain", tapped_folder, "nothing.like.it").stderr


def test_attention_is_an_option(run: Run, llama_folder: Path, tapped_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("optimize", llama_folder, "--attention", "eager", "--tap", "attentions", "-o", out)
    assert done.exit_code == 0, done.stderr
    assert "attentions.1" in lg.load(out).ir.forward.interface.outputs
    done = run("optimize", tapped_folder, "--attention", "eager", "-o", out)
    assert done.exit_code == 1 and "leave --attention out" in done.stderr


def test_folders_are_told_apart(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "the folder is empty" in run("dump", tmp_path / "empty").stderr
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copy(llama_folder / "config.json", adapter / "adapter_config.json")
    done = run("dump", adapter)
    assert "holds an adapter, and no model" in done.stderr and "--adapter" in done.stderr


def test_generate_without_a_cached_graph(run: Run, llama_folder: Path, tmp_path: Path) -> None:
    ids = ["--ids", "5,6,7", "--max-new-tokens", 3]
    lg.trace(tiny_model("llama"), cached=False).save(tmp_path / "slow")
    done = run("generate", tmp_path / "slow", *ids)
    assert done.exit_code == 1 and "--no-cache does without it, slower" in done.stderr
    assert "cached=" not in done.stderr.partition("do ")[2]
    slow = run("generate", tmp_path / "slow", *ids, "--no-cache")
    assert slow.exit_code == 0, slow.stderr
    assert slow.stdout == run("generate", llama_folder, *ids).stdout
    assert run("generate", tmp_path / "slow", *ids, "--no-cache", "--engine", "inductor").exit_code == 2

    done = run("optimize", llama_folder, "--tap", "hidden_states:layers=0,only=true", "-o", tmp_path / "cut")
    assert done.exit_code == 0
    for more in ([], ["--no-cache"]):
        done = run("generate", tmp_path / "cut", *ids, *more)
        assert done.exit_code == 1
        assert "tap-outputs dropped it" in done.stderr
        assert "start again from the model's folder, without tap-outputs" in done.stderr
