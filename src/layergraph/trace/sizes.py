"""Which sizes of a program's inputs may vary, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from layergraph.errors import InputError, InputTypeError
from layergraph.trace.flatten import FlatInputs


def size_labels(
    model: nn.Module,
    flat: FlatInputs,
    prepared: Mapping[str, Any],
    dynamic: bool | Mapping[str, Mapping[int, str]],
    hf: Any,
) -> Mapping[str, Mapping[int, str]]:
    """For each input which sizes may vary, and what they are called.

    An input that is not named may vary wherever torch finds that the model's arithmetic allows it (``dynamic=True``),
    or nowhere.
    """
    if not isinstance(dynamic, (bool, Mapping)):
        raise InputTypeError(
            "dynamic is neither True, False nor a mapping", found=repr(dynamic)[:100], do="write {'x': {0: 'batch'}}"
        )
    if isinstance(dynamic, Mapping):
        unknown = [name for name in dynamic if name not in flat.tensors]
        if unknown:
            raise InputError(
                f"dynamic names {', '.join(map(repr, unknown))}, which is no tensor input",
                expected=", ".join(flat.tensors),
                do="name the inputs as given in example_inputs",
            )
        for name, dims in dynamic.items():
            rank = flat.tensors[name].dim()
            is_right = isinstance(dims, Mapping) and all(
                isinstance(dim, int) and 0 <= dim < rank and isinstance(label, str) and label.isidentifier()
                for dim, label in dims.items()
            )
            if not is_right:
                raise InputError(
                    f"dynamic does not say which sizes of {name!r} may vary",
                    expected=f"a mapping from dimensions, 0 to {rank - 1}, to names of sizes: {{0: 'batch'}}",
                    found=repr(dims)[:100],
                    do="write it that way",
                )
        _check_equal(flat, dynamic)
        return dynamic
    return hf.dynamic_dims(model, dict(prepared)) if dynamic and hf is not None else {}


def _check_equal(flat: FlatInputs, labels: Mapping[str, Mapping[int, str]]) -> None:
    """Sizes of one name are one size: refuse examples that say otherwise."""
    first: dict[str, tuple[int, str, int]] = {}
    for name, dims in labels.items():
        for dim, label in dims.items():
            size = flat.tensors[name].shape[dim]
            known, other, where = first.setdefault(label, (size, name, dim))
            if size != known:
                raise InputError(
                    f"dynamic calls two sizes {label!r} that differ in the example inputs",
                    expected=f"{known}, as in dimension {where} of {other!r}",
                    found=f"{size} in dimension {dim} of {name!r}",
                    do="give them different names, or example inputs where they are equal",
                )


__all__ = ["size_labels"]
