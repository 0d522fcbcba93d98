"""What a folder may not be or hold: a manifest that is not as it was written, a path that is none, a refused save."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import layergraph as lg
from layergraph.errors import FormatError, InputError, InputTypeError, StorageError
from layergraph.ir.folder_read import digest


@pytest.fixture(scope="module")
def small(stack_program: lg.Program) -> lg.Program:
    return stack_program.apply(lg.TapOutputs("blocks.1"))


@pytest.fixture
def saved(small: lg.Program, tmp_path: Path) -> Path:
    return small.save(tmp_path / "small")


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any], *, signed: bool = True) -> None:
    """Change a manifest, with a hash that fits: by hand, or by someone who means harm."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    if signed:
        manifest.pop("sha256", None)
        manifest["sha256"] = digest(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"schema": 1}',
        '{"schema": 1, "kind": "layergraph program"}',
        '{"schema": "1", "kind": "layergraph program"}',
        '{"schema": 1, "kind": "x"}',
        "[" * 100_000,
        '{"schema": 1, "kind": "layergraph program", "weights": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_a_manifest_of_another_kind_is_a_named_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(FormatError):
        lg.load(tmp_path)


def test_a_newer_schema_says_upgrade(saved: Path) -> None:
    rewrite(saved, lambda manifest: manifest.update(schema=99), signed=False)
    with pytest.raises(FormatError, match="upgrade layergraph"):
        lg.load(saved)


def test_whatever_is_changed_in_a_manifest_is_noticed(saved: Path) -> None:
    path = saved / "manifest.json"
    whole = path.read_text()
    for key in json.loads(whole):
        if key in ("schema", "kind"):
            continue
        for change in (lambda m, k=key: m.pop(k), lambda m, k=key: m.update({k: "x"})):
            rewrite(saved, change, signed=False)
            with pytest.raises(FormatError, match=r"manifest.json is damaged[\s\S]*copy the folder again"):
                lg.load(saved)
            path.write_text(whole)
    lg.load(saved)


@pytest.mark.parametrize("value", [None, 5, "x", [5], {"x": 5}])
def test_a_manifest_with_a_hash_that_fits_and_values_that_do_not(saved: Path, value: Any) -> None:
    path = saved / "manifest.json"
    whole = path.read_text()
    # What may be lacking, or is only told: an older torch, no constants, no shadow, another layout of the same names.
    free = {"schema", "kind", "sha256", "torch"}
    for key in json.loads(whole).keys() - free:
        rewrite(saved, lambda manifest, key=key: manifest.update({key: value}))
        try:
            loaded = lg.load(saved)
        except lg.LayerGraphError:
            pass
        else:
            assert loaded(torch.randn(2, 3, 8)) is not None, key
        path.write_text(whole)


def test_a_manifest_cannot_name_files_elsewhere(saved: Path, tmp_path: Path) -> None:
    name = json.loads((saved / "manifest.json").read_text())["weights"][0]["file"]
    (tmp_path / "outside.safetensors").write_bytes((saved / name).read_bytes())
    rewrite(saved, lambda manifest: manifest["weights"][0].update(file="../outside.safetensors"))
    with pytest.raises(FormatError, match="outside"):
        lg.load(saved)


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        (None, InputTypeError, "is no path"),
        (3, InputTypeError, "is no path"),
        ({}, InputTypeError, "is no path"),
        (b"bytes", InputTypeError, "is no path"),
        ("", InputError, "is no path"),
        ("a\0b", InputError, "is no path"),
        ("n" * 300, StorageError, "cannot be there"),
    ],
)
def test_what_is_no_path_is_named(small: lg.Program, path: Any, kind: type, text: str) -> None:
    for use in (lg.load, small.save, small.load_weights, lg.DetachedShadow.from_pretrained):
        with pytest.raises(kind, match=text):
            use(path)
    if isinstance(path, str):
        with pytest.raises((kind, lg.LayerGraphError)):
            small.apply(lg.WeaveShadow(path))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: path.write_text("mine"), "a file of that name"),
        (lambda path: path.symlink_to("nowhere/at/all"), "a link that leads to no folder"),
    ],
)
def test_saving_onto_what_is_no_folder_leaves_it(small: lg.Program, tmp_path: Path, make: Any, text: str) -> None:
    make(tmp_path / "there")
    with pytest.raises(StorageError, match=text):
        small.save(tmp_path / "there")
    with pytest.raises(StorageError):
        small.save(tmp_path / "there" / "inside")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def _meta() -> lg.Program:
    with torch.device("meta"):
        return lg.trace(torch.nn.Linear(4, 4), {"input": torch.randn(2, 4)}, progress=False)


def test_a_refused_save_leaves_nothing_where_nothing_was(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no data to save[\s\S]*load_weights"):
        _meta().save(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(InputError):
        _meta().save(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_writers_that_wait_for_one_that_fails_write_all_the_same(small: lg.Program, tmp_path: Path) -> None:
    """The one that fails takes away the folder it made; the next makes it again."""
    failing, told = _meta(), []

    def save(program: lg.Program) -> None:
        try:
            program.save(tmp_path / "shared")
        except Exception as error:
            told.append(error)

    threads = [threading.Thread(target=save, args=(item,)) for item in (failing, small, failing, failing, small)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 3
    assert all(isinstance(error, InputError) for error in told)
    assert lg.load(tmp_path / "shared").fingerprint == small.fingerprint
