"""The steps of gpu.sh: numbers against float64, precision modes, timings, tuning, and a package run by itself."""

# ruff: noqa: E402 -- the environment is set before what reads it is imported
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REHEARSE = "--rehearse" in sys.argv
if REHEARSE:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at import

import torch
import triton

from layergraph.kernels import bench, bench_report, ops, tuning
from layergraph.kernels.common import launch
from layergraph.kernels.shadow_inject import triton as inject_kernels
from layergraph.kernels.shadow_update import triton as update_kernels
from layergraph.kernels.shadow_update_inject import triton as joined_kernels

DEVICE = "cpu" if REHEARSE else "cuda"
LAUNCH: dict[str, Callable[..., Any]] = {
    "shadow_inject": inject_kernels.launch,
    "shadow_update": update_kernels.launch,
    "shadow_update_inject": joined_kernels.launch,
}
JOINED = "shadow_update_inject"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ALLOWED = {F32: 1e-6, F16: 4e-4, BF16: 3e-3}
LIMIT = 440.0  # seconds for everything; the caller's limit is eight minutes
START = time.monotonic()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What each step goes through."""

    widths: tuple[int, ...] = (1024, 4096)
    ranks: tuple[int, ...] = (8, 64)
    tokens: tuple[int, ...] = (1, 16, 512, 4096)
    prefill: tuple[int, int] = (4096, 4096)
    seconds: float = 1.0


FULL = Sizes()
SMALL = Sizes(widths=(64, 96), ranks=(8, 64), tokens=(1, 16, 33), prefill=(40, 96), seconds=0.05)
SIZES = SMALL if REHEARSE else FULL


def left() -> float:
    """Seconds until everything must be over."""
    return LIMIT - (time.monotonic() - START)


def arch() -> str:
    """The architecture whose configurations are used; in a rehearsal, that of the machine rehearsed for."""
    if REHEARSE:
        return "sm_90"
    from layergraph.kernels.common.triton import current_arch

    return current_arch()


def problem(op: str, given: tuple[torch.Tensor, ...], r: int) -> tuning.Problem:
    """The tuning problem of a call."""
    return launch.problem_of(op, given[0], given[2], r, arch())


def prepared(op: str, given: tuple[torch.Tensor, ...], r: int, config: tuning.Config | None = None) -> launch.Plan:
    """The launch plan of a call, by the table unless a configuration is given."""
    posed = problem(op, given, r)
    return launch.plan(posed, config or tuning.choose(posed), 0 if op == "shadow_update" else r, r)


def errors(op: str, found: Any, given: tuple[torch.Tensor, ...]) -> float:
    """The larger relative error of the results against float64."""
    wide = [tensor if tensor.dim() == 0 else tensor.double() for tensor in given]
    wanted = ops.DECOMPOSITIONS[bench.OPS[op]](*wide)
    pairs = zip(wanted, found, strict=True) if isinstance(wanted, tuple) else [(wanted, found)]
    return max(((result.double() - right).norm() / right.norm()).item() for right, result in pairs)


def numbers() -> Iterator[dict[str, Any]]:
    """Every op against float64; fresh memory holds NaN, so that what is not written shows."""
    mixes = [(BF16, F32), (BF16, BF16), (F16, F32), (F32, F32)]
    for hidden, weight in mixes:
        for op in LAUNCH if (hidden, weight) == mixes[0] else (JOINED,):
            for d in SIZES.widths:
                for r in SIZES.ranks:
                    for tokens in SIZES.tokens:
                        given = bench.arguments(op, tokens, d, r, r, hidden, weight, DEVICE)
                        if REHEARSE:
                            found = LAUNCH[op](*given, prepared=prepared(op, given, r))
                        else:
                            found = bench.OPS[op](*given)
                        plain = errors(op, ops.DECOMPOSITIONS[bench.OPS[op]](*given), given)
                        error = errors(op, found, given)
                        yield {
                            "op": op, "hidden": str(hidden), "weight": str(weight), "d": d, "r": r, "tokens": tokens,
                            "error": error, "plain_error": plain,
                            # tf32x3 is not ieee: a float32 result may lose a little beside cuBLAS's float32.
                            "ok": error <= max(ALLOWED[hidden], 1.5 * plain),
                        }  # fmt: skip


def precisions() -> Iterator[dict[str, Any]]:
    """What each precision mode costs in accuracy, for float32 adapters."""
    tokens, d = SIZES.prefill
    modes = ["tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"]
    for hidden in (BF16, F32):
        given = bench.arguments(JOINED, tokens, d, 8, 8, hidden, F32, DEVICE)
        plan = prepared(JOINED, given, 8)
        for mode in modes:
            changed = dataclasses.replace(plan, constants={**plan.constants, "PRECISION": mode})
            line = {"hidden": str(hidden), "mode": mode, "shipped": mode == plan.constants["PRECISION"]}
            try:
                yield {**line, "error": errors(JOINED, LAUNCH[JOINED](*given, prepared=changed), given)}
            except Exception as error:  # a mode that a target lacks is a finding, not a failure
                yield {**line, "error": None, "refused": f"{type(error).__name__}: {error}"[:300]}


def timings() -> Iterator[dict[str, Any]]:
    """Medians with quartiles, floors beside them, against eager and Inductor; on CUDA each is a graph replay."""
    _, d = SIZES.prefill
    for op in LAUNCH:
        for r in SIZES.ranks:
            against = ("eager", "inductor") if op == JOINED else ("eager",)
            counts = (min(SIZES.tokens), max(SIZES.tokens)) if r > 8 else SIZES.tokens
            for result in bench.run(op, d, r, counts, "bfloat16", against, device=DEVICE, seconds=SIZES.seconds):
                yield result.as_dict()


def rows() -> Iterator[dict[str, Any]]:
    """Candidates for three sizes, timed: what the table should say. The fastest are kept in kernels_tuned.json."""
    _, d = SIZES.prefill
    for tokens in (1, SIZES.tokens[-2], SIZES.tokens[-1]):
        for r in SIZES.ranks:
            given = bench.arguments(JOINED, tokens, d, r, r, BF16, F32, DEVICE)
            timed: list[dict[str, Any]] = []

            def measure(config: tuning.Config, given: Any = given, r: int = r, timed: Any = timed) -> float:
                if left() < 30:
                    raise TimeoutError("no time left")
                plan = prepared(JOINED, given, r, config)
                error = errors(JOINED, LAUNCH[JOINED](*given, prepared=plan), given)
                if not error <= ALLOWED[BF16]:
                    raise ArithmeticError(f"error {error}")
                calls = {"floor": lambda: LAUNCH[JOINED](*given, prepared=plan)}
                taken = sorted(bench.times(calls, DEVICE, 0.02)["floor"])
                timed.append({"config": dataclasses.asdict(config), "us": taken[len(taken) // 2]})
                return taken[len(taken) // 2]

            posed = problem(JOINED, given, r)
            before = tuning.choose(posed)
            try:
                # The interpreter takes seconds for what a GPU does in microseconds: a few candidates show the step.
                among = tuning.candidates(posed)[:3] if REHEARSE else None
                best, cost = tuning.autotune(posed, measure, among)
            except ValueError as error:
                yield {"tokens": tokens, "r": r, "skipped": str(error)[:200]}
                continue
            by_table = next((line["us"] for line in timed if line["config"] == dataclasses.asdict(before)), None)
            yield {"tokens": tokens, "r": r, "best": dataclasses.asdict(best), "best_us": cost, "table_us": by_table,
                   "timed": timed}  # fmt: skip


RUNNER = """
import sys, torch
sys.modules["layergraph"] = None
model = torch._inductor.aoti_load_package(sys.argv[1])
sample = torch.load(sys.argv[2])
for given, wanted in sample:
    for found, right in zip(model(*given), wanted):
        error = ((found.double() - right.double()).norm() / right.double().norm()).item()
        assert error < 3e-3, error
