"""Weave a shadow into a tiny model of each family and compare with peft; writes docs/coverage/shadow.md.

    python scripts/coverage_shadow.py                 what has no result yet, a few to a process
    python scripts/coverage_shadow.py --again         everything anew
    python scripts/coverage_shadow.py llama gptj      these anew
    python scripts/coverage_shadow.py --here llama    in this process, as JSON lines, nothing written

Adapters have random non-zero weights and alpha 1.0; the batch is padded on the left. The oracle is peft's uncached
forward: its cached one is wrong with the transformers that this is tested with.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
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
RESULTS = TABLE.with_suffix(".json")
TOLERANCE = 1e-5
NEW_TOKENS = 16
PER_PROCESS = 5  # importing torch and transformers takes longer than most families do

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
    """One family in this process: errors against peft, effect of the adapter, sizes; or why not."""
    sys.path.insert(0, str(ROOT / "tests" / "shadow"))
    import torch
    from shadow_oracle import oracle, padded_batch, tiny_decoder, with_adapter

    import layergraph as lg
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
        return {**row, "upstream": _first_line(error), **without_peft(family)}
    try:
        before = lg.trace(base)
        after = before.apply(WeaveShadow(peft_model))
        found = after(**inputs).logits
        row["error"] = (found - expected).abs().max().item()
        row["effect"] = (plain - expected).abs().max().item()
        row["disabled"] = bool(torch.equal(after(**inputs, adapter=None).logits, before(**inputs).logits))
        row["blocks"] = len(after.ir.shadow.geometry["blocks"])
        row["nodes"] = [[len(graphs[name].nodes) for name in graphs] for graphs in (before.ir, after.ir)]
    except Exception as error:
        return {**row, "failed": _first_line(error)}
    if "step" not in after.programs:
        return {**row, "uncached": str(after.ir.model.uncached_because)[:160]}
    try:
        row |= cached(peft_model, after, inputs)
    except Exception as error:
        row["uncached"] = _first_line(error)
    return row


def without_peft(family: str) -> dict[str, Any]:
    """What becomes of a family that peft itself fails on, with a fresh adapter of random weights.

    There is no oracle but the program itself: steps against its own full forward.
    """
    import torch
    from shadow_oracle import block_paths, padded_batch, tiny_decoder

    import layergraph as lg

    try:
        base = tiny_decoder(family)
        config: dict[str, Any] = {"task_type": "CAUSAL_LM", "init_weights": False}
        with contextlib.suppress(AssertionError):
            config["target_modules"] = block_paths(base)
        program = lg.trace(base).apply(lg.WeaveShadow(config=config))
        ids = padded_batch()["input_ids"]
        whole = program(input_ids=ids).logits
        if "step" not in program.programs:
            return {"here": f"woven, uncached only: {program.ir.model.uncached_because}"[:200]}
        session = program.session()
        pieces = (slice(0, 6), slice(6, 7), slice(7, 9))
        parts = [session.step(ids[:, part], logits_to_keep=0)["logits"] for part in pieces]
        error = (torch.cat(parts, dim=1) - whole).abs().max().item()
        return {"here": f"woven; steps differ from its own full forward by {error:.0e}"}
    except Exception as error:
        return {"here": _first_line(error)}


def cached(peft_model: Any, program: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens against peft without a cache; a padded prefill and eight single steps against one full forward."""
    import torch
    from shadow_oracle import oracle

    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    theirs = peft_model.generate(**inputs, use_cache=False, **options)
    ours = program.generate(**inputs, **options)
    mask = inputs["attention_mask"]
    prompt = mask.shape[1]
    whole = torch.nn.functional.pad(mask, (0, theirs.shape[1] - prompt), value=1)
    given = {"input_ids": theirs, "attention_mask": whole}
    if "position_ids" in inspect.signature(peft_model.get_base_model().forward).parameters:
        given["position_ids"] = (whole.cumsum(1) - 1).clamp(min=0)
    wanted = oracle(peft_model, given).logits
    session, worst = program.session(), 0.0
    for first, last in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + 8))]:
        part = slice(first, last)
        logits = session.step(theirs[:, part], whole[:, part], logits_to_keep=0)["logits"]
        worst = max(worst, (logits - wanted[:, part]).abs()[whole[:, part].bool()].max().item())
    return {
        "tokens": torch.equal(ours, theirs),
        "steps": worst,
        "largest": wanted.abs().max().item(),
        "holds": list(session.cache.held_kinds),
    }


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
    """Uncached, disabled and cached, all of it."""
    if not (passed_uncached(row) and row.get("tokens")):
        return False
    # A step sums in another order than a full forward: what float32 leaves of that grows with the logits.
    return bool(row["steps"] <= TOLERANCE * max(1.0, row.get("largest", 1.0)))


