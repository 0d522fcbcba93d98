"""What may be asked of the Hub: what plainly is an id there. All else is a folder, named if it is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import layergraph as lg
from layergraph.errors import MissingFileError
from layergraph.testing.zoo import tiny_model
from layergraph.trace.hub import is_hub_id


@pytest.mark.parametrize(
    ("source", "is_id"),
    [
        ("owner/name", True),
        ("owner/name-1.5_b", True),
        ("typo", False),
        ("./owner/name", False),
        ("../name", False),
        ("~/adapters", False),
        ("/owner/name", False),
        ("owner/name/", False),
        ("owner/name/more", False),
        ("here/typo", False),  # a folder of that name is here, so a folder in it was meant
        ("", False),
        (Path("owner/name"), False),
    ],
)
def test_ids(source: str | Path, is_id: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert is_hub_id(source) is is_id


@pytest.mark.parametrize("what", ["typo", "./own/typo", "here/typo", Path("owner/name")])
def test_a_missing_folder_is_named_and_nothing_is_asked(what: str | Path, tmp_path: Path) -> None:
    """In a process of its own, on which the interpreter's audit of sockets looks."""
    code = f"""
import json, sys
asked = []
sys.addaudithook(lambda event, args: asked.append(event) if event in ("socket.getaddrinfo", "socket.connect") else None)
from pathlib import Path, PosixPath
from layergraph.errors import MissingFileError
from layergraph.trace.adapter_read import read_adapter
try:
    read_adapter({what!r})
except MissingFileError as error:
    print(json.dumps([error.what, error.path, error.do, asked]))
"""
    (tmp_path / "here").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, path, do, asked = json.loads(done.stdout)
    assert said == "no such folder" and str(what) in path and do == "check the path" and asked == []


def test_the_error_reaches_the_caller(tmp_path: Path) -> None:
    program = lg.trace(tiny_model("llama"), cached=False)
    with pytest.raises(MissingFileError, match="no such folder"):
        program.apply(lg.WeaveShadow(str(tmp_path / "typo")))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(MissingFileError, match="this is a file"):
        program.apply(lg.WeaveShadow(str(file)))
