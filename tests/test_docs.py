"""What the documents run still runs, and what they show is what is printed today."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_refresh", ROOT / "docs" / "refresh.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


refresh = _refresh()


@pytest.mark.parametrize("path", refresh.documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_shows_what_runs_today(path: Path) -> None:
    old, new = refresh.loose(path.read_text()), refresh.loose(refresh.run(path))
    difference = "\n".join(
        difflib.unified_diff(old.splitlines(), new.splitlines(), "shown", "printed", lineterm="", n=1)
    )
    assert not difference, f"run `make docs`, then read what it changed\n{difference}"


def test_the_first_documents_run() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in refresh.documents()}
    assert {"README.md", "docs/flow.md", "docs/adding_a_pass.md"} <= names


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
