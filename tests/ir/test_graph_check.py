"""A folder of a stranger: no text in a saved graph is run as code, and threads may load at once."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.errors import FormatError
from layergraph.ir.folder_read import digest
from layergraph.ir.graph_check import check_graph
from layergraph.ir.graph_json import dump_graph
from layergraph.testing.zoo import tiny_model


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return lg.trace(Small().eval(), {"x": torch.randn(3, 4)}).save(tmp_path / "saved")


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the graph as somebody would who can make the hashes right."""
    manifest = json.loads((folder / "manifest.json").read_text())
    part = manifest["graphs"]["forward"]
    graph = json.loads((folder / part["file"]).read_text())
    change(graph)
    data = json.dumps(graph).encode()
    (folder / part["file"]).write_bytes(data)
    part["sha256"] = hashlib.sha256(data).hexdigest()
    del manifest["sha256"]
    manifest["sha256"] = digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def size_as_code(graph: dict[str, Any], code: str) -> None:
    for value in graph["graph_module"]["graph"]["tensor_values"].values():
        for size in value["sizes"]:
            if "as_expr" in size:
                size["as_expr"]["expr_str"] = code


def op_as_code(graph: dict[str, Any], code: str) -> None:
    graph["graph_module"]["graph"]["nodes"][0]["target"] = "torch.serialization.os.system"


def operator_argument(graph: dict[str, Any], code: str) -> None:
    graph["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = {"as_operator": "torch.serialization.os.system"}


def input_as_code(graph: dict[str, Any], code: str) -> None:
    graph["graph_module"]["graph"]["inputs"][-1]["as_tensor"]["name"] = f"x={code}"


def keyword_as_code(graph: dict[str, Any], code: str) -> None:
    graph["graph_module"]["graph"]["nodes"][0]["inputs"][0]["name"] = f"input={code}, x"


def guard_as_code(graph: dict[str, Any], code: str) -> None:
    graph["guards_code"] = [code]


def spec_that_imports(graph: dict[str, Any], code: str) -> None:
    context = json.dumps({"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []})
    item = {"type": "collections.defaultdict", "context": context, "children_spec": []}
    graph["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, item])


@pytest.mark.parametrize(
    "attack",
    [
        size_as_code,
        op_as_code,
        operator_argument,
        input_as_code,
        keyword_as_code,
        guard_as_code,
        spec_that_imports,
    ],
)
def test_no_text_of_a_saved_graph_is_run(saved: Path, tmp_path: Path, attack: Callable[..., None]) -> None:
    mark = tmp_path / "ran"
    forge(saved, lambda graph: attack(graph, f"__import__('pathlib').Path({str(mark)!r}).touch()"))
    with pytest.raises(FormatError, match="holds"):
        lg.load(saved)
    assert not mark.exists()


@pytest.mark.parametrize("code", ["S('__import__')", "lambdify([], '1')()", "[x for x in ()]", "s0.__class__", "open"])
def test_sizes_are_arithmetic(saved: Path, code: str) -> None:
    forge(saved, lambda graph: size_as_code(graph, code))
    with pytest.raises(FormatError, match="a size that is no arithmetic"):
        lg.load(saved)


@pytest.mark.parametrize("code", ["torch.load('x') == 1", "torch.hub.load('x')", "torch.ops", "torch.sym_max.__self__"])
def test_conditions_are_arithmetic_on_sizes(saved: Path, code: str) -> None:
    forge(saved, lambda graph: guard_as_code(graph, code))
    with pytest.raises(FormatError, match="a condition that is no arithmetic"):
        lg.load(saved)


def test_conditions_as_torch_2_14_writes_them_load(saved: Path) -> None:
    forge(saved, lambda graph: guard_as_code(graph, "torch.sym_max(1, L['x'].size()[0]) == L['x'].size()[0]"))
    assert lg.load(saved)(x=torch.ones(5, 4)).shape == (5, 4)


@pytest.mark.parametrize(
    "target", ["torch.load", "torch.ops.load_library.x", "torch.ops.aten.from_file.default", "_operator.attrgetter"]
)
def test_only_registered_ops_are_called(saved: Path, target: str) -> None:
    def change(graph: dict[str, Any]) -> None:
        graph["graph_module"]["graph"]["nodes"][0]["target"] = target

    forge(saved, change)
    with pytest.raises(FormatError, match="an op that is not registered"):
        lg.load(saved)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_named(data: bytes) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        check_graph(data, "forward")


@pytest.mark.parametrize(
    ("model_type", "kind"), [("llama", None), ("qwen2_vl", "vision"), ("qwen2_5_vl", "vision"), ("mixtral", None)]
)
def test_what_saving_writes_passes(model_type: str, kind: str | None) -> None:
    program = lg.trace(tiny_model(model_type, kind))
    for name, exported in program.programs.items():
        check_graph(dump_graph(exported), name)


def test_threads_load_at_once(saved: Path) -> None:
    failures: list[BaseException] = []

    def load() -> None:
        try:
            for _ in range(4):
                lg.load(saved)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
