"""Compile every shipped kernel configuration for a target with no GPU present, and read what it takes.

``python tests/kernels/kernel_resources.py [--json FILE] [ARCH ...]`` prints one table per architecture.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from layergraph.kernels import tuning
from layergraph.kernels.common import launch
from layergraph.kernels.shadow_inject import triton as inject_kernels
from layergraph.kernels.shadow_update import triton as update_kernels
from layergraph.kernels.shadow_update_inject import triton as joined_kernels

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MODULES = (inject_kernels, update_kernels, joined_kernels)
KERNELS = {kernel.__name__: kernel for module in MODULES for kernel in module.WHOLE + module.SPLIT}
WHOLE = [kernel.__name__ for module in MODULES for kernel in module.WHOLE]
SPLIT = sorted({kernel.__name__ for module in MODULES for kernel in module.SPLIT})
STATES = {"hidden", "shadow", "new_shadow", "out"}
SIZES = {"T", "D", "stride_h", "stride_s", "stride_n", "stride_o", "slice_d", "slices"}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
WIDTH = 4096
# Hidden states and weights: peft's default first.
DTYPES = (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"))


@dataclasses.dataclass(frozen=True)
class Job:
    """One kernel in one configuration for one target."""

    arch: str
    kernel: str
    config: tuning.Config
    rank: int
    hidden: str
    weight: str


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes. ``spills``: spilled registers (AMD), or accesses to local memory (NVIDIA)."""

    registers: int
    spills: int
    shared: int
    instructions: tuple[str, ...]


def shipped_jobs(arch: str, dtypes: Iterable[tuple[str, str]] = DTYPES) -> list[Job]:
    """Every row of the table with every kernel it launches, at the widest bottleneck it serves."""
    jobs: dict[Job, None] = {}
    for row, config in tuning.shipped(arch):
        if config.family == "split":  # the width of a slice is a run-time argument
            config = dataclasses.replace(config, slice_d=config.block_d)
        for kernel in SPLIT if config.family == "split" else WHOLE:
            for hidden, weight in dtypes:
                if row.weight_bytes in (None, BYTES[weight]):
                    jobs[Job(arch, kernel, config, row.max_rank, hidden, weight)] = None
    return list(jobs)


def compile_job(job: Job, width: int = WIDTH) -> Resources:
    """Compile and measure one job for hidden states of a width."""
    kernel = KERNELS[job.kernel]
    problem = tuning.Problem("", job.arch, None, width, job.rank, BYTES[job.weight], BYTES[job.hidden])
    constants = launch.plan(problem, job.config, job.rank, job.rank).constants
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature, aligned = {}, []
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = f"*{job.hidden}" if name in STATES else f"*{job.weight}"
        if name in SIZES:
            kind = "i32"
        elif name.startswith("part") or name == "alpha":
            kind = "*fp32"
        signature[name] = kind
        # As the launcher finds them: pointers and rows on 16 bytes where d allows, counts any number.
        if name not in ("T", "slices") and (kind.startswith("*") or width % 16 == 0):
            aligned.append(index)
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": job.config.warps, "num_stages": job.config.stages}
    compiled = triton.compile(source, target=TARGETS[job.arch], options=options)
    return read_nvidia(compiled) if "cubin" in compiled.asm else read_amd(compiled)


def read_nvidia(compiled: object) -> Resources:
    """Registers and local memory from the disassembler that Triton brings; no driver needed."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _run(tools / "nvdisasm", "-c", file.name)
    return Resources(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=compiled.metadata.shared,
        instructions=tuple(sorted(set(re.findall(r"\b(HGMMA|HMMA|UTC\w*MMA|DMMA)\b", code)))),
    )


def read_amd(compiled: object) -> Resources:
    """The same from the metadata at the end of AMD assembly."""
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])

    return Resources(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count") + number("sgpr_spill_count") + number("private_segment_fixed_size"),
        shared=compiled.metadata.shared,
        instructions=tuple(sorted(set(re.findall(r"\bv_(mfma_[a-z0-9]+_[a-z0-9]+)", text)))),
    )


def faults(job: Job, found: Resources) -> list[str]:
    """Why this configuration may not ship; empty if it may."""
    limit = tuning.SHARED_MEMORY_LIMITS[job.arch]
    wrong = []
    if found.spills:
        wrong.append(f"{found.spills} spills")
    if found.shared > limit:
        wrong.append(f"shared memory {found.shared} above {limit}")
    if job.config.block_t > 1 and not found.instructions:
        wrong.append("no matrix instruction")
    return wrong


def measure(jobs: Iterable[Job], processes: int = 2) -> list[tuple[Job, Resources]]:
    """Compile jobs in worker processes."""
    jobs = list(jobs)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return list(zip(jobs, pool.imap(compile_job, jobs, chunksize=4), strict=True))


def table(results: Iterable[tuple[Job, Resources]]) -> str:
    """One line a kernel and configuration."""
    lines = [
        f"{'kernel':<21}{'family':<7}{'BT':>4}{'BD':>5}{'warps':>6}{'stages':>7}{'r':>5}  {'states':<7}{'weights':<8}"
        f"{'regs':>5}{'spills':>7}{'shared':>8}  instructions"
    ]
    for job, found in results:
        c = job.config
        wrong = faults(job, found)
        lines.append(
            f"{job.kernel:<21}{c.family:<7}{c.block_t:>4}{c.block_d:>5}{c.warps:>6}{c.stages:>7}{job.rank:>5}"
            f"  {job.hidden:<7}{job.weight:<8}{found.registers:>5}{found.spills:>7}{found.shared:>8}"
            f"  {' '.join(found.instructions) or '-'}{'   BAD: ' + ', '.join(wrong) if wrong else ''}"
        )
    return "\n".join(lines)


@functools.cache
def _tool(path: Path) -> str:
    return str(path) if path.exists() else path.name


def _run(*command: str | Path) -> str:
    return subprocess.run([_tool(Path(command[0])), *command[1:]], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print the tables, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("arch", nargs="*", default=list(TARGETS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    everything = collections.defaultdict(list)
    for arch in options.arch:
        results = measure(shipped_jobs(arch))
        print(f"\n{arch}, triton {triton.__version__}, d {WIDTH}, limit {tuning.SHARED_MEMORY_LIMITS[arch]}")
        print(table(results), flush=True)
        everything[arch] = [{**dataclasses.asdict(job), **dataclasses.asdict(found)} for job, found in results]
    if options.json:
        options.json.write_text(json.dumps({"triton": triton.__version__, "tables": everything}, indent=1) + "\n")


if __name__ == "__main__":
    main()
