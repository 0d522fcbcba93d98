"""Write docs/coverage/cached.md: every decoder family, tiny, cached program against the uncached eager model.

    python scripts/cover_cached.py [family ...] [--again] [--timeout 600]

For each family: trace, greedy generate of 16 tokens for three rows, two of them padded on the left, tokens equal to
those of the eager model without a cache; then the logits of a padded prefill and of eight single steps against the
eager model's logits of the whole text. Each family runs in a process of its own. What is known already stays as it is
(--again forgets it), so a run can be interrupted.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import track

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "coverage"
TABLE, RESULTS = FOLDER / "cached.md", FOLDER / "cached.json"
# The decoders that ShadowPEFT is defined for, then ten more that its own cached path does not serve.
FAMILIES = """
gpt2 opt bloom gpt_neo gptj gpt_bigcode gpt_neox llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2
gemma3_text phi phi3 falcon stablelm starcoder2 olmo olmo2 olmoe cohere cohere2 granite granitemoe gpt_oss deepseek_v3
nemotron nemotron_h smollm3 glm glm4 ernie4_5 llama4_text codegen persimmon xglm biogpt apertus seed_oss
hunyuan_v1_dense exaone4 arcee helium diffllama minimax
"""
OTHERS = "gemma4_text mamba mamba2 bamba jamba recurrent_gemma mpt rwkv qwen3_next lfm2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="all by default")
    parser.add_argument("--again", action="store_true", help="run what is known already")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one family")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.families[0])))
        return
    wanted = options.families or [*FAMILIES.split(), *OTHERS.split()]
    todo = [name for name in wanted if options.again or name not in known()]
    for name in track(todo, "families"):
        if name in known() and not options.again:
            continue  # another run of this script was faster
        found = run(name, options.timeout)
        RESULTS.write_text(json.dumps(known() | {name: found}, indent=1, sort_keys=True) + "\n")
        print(name, found, flush=True)
        TABLE.write_text(table(known()))
    TABLE.write_text(table(known()))


def known() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def run(name: str, timeout: int) -> dict[str, Any]:
    command = [sys.executable, __file__, name, "--one"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    except subprocess.TimeoutExpired:
        return {"state": "failed", "why": f"no answer within {timeout} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"state": "failed", "why": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return json.loads(lines[-1])


def measure(name: str) -> dict[str, Any]:
    """Trace and compare one family."""
    import torch
    import transformers

    import layergraph as lg
    from layergraph.testing.zoo import tiny_model

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = tiny_model(name, "lm")
    start = time.process_time()
    try:
        program = lg.trace(model)
    except lg.LayerGraphError as error:
        return {"state": "failed", "why": one_line(error)}
    seconds = time.process_time() - start
    if "step" not in program.programs:
        return {"state": "refused", "why": program.ir.model.uncached_because}
    torch.manual_seed(0)
    ids = torch.randint(3, min(90, model.config.vocab_size), (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :1] = 0, 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 16,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    theirs = model.generate(ids, use_cache=False, **options)
    ours = program.generate(ids, **options)
    geometry = program.ir["step"].cache
    return {
        "state": "equal" if torch.equal(ours, theirs) else "different",
        "error": steps(model, program, theirs, mask),
        "holds": [group.name for group in geometry.groups] + ["states"] * bool(geometry.states),
        "nodes": [len(program.ir["forward"].nodes), len(program.ir["step"].nodes)],
        "seconds": round(seconds, 1),
    }


def steps(model: Any, program: Any, tokens: Any, mask: Any) -> float:
    """Largest difference of logits, relative to the largest logit: a prefill, then eight single steps."""
    import torch

    prompt = mask.shape[1]
    whole = torch.nn.functional.pad(mask, (0, tokens.shape[1] - prompt), value=1)
    given = {"attention_mask": whole, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = model(input_ids=tokens, **given).logits
    session = program.session()
    worst = 0.0
    for first, last in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + 8))]:
        part = slice(first, last)
        logits = session.step(tokens[:, part], whole[:, part], logits_to_keep=0)["logits"]
        gap = (logits - wanted[:, part]).abs().amax(-1)[whole[:, part].bool()].max()
        worst = max(worst, float(gap / wanted.abs().max()))
    return worst


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def table(results: dict[str, Any]) -> str:
    def rows(names: str) -> list[str]:
        lines = [
            "| family | tokens | logits | holds | nodes, forward and step | trace, CPU s |",
            "|---|---|---|---|---|---|",
        ]
        for name in names.split():
            item = results.get(name, {"state": "not run"})
            if "error" not in item:
                lines.append(f"| {name} | {item['state']} | | {item.get('why') or ''} | | |")
                continue
            nodes = ", ".join(map(str, item["nodes"]))
            holds = ", ".join(item["holds"])
            lines.append(f"| {name} | {item['state']} | {item['error']:.0e} | {holds} | {nodes} | {item['seconds']} |")
        return lines

    good = sum(results.get(name, {}).get("state") == "equal" for name in FAMILIES.split())
    text = [
        "# Cached programs by family",
        "",
        "Written by `python scripts/cover_cached.py`; do not edit. Tiny models of two layers (nemotron_h: four), fp32,",
        "random weights. *tokens*: greedy `program.generate` of 16 tokens, three rows of 9 tokens of which 4 and 1 are",
        "padding on the left, against `model.generate(use_cache=False)` of the eager model. *logits*: the largest",
        "difference over a padded prefill and eight single steps, relative to the largest logit. *holds*: windows and",
        "chunks by size; `states` are convolutional or recurrent.",
        "",
        f"{good} of {len(FAMILIES.split())} families equal.",
        "",
        *rows(FAMILIES),
        "",
        "Ten more:",
        "",
        *rows(OTHERS),
    ]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    main()
