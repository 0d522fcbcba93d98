"""Programs of one trace share torch's sizes: threads that rewrite, read and save them take turns without being told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import layergraph as lg
from layergraph.testing.zoo import tiny_model

# Inserts nodes, so sizes are computed anew while another thread reads them.
TAP = lg.TapOutputs("layers.*.mlp", reduce="norm", dtype="float16")


@pytest.fixture(scope="module")
def program() -> lg.Program:
    return lg.trace(tiny_model("llama", "base"), cached=False, progress=False)


def in_threads(*work: Callable[[], Any], rounds: int) -> list[list[Any]]:
    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(lambda one=one: [one() for _ in range(rounds)]) for one in work]
        return [future.result() for future in futures]


def test_threads_that_apply_to_one_program_make_the_same_graph(program: lg.Program) -> None:
    wanted = program.apply(TAP).fingerprint

    def work() -> str:
        return program.apply(TAP).fingerprint

    for found in in_threads(work, work, rounds=10):
        assert set(found) == {wanted}


def test_reading_and_saving_go_on_beside_a_thread_that_rewrites(program: lg.Program, tmp_path: Path) -> None:
    ids = torch.randint(5, 60, (2, 9))
    tapped = program.apply(TAP)
    wanted = (str(program), program(ids).last_hidden_state, tapped.fingerprint)

    def read() -> None:
        assert str(program) == wanted[0]
        assert torch.equal(program(ids).last_hidden_state, wanted[1])

    def save() -> None:
        made = program.apply(TAP)
        made.save(tmp_path / "saved", progress=False)
        assert lg.load(tmp_path / "saved", progress=False).fingerprint == wanted[2]

    in_threads(read, save, lambda: tapped.remove("tap-outputs"), rounds=5)


def test_threads_trace_and_apply_at_once() -> None:
    def work() -> str:
        traced = lg.trace(tiny_model("llama", "base"), cached=False, progress=False)
        return traced.apply(TAP).fingerprint

    assert len({found for part in in_threads(work, work, rounds=2) for found in part}) == 1
