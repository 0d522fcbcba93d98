"""Saving and loading: replaced in one step, nothing unpickled, every damaged file a named error (issue: item 6)."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import layergraph as lg
from layergraph.errors import FormatError, InputError, MissingFileError
from layergraph.ir import folder as folders
from layergraph.testing.zoo import tiny_model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def plain(model: torch.nn.Module) -> lg.Program:
    return lg.trace(model, cached=False)


@pytest.fixture(scope="module")
def program(plain: lg.Program) -> lg.Program:
    return plain.apply(lg.TapOutputs("hidden_states", entries=[1]))


@pytest.fixture
def saved(program: lg.Program, tmp_path: Path) -> Path:
    return program.save(tmp_path / "saved")


@pytest.fixture(scope="module")
def small(stack_program: lg.Program) -> lg.Program:
    """A program of a few nodes, for tests that load many times."""
    return stack_program.apply(lg.TapOutputs("blocks.1"))


@pytest.fixture
def small_saved(small: lg.Program, tmp_path: Path) -> Path:
    return small.save(tmp_path / "small")


def ids(n: int = 9) -> torch.Tensor:
    return torch.randint(0, 90, (2, n))


def test_a_loaded_program_is_the_saved_one(program: lg.Program, saved: Path) -> None:
    loaded = lg.load(saved)
    assert loaded.fingerprint == program.fingerprint
    assert str(loaded) == str(program)
    tokens = ids()
    assert torch.equal(loaded(tokens).logits, program(tokens).logits)
    assert torch.equal(loaded(tokens).hidden_states[1], program(tokens).hidden_states[1])
    assert loaded.report().as_dict() == program.report().as_dict()


def test_a_tap_is_added_and_removed_on_a_loaded_program(plain, program: lg.Program, saved: Path) -> None:
    loaded = lg.load(saved)
    assert loaded.remove("tap-outputs").fingerprint == plain.fingerprint
    more = loaded.apply(lg.TapOutputs("model.layers.0.mlp"))
    tokens = ids()
    assert more(tokens)["model.layers.0.mlp"].shape[:2] == tokens.shape
    assert more.remove("tap-outputs#2").fingerprint == program.fingerprint


def test_a_reversible_pass_is_removed_on_a_loaded_program(tmp_path: Path) -> None:
    tower = tiny_model("qwen2_vl", "vision")
    plain = lg.trace(tower)
    fused = lg.optimize(plain, passes=["fuse-patch-embed"])
    fused.save(tmp_path / "fused", "graph")
    back = lg.load(tmp_path / "fused").remove("fuse-patch-embed")
    assert back.fingerprint == plain.fingerprint
    for name, tensor in tower.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_dropped_weights_are_named_when_the_original_is_asked_for(plain: lg.Program, tmp_path: Path) -> None:
    tap = lg.TapOutputs("hidden_states", entries=[1], only=True)
    cut = lg.optimize(plain, passes=[tap])
    assert cut.report().parameters < plain.report().parameters
    with pytest.raises(InputError, match="dropped weights"):
        cut.remove("tap-outputs")
    kept = lg.optimize(plain, passes=[tap], verify=True)
    assert kept.remove("tap-outputs").fingerprint == plain.fingerprint
    loaded = lg.load(cut.save(tmp_path / "cut"))
    assert loaded.fingerprint == cut.fingerprint
    with pytest.raises(InputError, match="dropped weights"):
        loaded.remove("tap-outputs")


def test_the_original_layout_is_a_checkpoint_that_transformers_loads_bit_for_bit(model, saved: Path) -> None:
    again = type(model).from_pretrained(saved)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_shards_are_indexed_and_load_everywhere(model, program: lg.Program, tmp_path: Path) -> None:
    folders.save(program.ir, tmp_path / "sharded", max_shard_bytes=20_000)
    shards = list((tmp_path / "sharded").glob("weights-*.safetensors"))
    assert len(shards) > 3
    assert lg.load(tmp_path / "sharded").fingerprint == program.fingerprint
    again = type(model).from_pretrained(tmp_path / "sharded")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def _no_unpickling(*args: object, **kwargs: object) -> None:
    raise AssertionError("something was unpickled")


def test_nothing_is_unpickled(small_saved: Path, small: lg.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unpickling entry point of Python and torch raises; load works all the same."""
    for module, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (pickle, "_Unpickler"),
        (pickle, "_load"),
        (pickle, "_loads"),
        (torch, "load"),
        (torch.serialization, "load"),
        (torch.serialization, "_load"),
        (torch.serialization, "_legacy_load"),
        (torch.jit, "load"),
        (torch.export, "load"),
    ):
        monkeypatch.setattr(module, name, _no_unpickling)
    import _pickle
    import marshal

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(_pickle, name, _no_unpickling)
    for name in ("load", "loads"):
        monkeypatch.setattr(marshal, name, _no_unpickling)
    assert lg.load(small_saved).fingerprint == small.fingerprint


