"""Run the documents: every block marked ``run``, and the output shown after it.

    python docs/refresh.py            run all, write what they print into the documents
    python docs/refresh.py --check    run all, fail where a document shows something else
    python docs/refresh.py README.md  only these

```` ```python run ```` blocks of one document run in order in one namespace, in an empty folder. A
```` ```text output ```` block after them holds what they printed since the last one. A ```` ```console run ```` block
holds ``$ layergraph ...`` lines, each followed by what it printed. Hashes, errors of the order of rounding, and sizes
of files may differ from run to run and are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(?P<info>[a-z]+ (?:run|output))\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_LOOSE = (
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "<hash>"),
    (re.compile(r"-[0-9a-f]{16}\b"), "-<hash>"),
    (re.compile(r"\d\.\de[-+]\d\d"), "<error>"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
)


def documents() -> list[Path]:
    """Documents with something to run."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if path.is_file() and any(m["info"].endswith("run") for m in blocks(path))]


def blocks(path: Path) -> list[re.Match[str]]:
    """The marked blocks of a document, in order."""
    return list(_BLOCK.finditer(path.read_text()))


def refreshed(path: Path) -> str:
    """The document with the outputs that its blocks print now. Changes the working folder of this process."""
    text, last, parts = path.read_text(), 0, []
    # A real module: dataclasses and saved programs look classes up by it.
    module = types.ModuleType(path.stem)
    sys.modules[module.__name__] = module
    printed = io.StringIO()
    for match in blocks(path):
        parts.append(text[last : match.start("body")])
        body, last = match["body"], match.end("body")
        if match["info"] == "python run":
            line = text[: match.start("body")].count("\n")
            code = compile("\n" * line + body, str(path.relative_to(ROOT)), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, module.__dict__)
        elif match["info"] == "console run":
            body = "".join(_console(line) for line in body.splitlines() if line.startswith("$ "))
        else:
            body = _tidy(printed.getvalue())
            printed = io.StringIO()
        parts.append(body)
    return "".join([*parts, text[last:]])


def _console(line: str) -> str:
    """A command line and what it prints, the exit code if it is not 0."""
    from click.testing import CliRunner

    from layergraph.cli import cli

    program, *args = shlex.split(line[2:])
    assert program == "layergraph", line
    result = CliRunner().invoke(cli, args, prog_name="layergraph")
    code = f"(exit code {result.exit_code})\n" if result.exit_code else ""
    return f"{line}\n{_tidy(result.output)}{code}"


def _tidy(text: str) -> str:
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)


def loose(text: str) -> str:
    """The text without what may differ from run to run."""
    for pattern, word in _LOOSE:
        text = pattern.sub(word, text)
    return text


def _run_one(path: Path) -> str:
    """In this process, in an empty folder, with fixed seeds."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return refreshed(path)
        finally:
            os.chdir(ROOT)


def run(path: Path) -> str:
    """The refreshed document, made in a process of its own so that documents do not meet."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "100",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, __file__, "--one", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **quiet})
    if done.returncode:
        raise RuntimeError(f"{path.relative_to(ROOT)} does not run:\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", type=Path)
    options = parser.parse_args()
    paths = [path.resolve() for path in options.paths] or documents()
    if options.one:
        sys.stdout.write(_run_one(paths[0]))
        return 0
    stale = []
    for path in paths:
        text, new = path.read_text(), run(path)
        if loose(text) != loose(new):
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(new)
    print("\n".join(f"{'stale' if options.check else 'rewritten'}: {name}" for name in stale) or "all up to date")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
