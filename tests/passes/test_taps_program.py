"""TapOutputs on programs: what may be named, what it costs, how it goes away, how it stands beside other passes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.testing import check_pass
from layergraph.trace.inputs import batch_like


def test_a_pass_owes_nothing(recorded):
    checked = check_pass(lg.TapOutputs("attentions"), recorded.program, n_sites=3)
    assert checked.removed is True


def _hooked(model: nn.Module, path: str, inputs, take=lambda args, output: output):
    """What a forward hook on a module sees: the oracle for taps by path."""
    seen = []
    handle = model.get_submodule(path).register_forward_hook(
        lambda module, args, output: seen.append(take(args, output))
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(
    ("what", "paths"),
    [
        ("blocks.1.dense", ["blocks.1.dense"]),
        ("blocks.*.dense", ["blocks.0.dense", "blocks.1.dense", "blocks.2.dense"]),
        ("**.first.linear", [f"blocks.{i}.first.linear" for i in range(3)]),
        (re.compile(r"blocks\.[02]\.dense"), ["blocks.0.dense", "blocks.2.dense"]),
        ("re:blocks\\.\\d\\.dense", [f"blocks.{i}.dense" for i in range(3)]),
        (nn.LayerNorm, ["norm"]),
        ("Dense", [f"blocks.{i}.dense" for i in range(3)]),
    ],
)
def test_paths_globs_regexes_and_classes(recorded, what, paths):
    out = recorded.tapped(what)
    for path in paths:
        assert torch.equal(out[path], _hooked(recorded.model, path, recorded.inputs))
    assert len(out) == 1 + len(paths)


def test_a_list_taps_what_each_of_its_items_does_in_its_order_and_once(recorded, tmp_path):
    what = ["norm", "blocks.[02].dense", re.compile(r"blocks\.\d\.dense"), nn.LayerNorm, "blocks.1::tanh"]
    program = recorded.program.apply(lg.TapOutputs(what))
    out = program(**recorded.inputs)
    (op,) = recorded.program.apply(lg.TapOutputs(what[-1])).ir.history[-1].sites
    names = ["norm", "blocks.0.dense", "blocks.2.dense", "blocks.1.dense"]
    assert list(out)[1:-1] == names
    assert list(out)[-1] in op
    for name in names:
        assert torch.equal(out[name], recorded.tapped(name)[name])
    some = recorded.program.apply(lg.TapOutputs(what[:2], entries=[0, -1], name="some"))(**recorded.inputs).some
    assert torch.equal(some[0], out["norm"])
    assert torch.equal(some[1], out["blocks.2.dense"])
    program.save(tmp_path / "saved")
    assert list(lg.load(tmp_path / "saved")(**recorded.inputs)) == list(out)
    assert program.remove("tap-outputs").fingerprint == recorded.program.fingerprint


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (["blocks.0.dense", "blocks.9.dense"], "'blocks.9.dense' matches nothing"),
        ([nn.LayerNorm, nn.Conv2d], "Conv2d"),
        (["norm", "attentions"], "'attentions' is a key of the model, which a list does not take"),
        (["norm", "%nothing"], "no node %nothing"),
    ],
)
def test_what_of_a_list_matches_nothing_is_named(recorded, what, named):
    with pytest.raises(lg.LayerGraphError, match=named):
        recorded.program.apply(lg.TapOutputs(what))


def test_index_of_outputs_and_inputs_counts_from_both_ends(recorded):
    weights = _hooked(recorded.model, "blocks.0.first", recorded.inputs)[1]
    for index in (1, -2):
        assert torch.equal(recorded.tapped("blocks.0.first", index=index)["blocks.0.first"], weights)
    given = _hooked(recorded.model, "blocks.2", recorded.inputs, take=lambda args, output: args[0])
    assert torch.equal(recorded.tapped("blocks.2", at="input")["blocks.2.input"], given)
    with pytest.raises(IndexError, match="-3 to 2"):
        recorded.program.apply(lg.TapOutputs("blocks.0.first", index=3))


def test_entries_of_a_glob_and_a_name_for_them_all(recorded):
    out = recorded.tapped("blocks.*.dense", entries=[0, -1], name="dense")
    assert len(out.dense) == 2
    assert torch.equal(out.dense[1], _hooked(recorded.model, "blocks.2.dense", recorded.inputs))


def test_ops_by_scope_and_occurrence(recorded):
    out = recorded.tapped("blocks.1::softmax#1")
    (value,) = [value for name, value in out.items() if name.startswith("%")]
    assert torch.equal(value, _hooked(recorded.model, "blocks.1.second", recorded.inputs)[1])
    with pytest.raises(LookupError, match="occurrence from 0 to 1"):
        recorded.program.apply(lg.TapOutputs("blocks.1::softmax#2"))


def test_a_predicate_on_nodes_is_saved_as_the_nodes_it_chose(recorded, tmp_path):
    tap = lg.TapOutputs(lambda node: node.target is torch.ops.aten.tanh.default)
    program = recorded.program.apply(tap)
    assert len(program(**recorded.inputs)) == 4
    loaded = lg.load(program.save(tmp_path / "saved", progress=False), progress=False)
    assert all(name.startswith("%") for name in loaded.ir.history[0].options["what"])
    assert loaded.remove("tap-outputs").fingerprint == recorded.program.fingerprint


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("last", lambda x: x[:, -1]),
        ("mean", lambda x: x.mean(1)),
        ("norm", lambda x: x.norm(dim=-1)),
        (("topk", 3), lambda x: x.topk(3).values),
    ],
)
def test_reductions_and_casts_are_computed_in_the_graph(recorded, reduce, expected):
    full = _hooked(recorded.model, "blocks.1", recorded.inputs)
    out = recorded.tapped("blocks.1", reduce=reduce, dtype=torch.bfloat16)
    found = out["blocks.1.values"] if isinstance(reduce, tuple) else out["blocks.1"]
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected(full).bfloat16(), rtol=0, atol=0)
    if isinstance(reduce, tuple):
        assert torch.equal(out["blocks.1.indices"], full.topk(3).indices)


def test_row_11_add_move_remove_leads_back_node_for_node(case, tmp_path):
    one = case("llama", "lm")
    first = one.program.apply(lg.TapOutputs(entries=[0]))
    moved = first.remove("tap-outputs").apply(lg.TapOutputs(entries=[1]))
    assert moved(**one.inputs).hidden_states[0] is None
    assert moved.remove("tap-outputs").fingerprint == one.program.fingerprint
    two = first.apply(lg.TapOutputs("model.layers.0.mlp"))
    without_first = two.remove(lg.TapOutputs(entries=[0]))
    assert without_first.fingerprint == one.program.apply(lg.TapOutputs("model.layers.0.mlp")).fingerprint
    loaded = lg.load(two.save(tmp_path / "saved", progress=False), progress=False)
    assert loaded.remove("tap-outputs").remove("tap-outputs").fingerprint == one.program.fingerprint


def test_row_12_nothing_asked_for_costs_nothing(case):
    one = case("llama", "lm")
    nodes = len(one.program.ir.forward.nodes)
    assert len(one.program.apply(lg.TapOutputs("hidden_states")).ir.forward.nodes) == nodes
    assert list(one.program.ir.forward.interface.outputs) == ["logits"]


class Routed(nn.Module):
    """Returns the scores that nothing uses beside the choice that everything does."""

    def __init__(self) -> None:
        super().__init__()
        self.route = Route()
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, hidden = self.route(x)
        return self.last(hidden)


class Route(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.score(x).log_softmax(-1).to(torch.float64), x * 2


def test_row_12_values_nothing_uses_are_not_in_the_graph_and_yet_can_be_tapped(tmp_path):
    model, x = Routed(), torch.randn(3, 4)
    program = lg.trace(model, (x,), progress=False)
    assert not any("softmax" in name for name in program.ir.forward.nodes)
    loaded = lg.load(program.save(tmp_path / "saved", progress=False), progress=False)
    for one in (program, loaded):
        tapped = one.apply(lg.TapOutputs("route", index=0), verify=True)
        expected = model.route(x)[0].detach()
        assert torch.equal(tapped(x)["route"], expected)
        twice = tapped.apply(lg.TapOutputs("route.score"))
        # The second tap finds the node that the first put back
        assert len(twice.ir.forward.nodes) == len(tapped.ir.forward.nodes)
        assert torch.equal(twice(x)["route.score"], model.route.score(x).detach())
        assert tapped.remove("tap-outputs").fingerprint == program.fingerprint
        assert twice.remove("tap-outputs").remove("tap-outputs").fingerprint == program.fingerprint


def test_row_13_only_drops_every_node_and_weight_behind_the_last_tap(case, tmp_path):
    one = case("llama", "lm")
    program = one.program.apply(lg.TapOutputs("hidden_states", entries=[1], only=True))
    out = program(**one.inputs)
    assert torch.equal(out.hidden_states[1], one.eager(output_hidden_states=True).hidden_states[1])
    names = set(program.state_dict())
    assert not any(name.startswith(("model.layers.1.", "lm_head", "model.norm")) for name in names)
    assert any(name.startswith("model.layers.0.") for name in names)
    assert program.ir.n_parameters < one.program.ir.n_parameters
    folder = program.save(tmp_path / "saved", progress=False)
    loaded = lg.load(folder, progress=False)
    assert set(loaded.state_dict()) == names
    on_disk = sum(file.stat().st_size for file in folder.glob("weights-*"))
    assert on_disk < 1.05 * program.ir.parameter_bytes + 8192
    with pytest.raises(ValueError, match="start again from the model"):
        program.remove("tap-outputs")


@pytest.mark.parametrize("order", ["tap first", "fuse first"])
def test_row_14_taps_and_a_rewritten_patch_embedding_in_either_order(case, order):
    one = case("vit", "base")
    path = "embeddings.patch_embeddings"
    passes = [lg.TapOutputs("hidden_states"), lg.TapOutputs(path), lg.FusePatchEmbed(conv2d=True)]
    program = lg.optimize(one.program, passes if order == "tap first" else passes[::-1], verify=True)
    out, expected = program(**one.inputs), one.eager(output_hidden_states=True)
    torch.testing.assert_close(out.hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[path], _hooked(one.model, path, one.inputs), rtol=1e-5, atol=1e-5)


def test_row_15_sizes_stay_dynamic(case, same):
    one = case("llama", "lm")
    program = one.program.apply(lg.TapOutputs("hidden_states")).apply(lg.TapOutputs("model.layers.*", reduce="last"))
    for batch, sequence in ((3, 11), (1, 1)):
        inputs = batch_like(one.model, one.inputs, {"batch": batch, "sequence": sequence})
        out, expected = program(**inputs), one.eager(inputs, output_hidden_states=True)
        assert all(torch.equal(a, b) for a, b in zip(out.hidden_states, expected.hidden_states, strict=True))
        assert out["model.layers.0"].shape == (batch, 64)


def test_row_18_a_fake_tensor_left_behind_by_another_export_is_harmless(case):
    from torch._subclasses.fake_tensor import FakeTensorMode

    one = case("llama", "lm")
    with FakeTensorMode():
        one.model.model.layers[0].stray = torch.empty(2)
    try:
        program = lg.trace(one.model, one.inputs, cached=False, progress=False).apply(lg.TapOutputs("hidden_states"))
        assert hasattr(one.model.model.layers[0], "stray")  # the source is as it was
    finally:
        del one.model.model.layers[0].stray
    expected = one.eager(output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(program(**one.inputs).hidden_states, expected, strict=True))


class Swallows(nn.Module):
    """Takes flags and passes none on, as many a wrapper does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, **flags: bool) -> torch.Tensor:
        return self.inner(input_ids).last_hidden_state