def parts(folder: Path) -> list[str]:
    manifest = json.loads((folder / "manifest.json").read_text())
    names = ["manifest.json", manifest["constants"]["file"], *(part["file"] for part in manifest["weights"])]
    for group in ("graphs", "original"):
        for part in manifest[group].values():
            names += [part["file"], part["index"]]
    return names


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty"])
def test_each_damaged_file_is_a_named_error(small_saved: Path, damage: str) -> None:
    reference = small_saved
    for name in parts(reference):
        path = reference / name
        whole = path.read_bytes()
        if damage == "missing":
            path.unlink()
        elif damage == "truncated":
            path.write_bytes(whole[: len(whole) // 2])
        elif damage == "empty":
            path.write_bytes(b"")
        elif name == "manifest.json":
            # A flipped bit in the manifest: in the hash of a part.
            path.write_bytes(whole.replace(b'"sha256": "', b'"sha256": "0', 1))
        else:
            middle = len(whole) // 2
            path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises((FormatError, MissingFileError)) as caught:
            lg.load(reference)
        assert "do " in str(caught.value), name
        path.write_bytes(whole)
    lg.load(reference)


_FULL_DISK = """
import resource, signal, sys
import layergraph as lg
from layergraph.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
program = lg.load(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, 4_000))
try:
    program.apply(lg.TapOutputs("blocks.0")).save(sys.argv[1])
except StorageError as error:
    print("named:", error.what)
"""


def test_a_full_disk_leaves_the_old_program(small: lg.Program, small_saved: Path) -> None:
    """A limit on file size stands in for a full disk: the same error comes from write()."""
    assert resource.RLIMIT_FSIZE is not None
    before = sorted(path.name for path in small_saved.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(small_saved)], capture_output=True, text=True, timeout=300, check=False
    )
    assert "named:" in done.stdout, done.stderr
    assert lg.load(small_saved).fingerprint == small.fingerprint
    assert sorted(path.name for path in small_saved.iterdir()) == before


@pytest.mark.parametrize("n_before", range(4))
def test_a_kill_at_any_file_leaves_the_old_program_or_the_new(
    small: lg.Program, small_saved: Path, monkeypatch: pytest.MonkeyPatch, n_before: int
) -> None:
    """The process dies at the n-th rename; what a kill leaves behind is swept by the next write."""

    class Killed(BaseException):
        pass

    real, count = os.replace, 0

    def replace(source: object, target: object) -> None:
        nonlocal count
        count += 1
        if count > n_before * 2:
            raise Killed
        real(source, target)  # type: ignore[arg-type]

    new = small.apply(lg.TapOutputs("blocks.0"))
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Killed):
        new.save(small_saved)
    monkeypatch.undo()
    assert lg.load(small_saved).fingerprint in (small.fingerprint, new.fingerprint)
    (small_saved / ".writing-left").mkdir()
    new.save(small_saved)
    assert lg.load(small_saved).fingerprint == new.fingerprint
    left = {path.name for path in small_saved.iterdir()}
    assert not [name for name in left if name.startswith(".writing-")]
    assert {name for name in left if name.startswith(("graph-", "original-", "weights-", "constants-"))} == set(
        parts(small_saved)
    ) - {"manifest.json"}


def test_two_threads_saving_to_one_folder_leave_one_whole_program(small: lg.Program, tmp_path: Path) -> None:
    other = small.apply(lg.TapOutputs("blocks.0"))
    errors: list[BaseException] = []

    def save(item: lg.Program) -> None:
        try:
            item.save(tmp_path / "shared")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(item,)) for item in (small, other, small, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert lg.load(tmp_path / "shared").fingerprint in (small.fingerprint, other.fingerprint)


def test_a_meta_program_says_that_it_has_no_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        layer = torch.nn.Linear(4, 4)
        program = lg.trace(layer, {"input": torch.randn(2, 4)})
    with pytest.raises(InputError, match="meta device"):
        program.save(tmp_path / "meta")


def test_same_dump_and_fingerprint_in_two_processes(tmp_path: Path) -> None:
    code = (
        "import layergraph as lg; from layergraph.testing.zoo import tiny_model;"
        "p = lg.trace(tiny_model('bert')).apply(lg.TapOutputs('hidden_states')); print(p.fingerprint); print(p)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert "layer 0 (" in runs[0]


def test_saved_files_name_no_path_of_the_machine_that_made_them(saved: Path) -> None:
    for path in saved.iterdir():
        data = path.read_bytes()
        assert str(Path.home()).encode() not in data or str(Path.home()) == "/", path.name
        assert str(Path(lg.__file__).parent).encode() not in data, path.name


def test_wrong_options_are_named_errors(program: lg.Program, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layout"):
        program.save(tmp_path / "x", layout="other")
    with pytest.raises(InputError, match="verify"):
        lg.load(saved, verify="other")


def _model_folder(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def _with_file(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / name).write_text("{}")
    return folder


def test_what_is_no_saved_program_is_said_for_what_it_is(model: torch.nn.Module, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases = [
        (tmp_path / "nowhere", "no such folder", "check the path"),
        (_with_file(tmp_path / "x", "file.txt") / "file.txt", "this is a file, not a folder", "check the path"),
        (tmp_path / "empty", "the folder is empty", "check the path"),
        (_model_folder(model, tmp_path / "model"), "holds a model, and no saved program", "layergraph.trace(model)"),
        (_with_file(tmp_path / "adapter", "adapter_config.json"), "holds an adapter", "WeaveShadow(folder)"),
        (_with_file(tmp_path / "notes", "notes.txt"), "the folder holds no saved program", "program.save() wrote"),
    ]
    for folder, what, do in cases:
        with pytest.raises(MissingFileError) as caught:
            lg.load(folder)
        assert what in caught.value.what and caught.value.path == str(folder)
        assert do in (caught.value.do or "")
        assert "layergraph.load" not in caught.value.message(shell=True)
    told = cases[3][0]
    with pytest.raises(MissingFileError, match=f"layergraph optimize {told} -o OUT"):
        lg.load(told)


def test_weights_of_a_folder_that_is_not_there(program: lg.Program, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such folder"):
        program.load_weights(tmp_path / "nowhere")
