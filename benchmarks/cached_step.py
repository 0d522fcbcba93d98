"""A cached step costs what is held, not what fits: capacity 4,096 against 256 with 100 tokens held.

    python benchmarks/cached_step.py [--layers 4] [--width 256] [--steps 200]

Single-token steps on the two caches, interleaved; medians of process-wide wall time per step, their ratio, and how far
single steps spread. Written to benchmarks/results/cached_step.json with versions, threads and machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers

import layergraph as lg

RESULT = Path(__file__).parent / "results" / "cached_step.json"
CAPACITIES, HELD = (256, 4096), 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    program = lg.trace(model(options.layers, options.width))
    sessions = {capacity: program.session(capacity=capacity) for capacity in CAPACITIES}
    prompt, token = torch.randint(0, 512, (1, HELD)), torch.randint(0, 512, (1, 1))
    times: dict[int, list[float]] = {capacity: [] for capacity in CAPACITIES}
    for session in sessions.values():
        session.step(prompt)
    for number in range(options.steps):
        # In turns: whoever comes second finds the weights in the processor's cache, or the machine busier.
        for capacity, session in sorted(sessions.items(), reverse=number % 2 == 1):
            start = time.perf_counter()
            session.step(token)
            times[capacity].append(time.perf_counter() - start)
            session.cache.crop(-1)
    medians = {str(capacity): 1000 * statistics.median(values) for capacity, values in times.items()}
    spread = {
        str(capacity): [1000 * value for value in statistics.quantiles(values, n=4)[::2]]
        for capacity, values in times.items()
    }
    result = {
        "median_ms": medians,
        "quartiles_ms": spread,
        "ratio": medians["4096"] / medians["256"],
        "options": vars(options),
        "held": HELD,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {platform.processor() or 'unknown processor'}",
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print("| capacity | median ms | quartiles ms |\n|---|---|---|")
    for capacity in medians:
        low, high = spread[capacity]
        print(f"| {capacity} | {medians[capacity]:.2f} | {low:.2f} to {high:.2f} |")
    print(f"\nratio {result['ratio']:.3f}")


def model(layers: int, width: int) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=width // 8,
        max_position_embeddings=8192,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


if __name__ == "__main__":
    main()
