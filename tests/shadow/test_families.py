"""All fifty families against peft, one by one; the table of docs/coverage/shadow.md is written from the same check."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "coverage_shadow.py"
_SPEC = importlib.util.spec_from_file_location("coverage_shadow", _SCRIPT)
assert _SPEC is not None and _SPEC.loader is not None
coverage = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(coverage)


@pytest.mark.slow
@pytest.mark.parametrize("family", coverage.FAMILIES)
def test_family(family):
    row = coverage.check(family)
    assert coverage.passed(row), row
