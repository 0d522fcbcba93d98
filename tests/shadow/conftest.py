"""Shared by the shadow tests: the oracle beside them, and one small model under two adapters."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)


class Twins(NamedTuple):
    """One base, two adapters of one geometry: in peft, as folders, and a program with the first woven in."""

    base: Any
    peft_model: Any
    folders: dict[str, Path]
    program: Any

    def fresh(self) -> Any:
        """A program over the same graphs whose choice of adapter is its own."""
        return type(self.program)(self.program.ir)


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    from peft import ShadowConfig
    from shadow_oracle import randomise_adapter, tiny_decoder, weave, with_adapter

    from layergraph.passes.weave_shadow import WeaveShadow

    base = tiny_decoder("llama")
    peft_model = with_adapter(copy.deepcopy(base), name="first")
    peft_model.add_adapter("second", ShadowConfig(task_type="CAUSAL_LM", shadow_alpha=0.5))
    randomise_adapter(peft_model, "second", seed=2)
    peft_model.eval()
    folder = tmp_path_factory.mktemp("adapters")
    peft_model.save_pretrained(str(folder))
    folders = {name: folder / name for name in ("first", "second")}
    return Twins(base, peft_model, folders, weave(base, WeaveShadow(folders["first"], name="first")))
