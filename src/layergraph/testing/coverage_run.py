"""``python -m layergraph.testing.coverage_run``: check every model type, resume where it stopped, write the tables."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check model types that have no result yet, then write the tables."""
    parser = argparse.ArgumentParser(prog="coverage", description=__doc__)
    parser.add_argument("model_types", nargs="*", help="only these (checked anew); all by default")
    parser.add_argument("--out", type=Path, default=Path("docs/coverage"), help="folder of results and tables")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one model")
    parser.add_argument("--memory", type=int, default=6, help="GiB for one model")
    again = parser.add_argument("--again", action="append", default=[], metavar="STATE")
    again.help = "check anew what is in this state (fail, untraced); may be given several times"
    parser.add_argument("--tables-only", action="store_true", help="check nothing, write the tables")
    given = parser.parse_args(arguments)
    from transformers import CONFIG_MAPPING

    if unknown := [name for name in given.model_types if name not in CONFIG_MAPPING]:
        parser.error(f"transformers has no model type {', '.join(unknown)}")
    given.out.mkdir(parents=True, exist_ok=True)
    results = read_results(given.out / RESULTS)
    if not given.tables_only:
        check_all(given, results)
    from layergraph.testing.coverage_tables import write_tables

    results = read_results(given.out / RESULTS)
    # Results that were made anew since stand twice until here, and those of other versions of transformers remain
    results = {name: row for name, row in results.items() if name in CONFIG_MAPPING}
    whole = given.out / f"{RESULTS}.new"
    whole.write_text("".join(json.dumps(row) + "\n" for row in results.values()))
    whole.replace(given.out / RESULTS)
    write_tables(given.out, list(results.values()))
    return 0


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each model type; a line cut off by a kill is dropped."""
    results: dict[str, dict[str, Any]] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                results[row["model_type"]] = row
    return dict(sorted(results.items()))


def check_all(given: argparse.Namespace, done: dict[str, dict[str, Any]]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    import torch
    from transformers import CONFIG_MAPPING

    from layergraph.testing import coverage  # noqa: F401  imported once here, inherited by every child
    from layergraph.testing.coverage_configs import let_torchvision_load

    let_torchvision_load()
    torch.set_num_threads(1)
    wanted = given.model_types or [name for name in sorted(CONFIG_MAPPING.keys()) if _is_open(done.get(name), given)]
    started = time.monotonic()
    for number, model_type in enumerate(wanted, 1):
        row = _in_child(model_type, given.timeout, given.memory)
        with open(given.out / RESULTS, "a") as file:
            # Ends a line that a kill cut off
            file.write("\n" * (number == 1) + json.dumps(row) + "\n")
        states = f"taps {row['taps'].get('state', '?'):9} patch-embed {row['patch_embed'].get('state', '?'):9}"
        reason = row["taps"].get("reason") or row["reason"]
        elapsed = time.monotonic() - started
        print(f"[{number}/{len(wanted)} {elapsed:.0f} s] {model_type:28} {states} {reason[:120]}", flush=True)


def _is_open(row: dict[str, Any] | None, given: argparse.Namespace) -> bool:
    if row is None:
        return True
    return bool({row["taps"].get("state"), row["patch_embed"].get("state")} & set(given.again))


def _in_child(model_type: str, timeout: int, memory_gib: int) -> dict[str, Any]:
    """The row of one model type, made by a forked process with limits: imports are paid once."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(model_type, writer, memory_gib)
    os.close(writer)
    deadline = time.monotonic() + timeout
    data = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            os.kill(pid, signal.SIGKILL)
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        data += part
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ValueError):
        return dict(json.loads(data))
    reason = f"more than {timeout} s" if time.monotonic() >= deadline else f"the process ended with status {status}"
    empty = {"state": "untraced", "reason": reason}
    return {
        "model_type": model_type,
        "cls": "",
        "stage": "limit",
        "reason": reason,
        "sizes": "",
        "taps": empty,
        "patch_embed": dict(empty),
    }


def _child(model_type: str, writer: int, memory_gib: int) -> None:
    from layergraph.testing.coverage import check_model_type

    resource.setrlimit(resource.RLIMIT_DATA, (memory_gib << 30, memory_gib << 30))
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())
        os.dup2(null.fileno(), sys.stderr.fileno())
    try:
        row = dataclasses.asdict(check_model_type(model_type))
        with os.fdopen(writer, "w") as file:
            json.dump(row, file)
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["RESULTS", "check_all", "main", "read_results"]