print("ok", len(sample))
"""


class Joined(torch.nn.Module):
    """The joined op alone."""

    def forward(self, *given: torch.Tensor) -> Any:
        return ops.UPDATE_INJECT(*given)


def package(folder: Path) -> Iterator[dict[str, Any]]:
    """An AOTInductor package made here, with T open, run by a process that cannot import layergraph."""
    _, d = SIZES.prefill
    given = bench.arguments(JOINED, 100, d, 8, 8, BF16, F32, DEVICE)
    count = torch.export.Dim("rows", min=1, max=1 << 16)
    shapes = ({0: count}, {0: count}, *[None] * (len(given) - 2))
    program = torch.export.export(Joined().eval(), given, dynamic_shapes={"given": shapes})
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "kernels_package.pt2"))
    samples = []
    for tokens in SIZES.tokens:
        sample = bench.arguments(JOINED, tokens, d, 8, 8, BF16, F32, DEVICE)
        samples.append((sample, bench.OPS[JOINED](*sample)))
    torch.save(samples, folder / "kernels_samples.pt")
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, "-c", RUNNER, path, str(folder / "kernels_samples.pt")]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    size = Path(path).stat().st_size
    for name in ("kernels_package.pt2", "kernels_samples.pt"):
        (folder / name).unlink()
    yield {"ok": ran.returncode == 0, "bytes": size, "output": (ran.stdout + ran.stderr)[-500:]}


def placement() -> Iterator[dict[str, Any]]:
    """Programs traced on the CPU and moved here, against transformers' own model here: logits, tokens, the way back."""
    import layergraph as lg
    from layergraph.testing.zoo import tiny_model

    for name in ("llama", "gemma3_text"):
        model = tiny_model(name, "lm")
        program = lg.trace(model, progress=False).to(DEVICE)
        model = model.to(DEVICE)
        given = {"input_ids": torch.randint(5, 60, (2, 9), device=DEVICE)}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        wanted, found = model(**given, use_cache=False).logits, program(**given).logits
        error = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
        options = {**given, "max_new_tokens": 16, "do_sample": False}
        same = torch.equal(program.generate(**options), model.generate(**options))
        folder = program.save(Path(tempfile.mkdtemp()) / "saved", progress=False)
        back = lg.load(folder, progress=False).fingerprint == program.to("cpu").fingerprint
        yield {"model": name, "error": error, "tokens_equal": same, "saved_loads_on_cpu": back,
               "ok": error < 1e-5 and same and back}  # fmt: skip


