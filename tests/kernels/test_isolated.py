"""Runs the kernel tests that need a process of their own: Triton reads TRITON_INTERPRET once, at import.

Each entry is a pytest file under isolated/, which pytest does not collect by itself; its output is shown on failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.importorskip("triton")


def run(name: str, *options: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", str(HERE / "isolated" / name), "-q", "-p", "no:cacheprovider", *options]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environ.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        command, env={**environ, **environment}, cwd=HERE.parents[1], capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


def test_interpreter_against_float64():
    run("interpreter.py", TRITON_INTERPRET="1")


def test_compile_for_sm_80_sm_90_sm_100_gfx942():
    run("compile_targets.py", "-m", "not slow")


@pytest.mark.slow
def test_compile_every_dtype():
    run("compile_targets.py", "-m", "slow")


def test_cuda_side_with_mock_driver():
    run("mock_driver.py")


def test_works_where_triton_is_not_installed():
    """The wheel names Triton as an option: without it the ops import, run, compile and export on the CPU."""
    run("without_triton.py")
