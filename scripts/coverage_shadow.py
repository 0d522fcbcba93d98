"""Weave a shadow into a tiny model of each family and compare with peft; writes docs/coverage/shadow.md.

    python scripts/coverage_shadow.py                 all families, a few to a process
    python scripts/coverage_shadow.py llama gptj      some, printed, nothing written
    python scripts/coverage_shadow.py --here llama    in this process, as JSON lines

Adapters have random non-zero weights and alpha 1.0; the batch is padded on the left. The oracle is peft's uncached
forward: its cached one is wrong with the transformers that this is tested with.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "coverage" / "shadow.md"
TOLERANCE = 1e-5
PER_PROCESS = 10  # importing torch and transformers takes longer than most families do

_NAMES = """
gpt2 opt bloom gpt_neo gptj gpt_bigcode gpt_neox llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2
gemma3_text phi phi3 falcon stablelm starcoder2 olmo olmo2 olmoe cohere cohere2 granite granitemoe gpt_oss deepseek_v3
nemotron nemotron_h smollm3 glm glm4 ernie4_5 llama4_text codegen persimmon xglm biogpt apertus seed_oss
hunyuan_v1_dense exaone4 arcee helium diffllama minimax
"""
# These fail upstream, with a cache or altogether.
_OTHER_NAMES = "gemma4_text mamba mamba2 bamba jamba recurrent_gemma mpt rwkv qwen3_next lfm2"
FAMILIES, OTHERS = _NAMES.split(), _OTHER_NAMES.split()


def check(family: str) -> dict[str, Any]:
    """One family in this process: error against peft, effect of the adapter, sizes; or why not."""
    sys.path.insert(0, str(ROOT / "tests" / "shadow"))
    import torch
    from shadow_oracle import oracle, padded_batch, tiny_decoder, weave, with_adapter

    from layergraph.passes.weave_shadow import WeaveShadow

    torch.set_num_threads(1)
    inputs = padded_batch()
    row: dict[str, Any] = {"family": family}
    try:
        base = tiny_decoder(family)
        row["model"] = type(base).__name__
        plain = oracle(base, inputs).logits
        peft_model = with_adapter(copy.deepcopy(base))
        expected = oracle(peft_model, inputs).logits
    except Exception as error:
        return {**row, "upstream": _first_line(error)}
    try:
        before = weave(base)
        after = before.apply(WeaveShadow(peft_model))
        found = after(**inputs).logits
        row["error"] = (found - expected).abs().max().item()
        row["effect"] = (plain - expected).abs().max().item()
        row["disabled"] = bool(torch.equal(after(**inputs, adapter=None).logits, before(**inputs).logits))
        row["blocks"] = len(after.ir.shadow.geometry["blocks"])
        row["nodes"] = [len(before.ir.forward.nodes), len(after.ir.forward.nodes)]
    except Exception as error:
        row["failed"] = _first_line(error)
    return row


def _first_line(error: Exception) -> str:
    found = getattr(error, "found", None)
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return (f"{text} ({found})" if found else text)[:160]


def run(families: Sequence[str], timeout: float) -> list[dict[str, Any]]:
    """A few families in a process of their own: one that dies or hangs takes only its neighbours along."""
    command = [sys.executable, __file__, "--here", *families]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        timer = threading.Timer(timeout * len(families), process.kill)
        timer.start()
        rows = {}
        for text in process.stdout or ():
            if text.startswith("{"):
                row = json.loads(text)
                rows[row["family"]] = row
                print(line(row), f"{row['seconds']} s", flush=True)
        process.wait()
        timer.cancel()
        errors.seek(0)
        last = errors.read().strip()[-160:]
    return [rows.get(family, {"family": family, "failed": f"its process died: {last}"}) for family in families]


def passed(row: dict[str, Any]) -> bool:
    return row.get("error", 1.0) <= TOLERANCE and row["effect"] > 1e-2 and row["disabled"]


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    if "error" not in row:
        reason = row.get("failed") or f"upstream: {row.get('upstream')}"
        return f"| {row['family']} | {row.get('model', '')} | | | | {reason.replace('|', '/')} |"
    before, after = row["nodes"]
    verdict = "passes" if passed(row) else "FAILS"
    if not row["disabled"]:
        verdict += ", not bit-equal when disabled"
    return (
        f"| {row['family']} | {row['model']} | {row['blocks']} | {before} to {after} | {row['error']:.1e} "
        f"(effect {row['effect']:.2f}) | {verdict} |"
    )


def write(rows: list[dict[str, Any]]) -> None:
    named, others = rows[: len(FAMILIES)], rows[len(FAMILIES) :]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    head = "| family | model | blocks | nodes | largest error of logits | |\n|---|---|---|---|---|---|"
    count = sum(map(passed, named))
    text = f"""# Shadow adapters by family

Written by `python scripts/coverage_shadow.py`. Tiny models, adapters with random weights and alpha 1.0, three rows
padded on the left, float32 on a CPU; {packages}. The error is the largest difference of uncached logits from peft's
uncached forward (at most {TOLERANCE:g} to pass); the effect is how far the adapter moves them. With the adapter
disabled the logits are bit-equal to those of the program before weaving.

{count} of {len(named)} families pass.

{head}
{chr(10).join(map(line, named))}

## Others

These fail upstream, with a cache or altogether.

{head}
{chr(10).join(map(line, others))}
"""
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each family")
    options = parser.parse_args()
    if options.here:
        for family in options.families:
            start = time.monotonic()
            row = check(family)
            print(json.dumps({**row, "seconds": round(time.monotonic() - start, 1)}), flush=True)
        return 0
    wanted = options.families or [*FAMILIES, *OTHERS]
    rows = []
    for first in range(0, len(wanted), PER_PROCESS):
        rows += run(wanted[first : first + PER_PROCESS], options.timeout)
    if not options.families:
        write(rows)
    return 0 if all(passed(row) for row in rows[: len(FAMILIES)]) else 1


if __name__ == "__main__":
    sys.exit(main())
