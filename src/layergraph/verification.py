"""The check the pipeline runs after each pass: structure always, numbers on request."""

from __future__ import annotations

from collections.abc import Mapping

from layergraph.ir.program import Program
from layergraph.passes.base import Pass
from layergraph.passes.pipeline import Check
from layergraph.verify import check_promise, check_sizes, check_structure


def checker(verify: bool) -> Check:
    """A check of structure, and with ``verify`` of the pass's promise on the example inputs."""

    def check(before: Program, after: Program, item: Pass) -> Mapping[str, float]:
        check_structure(after)
        check_sizes(before, after)
        return check_promise(before, after, item.promises(), item.reference) if verify else {}

    return check


__all__ = ["checker"]
