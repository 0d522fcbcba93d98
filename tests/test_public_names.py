"""The public surface is declared, and the documents speak of nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import layergraph
from layergraph.cli import cli

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "layergraph"
FILES = [path for path in sorted(SRC.rglob("*.py")) if path.name != "__main__.py"]
# Kernels' own documents are written with the kernels; the table of models is generated.
DOCUMENTS = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.name not in ("kernels.md", "adding_a_kernel.md") and "coverage" not in path.parts
]
_NAME = re.compile(r"\b(?:lg|layergraph)((?:\.[A-Za-z_]\w*)+)")
_COMMAND = re.compile(r"(?:^|`|\$ )layergraph ([a-z][a-z-]*)", re.MULTILINE)


def declared(tree: ast.Module) -> list[str] | None:
    """``__all__`` as written, or None."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SRC).as_posix())
def test_public_names_are_declared(path: Path) -> None:
    tree = ast.parse(path.read_text())
    defined = {
        node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    public = {name for name in defined if not name.startswith("_")}
    names = declared(tree)
    if names is None:
        assert not tree.body or all(isinstance(node, ast.Expr) for node in tree.body), "no __all__"
        return
    assert len(names) == len(set(names))
    assert public - set(names) == set(), "public, and not in __all__: declare it, or start its name with _"


def test_what_the_package_declares_is_there() -> None:
    for name in layergraph.__all__:
        assert getattr(layergraph, name) is not None
    assert set(layergraph._HOMES) | {"__version__", "testing"} == set(layergraph.__all__)


def resolve(dotted: str) -> bool:
    """Whether ``.testing.check_pass`` or ``.Program.apply`` exists; instance attributes count by annotation."""
    import importlib

    value: object = layergraph
    path = "layergraph"
    for name in dotted.strip(".").split("."):
        path += f".{name}"
        if hasattr(value, name):
            value = getattr(value, name)
            continue
        try:
            value = importlib.import_module(path)
        except ImportError:
            return False
    return True


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_mention_only_names_which_exist(path: Path) -> None:
    # Outputs print names of ops (layergraph.shadow_inject), which are no Python names.
    text = re.sub(r"(?ms)^```text output$.*?^```$", "", path.read_text())
    unknown = [dotted for dotted in dict.fromkeys(_NAME.findall(text)) if not resolve(dotted)]
    assert unknown == []
    commands = [name for name in dict.fromkeys(_COMMAND.findall(text)) if name not in cli.list_commands(None)]  # type: ignore[arg-type, attr-defined]
    assert commands == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert missing == []