def passed_uncached(row: dict[str, Any]) -> bool:
    return row.get("error", 1.0) <= TOLERANCE and row["effect"] > 1e-2 and row["disabled"]


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    if "error" not in row:
        reason = row.get("failed") or (f"upstream: {row['upstream']}" if "upstream" in row else "not run")
        if "here" in row:
            reason += f"; here: {row['here']}"
        return f"| {row['family']} | {row.get('model', '')} | | | | | | {reason.replace('|', '/')} |"
    nodes = ", ".join(f"{before} to {after}" for before, after in zip(*row["nodes"], strict=False))
    verdict = "passes" if passed(row) else "FAILS" if "uncached" not in row else f"uncached only: {row['uncached']}"
    if not row["disabled"]:
        verdict += ", not bit-equal when disabled"
    steps = f"{row['steps']:.0e}" if "steps" in row else ""
    tokens = {True: "equal", False: "differ", None: ""}[row.get("tokens")]
    holds = ", ".join(row.get("holds", ()))
    logits = f"{row['error']:.0e} (of {row['effect']:.1f})"
    cells = [row["family"], row["model"], nodes, logits, steps, tokens, holds, verdict.replace("|", "/")]
    return f"| {' | '.join(cells)} |"


def known() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(results: dict[str, Any]) -> None:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    head = "| family | model | nodes, forward and step | logits | steps | tokens | holds | |\n" + "|---" * 8 + "|"

    def lines(names: Sequence[str]) -> str:
        return "\n".join(line(results.get(name, {"family": name})) for name in names)

    count = sum(passed(results.get(name, {})) for name in FAMILIES)
    text = f"""# Shadow adapters by family

Written by `python scripts/coverage_shadow.py`; do not edit. Tiny models, adapters with random weights and alpha 1.0,
three rows padded on the left, float32 on a CPU; {packages}.

* *logits*: largest difference of uncached logits from peft's uncached forward, and how far the adapter moves them;
* *steps*: the same for a padded prefill and {8} single steps with both halves of the cache, against one full forward
  of peft's;
* *tokens*: greedy `program.generate` of {NEW_TOKENS} tokens against peft's without a cache;
* *holds*: what the two halves of the cache keep.

Both differences are at most {TOLERANCE:g} where a family passes (for steps: times the largest logit if that is
above 1, for they sum in another order), and with the adapter disabled the logits are bit-equal
to those of the program before weaving. {count} of {len(FAMILIES)} families pass.

{head}
{lines(FAMILIES)}

## Others

These fail upstream, with a cache or altogether.

{head}
{lines(OTHERS)}
"""
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help="run what has a result already")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each family")
    options = parser.parse_args()
    if options.here:
        for family in options.families:
            start = time.monotonic()
            row = check(family)
            print(json.dumps({**row, "seconds": round(time.monotonic() - start, 1)}), flush=True)
        return 0
    wanted = options.families or [name for name in (*FAMILIES, *OTHERS) if options.again or name not in known()]
    for first in range(0, len(wanted), PER_PROCESS):
        rows = {row["family"]: row for row in run(wanted[first : first + PER_PROCESS], options.timeout)}
        RESULTS.write_text(json.dumps(known() | rows, indent=1, sort_keys=True) + "\n")
        write(known())
    return 0 if all(passed(known().get(name, {})) for name in FAMILIES) else 1


if __name__ == "__main__":
    sys.exit(main())
