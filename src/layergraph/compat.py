"""The one file that knows what differs between versions of torch, transformers, triton and peft.

Libraries are imported when asked for, so that naming this module costs nothing.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

# First version that is supported, and the first that is not. Tested at the pinned versions on every change, at the
# ends by `make test-versions`.
SUPPORTED = {
    "torch": ((2, 11), (2, 15)),
    "transformers": ((5, 17), (5, 25)),
    "triton": ((3, 6), (3, 10)),
    "peft": ((0, 21), (0, 22)),
}


def cache_argument(parameters: Collection[str]) -> str:
    """What a forward calls its cache: ``cache`` in current transformers, ``past_key_values`` in older ones.

    Current ones take the old name until 5.40, with a warning for each call.
    """
    return "cache" if "cache" in parameters else "past_key_values"


@functools.cache
def generation_cache_argument() -> str:
    """The same for ``generate`` and for the field of output classes."""
    from transformers import GenerationMixin

    return cache_argument(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)


@functools.cache
def warn_if_untested() -> None:
    """Say once in a process when a library is of a version nobody tested this one with."""
    for name, (first, beyond) in SUPPORTED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        parts = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if not first <= parts < beyond:
            expected = f"{'.'.join(map(str, first))} up to, not including, {'.'.join(map(str, beyond))}"
            warnings.warn(
                f"layergraph was tested with {name} {expected}; this is {found}. Results may differ.", stacklevel=3
            )


__all__ = ["SUPPORTED", "cache_argument", "generation_cache_argument", "warn_if_untested"]
