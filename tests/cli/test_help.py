"""Help is instant, teaches, and matches what is there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import Result

from layergraph.passes import find_pass, pass_names

Run = Callable[..., Result]
COMMANDS = ("optimize", "generate", "report", "dump", "diff", "explain", "demo", "bench")


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from layergraph.cli import cli\n"
        "for args in (['--help'], ['optimize', '--help'], ['generate', '--help'], ['--version'], ['optimze']):\n"
        "    try: cli(args)\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    assert command in run("--help").stdout
    result = run(command, "--help")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) > 8


def test_group_documents_exit_codes(run: Run) -> None:
    text = run("--help").stdout
    for code, word in (
        ("0", "done"),
        ("1", "failed"),
        ("2", "command line"),
        ("3", "--strict"),
        ("130", "interrupted"),
    ):
        assert any(line.split()[:1] == [code] and word in line for line in text.splitlines())


def test_optimize_help_names_every_pass(run: Run) -> None:
    text = run("optimize", "--help").stdout
    # Other tests of this process register passes of their own.
    ours = [name for name in pass_names() if find_pass(name).__module__.startswith("layergraph.")]
    assert len(ours) >= 3
    for name in ours:
        assert name in text


def test_unknown_command_has_a_suggestion(run: Run) -> None:
    result = run("optimse")
    assert result.exit_code == 2
    assert "Did you mean 'optimize'?" in result.stderr


def test_bench_mounts_what_exists(run: Run) -> None:
    result = run("bench", "--help")
    assert result.exit_code == 0
    assert run("bench", "nonsense").exit_code == 2
