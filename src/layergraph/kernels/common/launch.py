"""The host side of a launch: rows, problem, constants, and starting a kernel in eager mode or under a tracer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from layergraph.kernels.tuning import MAX_SLICES, Config, Problem, choose, precision


def as_rows(tensor: Tensor) -> Tensor:
    """``[..., d]`` as ``[T, d]`` with columns next to each other: a view where the strides allow one, else a copy."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up; works on sizes that are symbols in a trace."""
    return (a + b - 1) // b


def next_power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two from n and from least."""
    return max(least, 1 << max(0, n - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Plan:
    """A configuration worked out for one launch: the slices of d, and the constants kernels are compiled with."""

    config: Config
    slice_d: int
    slices: int
    constants: Mapping[str, Any]


def plan(problem: Problem, config: Config, r: int, u: int) -> Plan:
    """Constants for every kernel of an op (each takes those it names). r or u is 0 where the op has none."""
    least = 16 if config.block_t > 1 else 1
    rp, up = next_power_of_2(r, least), next_power_of_2(u, least)
    slice_d, slices = 0, 1
    if config.family == "split":
        # Wide models get wider slices rather than more of them.
        slice_d = max(config.slice_d, next_power_of_2(ceil_div(problem.d, MAX_SLICES), config.block_d))
        slices = ceil_div(problem.d, slice_d)
    # As many partial sums at a time as 4,096 elements hold: 32 a thread with 4 warps.
    together = max(1, 4096 // (config.block_t * max(rp, up)))
    constants = {
        "R": r,
        "RP": rp,
        "U": u,
        "UP": up,
        "BT": config.block_t,
        "BD": config.block_d,
        "NC": min(together, MAX_SLICES),
        "EVEN_D": problem.d % config.block_d == 0,
        "PRECISION": precision(problem.arch, problem.hidden_bytes),
    }
    return Plan(config, slice_d, slices, constants)


def plan_for(op: str, hidden: Tensor, weight: Tensor, r: int, u: int, arch: str) -> Plan:
    """The plan for a call, with the configuration that :func:`layergraph.kernels.tuning.choose` picks."""
    problem = problem_of(op, hidden, weight, max(r, u), arch)
    return plan(problem, choose(problem), r, u)


def problem_of(op: str, hidden: Tensor, weight: Tensor, rank: int, arch: str) -> Problem:
    """The problem a call with these tensors poses; hidden is ``[..., d]``."""
    width = hidden.shape[-1]
    tokens = 1
    for size in hidden.shape[:-1]:
        tokens = tokens * size
    return Problem(op, arch, _known(tokens), int(width), rank, weight.element_size(), hidden.element_size())


def _known(tokens: int | torch.SymInt) -> int | None:
    """T as a number, without guarding on it: every configuration is right for every T, so a hint is enough."""
    if isinstance(tokens, int):
        return tokens
    try:
        return int(tokens.node.hint)
    except Exception:  # no hint: the size depends on data; torch has no public way to ask
        return None


def start(kernel: Any, grid: tuple[Any, ...], arguments: Sequence[Any], prepared: Plan) -> None:
    """Launch one kernel with positional run-time arguments; traced as one node when a graph is being made."""
    from layergraph.kernels.common.triton import is_interpreted

    constants = {name: prepared.constants[name] for name in kernel.arg_names if name in prepared.constants}
    if is_interpreted(kernel):
        # wrap_triton of torch 2.11 refuses these; they are run by tests only, never traced.
        kernel[grid](*arguments, **constants)
        return
    wrap_triton(kernel)[grid](
        *arguments, **constants, num_warps=prepared.config.warps, num_stages=prepared.config.stages
    )


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make a real tensor's GPU current, for Triton launches on the current one; nothing for a fake tensor."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return torch.cuda.device_of(tensor)
    return contextlib.nullcontext()


def declare_kernels(op: str, kernels: Sequence[Any]) -> None:
    """Tell torch's compile cache which sources an op stands for.

    ``triton_op`` finds them only where its body names them in its own file, and ours imports them when a GPU is there.
    Without this, an entry cached under an older version of this package would be taken for the newer one's.
    """
    from torch._library import triton as registry

    getattr(registry, "triton_ops_to_kernels", {})[f"layergraph::{op}"] = list(kernels)


__all__ = [
    "Plan",
    "as_rows",
    "ceil_div",
    "declare_kernels",
    "next_power_of_2",
    "on_device",
    "plan",
    "plan_for",
    "problem_of",
    "start",
]
