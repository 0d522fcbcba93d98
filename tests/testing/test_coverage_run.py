"""``make coverage``: what is asked for is checked anew, the rest stays, and a kill costs one line at most."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from transformers import CONFIG_MAPPING

from layergraph.testing.coverage_run import RESULTS, read_results


def row(model_type: str, state: str, reason: str) -> str:
    part = {"state": state, "reason": reason}
    made = {"model_type": model_type, "cls": "", "stage": "done", "reason": reason, "taps": part, "patch_embed": part}
    return json.dumps(made) + "\n"


def test_only_rows_of_the_state_asked_for_are_made_again(tmp_path: Path) -> None:
    results = tmp_path / RESULTS
    kept = "".join(row(name, "none", "as it was") for name in CONFIG_MAPPING if name != "vit")
    results.write_text(row("vit", "untraced", "as it was") + kept + '{"model_type": "be')
    command = [sys.executable, "-m", "layergraph.testing.coverage_run", "--out", str(tmp_path), "--again", "untraced"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[1/1" in done.stdout and "vit" in done.stdout
    rows = read_results(results)
    assert rows["vit"]["taps"]["state"] == rows["vit"]["patch_embed"]["state"] == "pass"
    assert {name for name, found in rows.items() if found["reason"] == "as it was"} == set(CONFIG_MAPPING) - {"vit"}
    assert len(results.read_text().splitlines()) == len(rows)
    assert "| vit | ViTModel | pass |" in (tmp_path / "taps.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["patch_embed.md", RESULTS, "taps.md"]
