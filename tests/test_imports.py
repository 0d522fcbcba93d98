"""The import table of the architecture: one way only, and heavy libraries where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "layergraph"
# Everything below the wiring may import these.
COMMON = ("errors", "compat")


@dataclass(frozen=True)
class Rule:
    """What a part may import: ours by dotted prefix, and other packages beyond the standard library."""

    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


RULES = {
    "errors": Rule(),
    "compat": Rule((), ("torch", "triton", "transformers", "peft")),
    "ir": Rule(("ir",), ("torch", "safetensors", "networkx")),
    "kernels": Rule(("kernels",), ("torch", "triton")),
    "trace": Rule(("ir", "trace"), ("torch", "transformers", "peft", "safetensors")),
    "verify": Rule(("ir", "verify"), ("torch",)),
    "passes": Rule(("ir", "passes", "trace.span", "kernels.ops", "kernels.join"), ("torch",)),
    "aot": Rule(("ir", "aot", "kernels.ops"), ("torch", "safetensors")),
    "runtime": Rule(("ir", "aot", "runtime", "kernels.ops"), ("torch", "transformers")),
}
# The wiring, on top of everything: api, program, report, cli, demo, testing...
WIRING_OTHERS = ("torch", "transformers", "peft", "safetensors", "click", "rich", "triton", "networkx")
# Commands that live with what they measure.
ALSO = {
    "kernels/bench.py": ("click", "rich", "matplotlib"),
    "kernels/bench_report.py": ("click", "rich", "matplotlib"),
}


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    is_lazy: bool


def imports(path: Path) -> list[Import]:
    """All imports of a file, those within functions too; not those for type checkers only."""
    return list(_imports(ast.parse(path.read_text()), lazy=False))


def _imports(node: ast.AST, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (Import(child.lineno, alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            # ``from layergraph.kernels import ops`` is an import of layergraph.kernels.ops.
            parent = SRC.parent.joinpath(*str(child.module).split("."))
            for alias in child.names:
                is_module = (parent / alias.name).is_dir() or (parent / f"{alias.name}.py").is_file()
                yield Import(child.lineno, f"{child.module}.{alias.name}" if is_module else str(child.module), lazy)
        else:
            yield from _imports(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def faults(path: Path) -> Iterator[str]:
    """What a file imports against the table."""
    import sys

    relative = path.relative_to(SRC)
    part = relative.parts[0].removesuffix(".py")
    rule = RULES.get(part)
    others = (*(rule.others if rule else WIRING_OTHERS), *ALSO.get(relative.as_posix(), ()))
    for item in imports(path):
        top, _, rest = item.module.partition(".")
        where = f"{relative}:{item.line} imports {item.module}"
        if top == "layergraph":
            allowed = rule is None or any(_within(rest, prefix) for prefix in (*rule.ours, *COMMON))
            if not allowed or (rule is not None and not rest):
                yield where
        elif top not in sys.stdlib_module_names and top not in others:
            yield where
        if top == "triton" and relative.name != "triton.py" and part != "compat" and not item.is_lazy:
            yield f"{where}: only triton.py may, others lazily"
        if top == "peft" and not item.is_lazy:
            yield f"{where}: only lazily"


def _within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


FILES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SRC).as_posix())
def test_imports_follow_the_table(path: Path) -> None:
    assert list(faults(path)) == []


def test_no_pass_imports_another() -> None:
    passes = {
        f"layergraph.passes.{path.stem}"
        for path in (SRC / "passes").glob("*.py")
        if any(
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "pass_name"
            and isinstance(node.value, ast.Constant)
            and node.value.value
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert {"layergraph.passes.tap_outputs", "layergraph.passes.fuse_patch_embed"} <= passes
    bad = [
        f"{path.name} imports {item.module}"
        for path in (SRC / "passes").glob("*.py")
        if path.name not in ("__init__.py", "registry.py")
        for item in imports(path)
        if item.module in passes
    ]
    assert bad == []


def test_the_command_line_starts_without_heavy_imports() -> None:
    for path in [SRC / "__init__.py", SRC / "errors.py", SRC / "progress.py", *(SRC / "cli").glob("*.py")]:
        heavy = {"torch", "transformers", "rich", "safetensors"}
        assert [item for item in imports(path) if not item.is_lazy and item.module.partition(".")[0] in heavy] == []


def test_the_check_finds_faults(tmp_path: Path) -> None:
    assert _within("trace.span", "trace.span") and not _within("trace.spanner", "trace.span")
    source = "def f():\n    from layergraph.trace import span\nif TYPE_CHECKING:\n    import peft\n"
    file = tmp_path / "x.py"
    file.write_text(source)
    assert [(item.line, item.is_lazy) for item in imports(file)] == [(2, True)]