def test_row_18_a_model_that_swallows_output_flags_is_tapped_all_the_same(recorded):
    program = lg.trace(Swallows(recorded.model), recorded.inputs, progress=False)
    found = program.apply(lg.TapOutputs("inner.blocks.*", name="hidden_states"))(**recorded.inputs).hidden_states
    expected = recorded.eager(output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(found[:-1], expected[1:-1], strict=True))


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("re:(", {}),
        (re.compile(b"x"), {}),
        (("%add", 5), {}),
        ((), {}),
        (["norm", len], {}),
        ("blocks", {"index": "a"}),
        ("blocks", {"index": True}),
        ("blocks", {"only": "yes"}),
        ("blocks", {"name": ""}),
        ("blocks", {"name": 5}),
        ("blocks", {"reduce": ("topk", 0)}),
        ("blocks", {"reduce": ("topk", True)}),
    ],
)
def test_options_that_mean_nothing_are_named(what, options):
    with pytest.raises(lg.LayerGraphError):
        lg.TapOutputs(what, **options)


def test_a_name_that_is_taken_and_a_pass_that_is_none_are_named(recorded):
    program = lg.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    with pytest.raises(ValueError, match="returns 'output' already"):
        program.apply(lg.TapOutputs("0", name="output"))
    with pytest.raises(TypeError, match="neither a pass nor a name"):
        program.remove(5)
    with pytest.raises(ValueError, match="does not take these options"):
        lg.optimize(program, fusion_config={"patch_embeddings": {"x": 1}})
