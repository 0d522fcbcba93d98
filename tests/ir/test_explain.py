"""What passes did to weights: named by ``explain``, and what is kept to undo them by ``report``."""

from __future__ import annotations

from typing import Any

import pytest

import layergraph as lg
from layergraph.testing.zoo import tiny_model

WEIGHT = "patch_embed.proj.weight"


@pytest.fixture(scope="module")
def tower() -> lg.Program:
    return lg.optimize(tiny_model("qwen2_vl", "vlm").model.visual, ["fuse-patch-embed"])


def test_a_changed_weight_names_the_pass_and_both_shapes(tower: lg.Program) -> None:
    change = f"{WEIGHT} [64, 3, 2, 8, 8] -> [64, 384] (reshape)"
    for path in ("patch_embed.proj", "patch_embed"):
        text = tower.explain(path)
        assert "changed   fuse-patch-embed\n" in text
        assert f"weight    {change}, by fuse-patch-embed\n" in text
    for name in (WEIGHT, "p_patch_embed_proj_weight", "%p_patch_embed_proj_weight"):
        assert f"changed   by fuse-patch-embed: {change}" in tower.explain(name)
    assert "changed   by no pass" in tower.explain("blocks.0.attn.qkv")
    with pytest.raises(LookupError, match=f"nearest: .*{WEIGHT}"):
        tower.explain("patch_embed.proj.weigth")


def test_a_loaded_program_says_the_same(tower: lg.Program, tmp_path: Any) -> None:
    assert lg.load(tower.save(tmp_path / "tower")).explain(WEIGHT) == tower.explain(WEIGHT)


def test_sizes_tell_what_is_kept_to_undo(tmp_path: Any) -> None:
    program = lg.trace(tiny_model("llama", tie_word_embeddings=True), cached=False)
    cut = lg.TapOutputs("hidden_states", layers=[0], only=True)
    bare, kept = program.apply(cut).report(), program.apply(cut, verify=True).report()
    assert (bare.parameters, bare.bytes) == (kept.parameters, kept.bytes)
    gone = program.report().parameters - bare.parameters
    assert bare.kept == (0, 0) and kept.kept == (gone, 4 * gone)
    assert kept.as_dict()["kept"] == {"parameters": gone, "bytes": 4 * gone}
    assert "to undo passes" in str(kept) and "to undo passes" not in str(bare)
    saved = program.apply(cut, verify=True).save(tmp_path / "cut")
    assert lg.load(saved).report().kept == (0, 0)
    # an additive pass drops nothing
    assert program.apply(lg.TapOutputs("hidden_states"), verify=True).report().kept == (0, 0)
