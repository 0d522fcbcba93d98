"""Passes of one's own on the command line: ``--import`` makes them known, and what is wrong with it is told shortly.

Each scenario runs in a process of its own, where nothing of ours is registered yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

import layergraph as lg

lg.register_remap("flipped", lg.RemapKind(lambda t, p: [t[0].flip(0)], lambda t, p: [t[0].flip(0)]))


@lg.register_pass
@dataclass(frozen=True)
class FlipHead(lg.Pass):
    """The rows of the output head in reverse, and what they make turned back."""

    pass_name: ClassVar[str] = "flip-head"

    limit: float = 1.0
    layers: tuple[int, ...] = ()
    word: str = ""

    def __post_init__(self):
        super().__post_init__()
        if self.limit < 0:
            raise ValueError("a negative limit")

    def find(self, program, graph):
        targets = program[graph].targets
        return lg.Findings(tuple(lg.Site("lm_head", (name,)) for name in targets if targets[name] == "lm_head.weight"))

    def rewrite(self, site, edit):
        weight = edit.node(site.nodes[0])
        (head,) = weight.users
        edit.replace_state(weight, remap=lg.Remap("flipped", ("lm_head.weight",), ("lm_head.weight",), {}))
        edit.replace(head, edit.call(torch.ops.aten.flip.default, head, [2], after=head))
'''
RUNNER = """
import json, sys
from click.testing import CliRunner
from layergraph.cli import cli
for args in json.loads(sys.argv[1]):
    done = CliRunner().invoke(cli, args, prog_name="layergraph")
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""


def together(folder: Path, *commands: list[object]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of commands run one after another in one new process, in ``folder``."""
    given = json.dumps([[str(part) for part in command] for command in commands])
    done = subprocess.run([sys.executable, "-c", RUNNER, given], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results: list[Any] = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    return results


@pytest.fixture(scope="module")
def workplace(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module of passes, and a program made with one of them."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "our_passes.py").write_text(MODULE)
    # --pass stands first: the import counts wherever it stands
    args = ["optimize", llama_folder, "--pass", "flip-head", "--import", "our_passes", "--verify", "-o", "flipped"]
    ((code, out, err),) = together(folder, args)
    assert code == 0, err
    assert "flip-head   exact" in out
    return folder


def test_programs_of_own_passes_are_handled(workplace: Path, llama_folder: Path) -> None:
    own = ["--import", "our_passes"]
    results = together(
        workplace,
        ["dump", "flipped", *own],
        ["diff", llama_folder, "flipped", *own],
        ["explain", "flipped", "lm_head", *own],
        ["report", "flipped", *own],
        ["generate", "flipped", "--ids", "5,6", "--max-new-tokens", 2, *own],
        ["generate", llama_folder, "--ids", "5,6", "--max-new-tokens", 2],
        ["optimize", "flipped", "--tap", "hidden_states", "-o", "tapped", *own],
    )
    for code, _, err in results:
        assert code == 0, err
    dump, diff, explain, report, ours, theirs, _ = (out for _, out, _ in results)
    assert "flip(" in dump and "flip(" in diff and "flip-head" in report
    assert "(flipped), by flip-head" in explain
    assert ours == theirs


def test_without_the_import_the_option_is_named(workplace: Path) -> None:
    results = together(
        workplace,
        ["optimize", "flipped", "--pass", "flip-head", "-o", "out"],
        *([command, "flipped", *more] for command, more in (("dump", []), ("report", []), ("explain", ["lm_head"]))),
        ["generate", "flipped", "--ids", "1"],
    )
    assert results[0][0] == 2
    assert "no pass named 'flip-head'" in results[0][2] and "--import MODULE" in results[0][2]
    for code, _, err in results[1:]:
        assert code == 1
        assert "no weight map named 'flipped'" in err
        assert "do         name the module whose pass made it: --import MODULE" in err


FAULTS = {
    "nowhere_to_be_found": (None, 2, "no module named 'nowhere_to_be_found'"),
    "our_passes.py": (None, 2, "no name of a module"),
    "../our_passes": (None, 2, "no name of a module"),
    "needs_more": ("import nowhere_to_be_found", 1, "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
    "divides": ("x = 1\n1 / 0", 1, "divides.py:2"),
    "half": ("def", 1, "SyntaxError"),
    "leaves": ("raise SystemExit(7)", 1, "SystemExit: 7"),
    "thaws": (
        MODULE.replace("frozen=True", "frozen=False").replace("flip-head", "thawed").replace('"flipped"', '"thawed"'),
        1,
        "cannot inherit non-frozen dataclass from a frozen one",
    ),
}


def test_what_is_wrong_with_a_module_is_told_shortly(workplace: Path, llama_folder: Path) -> None:
    for name, (code, _, _) in FAULTS.items():
        if code is not None:
            (workplace / f"{name}.py").write_text(code)
    results = together(workplace, *(["dump", llama_folder, "--import", name] for name in FAULTS))
    for (name, (_, expected, text)), (code, out, err) in zip(FAULTS.items(), results, strict=True):
        assert (code, out) == (expected, ""), name
        assert text in err, name
        assert expected == 2 or f"{name}.py:" in err, name
        assert "Traceback" not in err and len(err.splitlines()) <= 6, err


def test_verbose_shows_where_a_module_fails(workplace: Path, llama_folder: Path) -> None:
    (workplace / "fails.py").write_text("def inner():\n    return {}['key']\ninner()")
    command = [sys.executable, "-c", "from layergraph.cli import main; main()"]
    args = ["optimize", str(llama_folder), "--import", "fails", "--pass", "x", "-o", "out", "-v"]
    done = subprocess.run([*command, *args], cwd=workplace, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "return {}['key']" in done.stderr


def test_options_become_what_their_fields_are(workplace: Path, llama_folder: Path) -> None:
    own = ["--import", "our_passes"]
    results = together(
        workplace,
        ["optimize", llama_folder, "--pass", "flip-head:limit=abc", *own, "-o", "none"],
        ["optimize", llama_folder, "--pass", "flip-head:layers=0,x", *own, "-o", "none"],
        ["optimize", llama_folder, "--pass", "flip-head:limit=2,layers=1,word=3", *own, "-o", "typed"],
        ["optimize", llama_folder, "--pass", "flip-head:limit=-1", *own, "-o", "none"],
        ["optimize", llama_folder, "--pass", "flip-head:limit", *own, "-o", "none"],
        ["optimize", llama_folder, "--pass", "flip-head:layers=", *own, "-o", "empty"],
    )
    assert [code for code, _, _ in results] == [2, 2, 0, 2, 2, 0], results
    assert "flip-head: a negative limit" in results[3][2]
    assert "option 'limit' of flip-head has no value; write flip-head:limit=VALUE" in results[4][2]
    assert "option limit of flip-head is of another type" in results[0][2] and "'abc', str" in results[0][2]
    assert "option layers" in results[1][2] and "tuple[int, ...]" in results[1][2]
    assert not (workplace / "none").exists()
    record = json.loads((workplace / "typed" / "manifest.json").read_text())["history"][0]
    assert record["options"] == {"limit": 2.0, "layers": [1], "word": "3"}
