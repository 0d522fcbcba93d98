"""Numerical checks: a program before and after a pass, on the same inputs, against what the pass promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from layergraph.errors import PromiseError
from layergraph.ir.execute import run_graph
from layergraph.ir.program import GraphUnit, Program

# Largest relative error (of the tensor's largest magnitude) that reordering sums of that precision explains.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest magnitude; 0 for equal tensors, inf for other shapes, dtypes or NaNs."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if torch.equal(found, expected) or found.numel() == 0:
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found.to(wide), expected.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs())
    scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0
    error = difference.max().item() / (scale or 1.0)
    return float("inf") if error != error else error


def tolerance_of(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, 0.0)


def run_examples(unit: GraphUnit, of: GraphUnit | None = None) -> dict[str, torch.Tensor] | None:
    """Outputs on the example inputs, or on those ``of`` another graph; None where weights or examples have no data."""
    examples: dict[str, torch.Tensor] = ((of or unit).exported.example_inputs or ((), {}))[1]
    tensors = [*examples.values(), *unit.exported.state_dict.values()]
    if not examples or any(tensor.device.type == "meta" for tensor in tensors):
        return None
    inputs = {name: tensor.clone() for name, tensor in examples.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return run_graph(unit, inputs)


def check_promise(
    before: Program,
    after: Program,
    promise: str,
    reference: Callable[[dict[str, Any]], dict[str, Any]],
) -> Mapping[str, float]:
    """The largest relative error of each output that both programs have.

    ``reference`` turns the outputs before into what a *defined* pass says comes after.

    Raises:
        PromiseError: an output is gone, or differs by more than its dtype explains.
    """
    errors: dict[str, float] = {}
    for name in after:
        old, new = run_examples(before[name]), run_examples(after[name])
        if old is None or new is None:
            continue
        expected = reference(old) if promise == "defined" else old
        for output, value in expected.items():
            if output not in new:
                raise _broken(promise, output, "to be returned", "gone")
            errors[output] = max(errors.get(output, 0.0), relative_error(new[output], value))
            allowed = tolerance_of(value.dtype)
            if errors[output] > allowed:
                raise _broken(promise, output, f"relative error of at most {allowed:g}", f"{errors[output]:.3g}")
        if promise == "exact" and len(new) != len(expected):
            extra = ", ".join(output for output in new if output not in expected)
            raise _broken(promise, extra, "the same outputs", "new ones")
    return errors


def _broken(promise: str, output: str, expected: str, found: str) -> PromiseError:
    if promise == "defined":
        what = f"output {output!r} is not what the pass's reference() makes of the outputs before"
        do = "leave the pass out and report it; in a pass of your own, let reference() say what becomes of this output"
    else:
        what = f"the pass promises to be {promise}, and output {output!r} says otherwise"
        do = "this is a fault of the pass; leave it out, and report it"
    return PromiseError(what, expected=expected, found=found, do=do)


__all__ = ["TOLERANCES", "check_promise", "relative_error", "run_examples", "tolerance_of"]