def main() -> int:
    """Run the steps in order of importance, write what there is after each, and say whether everything passed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, through Triton's interpreter")
    folder = parser.parse_args().folder
    if not REHEARSE and not torch.cuda.is_available():
        print("gpu.sh: torch sees no GPU; --rehearse goes through the steps on the CPU", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    if REHEARSE:
        torch.set_num_threads(1)  # the figures mean nothing here; more threads only wait for each other
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    name = "kernels_gpu_rehearsal.json" if REHEARSE else "kernels_gpu.json"
    document: dict[str, Any] = {
        "rehearsal": REHEARSE,
        "machine": {**bench_report.machine_line(), "triton": triton.__version__, "arch": arch()},
    }
    failed = False
    # Each step with the seconds it must leave to the steps after it.
    steps: dict[str, tuple[Callable[[], Iterator[dict[str, Any]]], float]] = {
        "numbers": (numbers, 250),
        "package": (lambda: package(folder), 150),
        "placement": (placement, 120),
        "timings": (timings, 90),
        "precisions": (precisions, 60),
        "rows": (rows, 20),
    }
    for step, (function, reserve) in steps.items():
        if step == "timings":
            # Filling fresh memory with NaN costs a pass over each result.
            torch.utils.deterministic.fill_uninitialized_memory = False
            torch.use_deterministic_algorithms(False)
        begun = time.monotonic()
        lines: list[dict[str, Any]] = []
        try:
            with torch.no_grad():
                for line in function():
                    lines.append(line)
                    if left() < reserve:
                        document[f"{step}_skipped"] = "the rest: no time left"
                        break
        except Exception as error:
            document[f"{step}_failed"] = f"{type(error).__name__}: {error}"[:2000]
            failed = True
        failed |= any(line.get("ok") is False for line in lines)
        document[step] = lines
        print(f"{step}: {len(lines)} lines, {time.monotonic() - begun:.0f} s, failures so far: {failed}", flush=True)
        (folder / name).write_text(json.dumps(document, indent=1) + "\n")
    tuning.save(folder / ("kernels_tuned_rehearsal.json" if REHEARSE else "kernels_tuned.json"))
    for line in document["timings"]:
        print({key: line[key] for key in ("op", "variant", "tokens", "r", "median_us", "floor_us", "percent_of_floor")})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
