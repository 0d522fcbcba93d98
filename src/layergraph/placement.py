"""``program.to``: another device, another dtype."""

from __future__ import annotations

from typing import Any

import torch

from layergraph.adapters import preparer
from layergraph.errors import InputError, InputTypeError
from layergraph.ir.exported import one_at_a_time
from layergraph.ir.placement import device_of, on_device
from layergraph.ir.program import Program
from layergraph.passes import pipeline
from layergraph.trace.export import Progress
from layergraph.trace.source import retrace
from layergraph.verification import checker

# What models compute in: 8-bit floats and complex numbers are for weights, with scales of their own, or for transforms.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@one_at_a_time
def place(
    program: Program, *targets: Any, device: Any = None, dtype: Any = None, progress: Progress | None = None
) -> Program:
    """The program on another device, in another dtype, or both; see :meth:`layergraph.Program.to`."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InputTypeError("dtype= is no dtype", found=repr(dtype)[:80], do="write dtype=torch.bfloat16")
    if isinstance(device, torch.dtype):
        raise InputTypeError("device= is no device", found=repr(device), do='write device="cuda"')
    device, dtype = _read((*targets, *(item for item in (device, dtype) if item is not None)))
    if dtype is not None and any(tensor.dtype != dtype for tensor in _floats(program)):
        program = _in_dtype(program, dtype, progress)
    if device is not None and device != device_of(program):
        program = on_device(program, device)
    return program


def _floats(program: Program) -> list[torch.Tensor]:
    return [tensor for tensor in program.state_dict.values() if tensor.is_floating_point()]


def _in_dtype(program: Program, dtype: torch.dtype, progress: Progress | None) -> Program:
    original = program.original
    # Weights that a pass dropped are not there to be cast, and are dropped again.
    source = program if original is None else original.restore(program, missing="meta")
    fresh = on_device(retrace(source, dtype, progress=progress), device_of(program))
    return pipeline.rerun(
        fresh,
        program.history,
        keep_weights=original is not None and bool(original.kept),
        check=checker(False),
        prepare=preparer(program.shadow),
        progress=progress,
    )


def _read(targets: tuple[Any, ...]) -> tuple[torch.device | None, torch.dtype | None]:
    if not targets:
        raise InputTypeError("to() says neither a device nor a dtype", do='write program.to("cuda")')
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    for target in targets:
        if isinstance(target, torch.dtype):
            _once("dtype", dtype, target)
            if target not in _DTYPES:
                raise InputError(
                    f"a program cannot be in {target}",
                    expected=", ".join(map(str, _DTYPES)),
                    do="write one of these; a model with quantised weights is traced as it was loaded",
                )
            dtype = target
        elif isinstance(target, (str, int, torch.device)) and not isinstance(target, bool):
            _once("device", device, target)
            device = _device(target)
        else:
            raise InputTypeError(
                "neither a device nor a dtype",
                found=repr(target)[:80],
                do='write program.to("cuda"), program.to(torch.bfloat16), or both',
            )
    return device, dtype


def _once(kind: str, before: Any, target: Any) -> None:
    if before is not None:
        raise InputError(f"to() is given two of a kind: {kind}", found=f"{before} and {target}", do="give one")


def _device(target: str | int | torch.device) -> torch.device:
    """With its index, as tensors have it.

    Raises:
        InputError: no such device here.
    """
    try:
        return torch.empty(0, device=target).device
    except (RuntimeError, AssertionError) as error:
        is_dtype = isinstance(getattr(torch, str(target).removeprefix("torch."), None), torch.dtype)
        raise InputError(
            f"there is no device {str(target)!r} here",
            found=str(error).strip().splitlines()[0],
            do=f"write torch.{str(target).removeprefix('torch.')}, not its name as text"
            if is_dtype
            else "use cpu, or a torch build for that device",
        ) from error


__all__ = ["place"]
