"""Runs the code of a pass so that whatever it does wrong is an error with its name, and the program stays as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from layergraph.errors import InputTypeError, LayerGraphError, PassError
from layergraph.ir import exported as torch_side
from layergraph.ir.edit import Edit
from layergraph.ir.program import Program
from layergraph.passes.base import Findings, Pass, Site


def run_find(item: Pass, program: Program, graph: str, label: str) -> Findings:
    """What ``find`` returns, on a copy of the graph.

    Raises:
        PassError: it failed, wrote to the graph, or returned something else.
    """
    unit = program[graph]
    twin = replace(unit, exported=torch_side.with_own_graph(unit.exported))
    before = _written(twin.graph)
    with _named(label, f"find() of {type(item).__name__}"):
        findings = item.find(program.evolve(graphs={**program.graphs, graph: twin}), graph)
    if not isinstance(findings, Findings):
        raise PassError(
            f"find() of {type(item).__name__} returned no Findings",
            pass_name=label,
            expected="layergraph.Findings(sites, refusals, notes)",
            found=type(findings).__name__,
            do="return Findings(tuple(sites)); Findings() where there is nothing to do",
        )
    if not _is_same(before, _written(twin.graph)):
        raise PassError(
            f"find() of {type(item).__name__} wrote to the graph",
            pass_name=label,
            do="only look there, and write in rewrite(), through its edit",
        )
    return findings


def run_rewrite(item: Pass, site: Site, edit: Edit, label: str) -> None:
    """Rewrite one site.

    Raises:
        PassError: it failed.
    """
    with _named(label, f"rewrite() of {type(item).__name__}", site.path):
        item.rewrite(site, edit)


def resolved_options(item: Pass, findings: Findings, label: str) -> dict[str, Any]:
    """The options to keep with the program, refused before anything is done where a saved one could not hold them.

    Raises:
        PassError: the pass failed to say. InputTypeError: names the option.
    """
    with _named(label, f"resolved_options() of {type(item).__name__}"):
        options = item.resolved_options(findings)
    for name, value in options.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputTypeError(
                f"option {name!r} of {type(item).__name__} is no plain data, so no saved program could hold it",
                pass_name=label,
                expected="finite numbers, strings, None, and lists and mappings of these",
                found=repr(value)[:80],
                do="give plain data, or override options() and from_options() in the pass",
            ) from error
    return options


def _written(graph: torch.fx.Graph) -> list[tuple[Any, ...]]:
    """All that a pass could change in a graph, as it stands; what nodes hold is replaced when written, not changed."""
    return [(node, node.name, node.target, node.args, node.kwargs, node.meta.get("val")) for node in graph.nodes]


def _is_same(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> bool:
    # By identity: comparing symbolic sizes would fix them.
    return len(before) == len(after) and all(
        old is new for olds, news in zip(before, after, strict=True) for old, new in zip(olds, news, strict=True)
    )


@contextmanager
def _named(label: str, what: str, path: str | None = None) -> Iterator[None]:
    try:
        yield
    except LayerGraphError as error:
        error.pass_name = error.pass_name or label
        error.path = error.path or path
        raise
    except Exception as error:
        first = str(error).strip().splitlines()
        raise PassError(
            f"{what} failed",
            pass_name=label,
            path=path,
            found=f"{type(error).__name__}: {first[0][:200]}" if first else type(error).__name__,
            do="mend the pass; the traceback above shows where",
            shell="mend the pass; -v shows where",
        ) from error


__all__ = ["resolved_options", "run_find", "run_rewrite"]
