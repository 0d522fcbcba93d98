"""FusePatchEmbed, row by row of its specification; the oracle is the eager model (fp32 within 1e-5)."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.testing import check_pass
from layergraph.testing.zoo import tiny_model
from layergraph.trace.flatten import flatten_output
from layergraph.trace.inputs import make_example_inputs

CONV3D = (
    *("cohere_compass", "exaone4_5", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "minimax_m3_vl", "qwen2_vl"),
    *("qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5", "qwen3_5_moe"),
    *("qwen4_exp", "videomae", "videoprism", "vivit", "vjepa2"),
)
_EVERY_TIME = ("qwen2_vl", "qwen3_vl", "videomae")


class Embed(nn.Module):
    """A convolution as patch embeddings use it: channels last afterwards."""

    def __init__(self, conv: nn.Module, flatten: bool = True) -> None:
        super().__init__()
        self.proj, self.flatten = conv, flatten

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x)
        return y.flatten(2).transpose(1, 2) if self.flatten else y


def _fused(model: nn.Module, x: torch.Tensor, **options) -> lg.Program:
    options = {"conv2d": True, **options}
    return lg.optimize(model, [lg.FusePatchEmbed(**options)], example_inputs=(x,), verify=True, progress=False)


def _record(program: lg.Program):
    return program.ir.history[-1]


def _targets(program: lg.Program) -> set[str]:
    return {str(node.target) for node in program.ir.forward.graph.nodes if node.op == "call_function"}


def _assert_same(program: lg.Program, model: nn.Module, *inputs: torch.Tensor) -> None:
    for x in inputs:
        with torch.no_grad():
            torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv1d(3, 5, 4, stride=4), (2, 3, 12)),
        (nn.Conv2d(3, 5, (4, 2), stride=(4, 2), bias=False), (2, 3, 8, 6)),
        (nn.Conv2d(3, 5, 4, stride=4, padding="valid"), (2, 3, 8, 12)),
        (nn.Conv3d(3, 5, (2, 4, 4), stride=(2, 4, 4)), (2, 3, 4, 8, 8)),
        (nn.Conv3d(3, 5, 1, padding="same"), (2, 3, 4, 3, 2)),  # a kernel of 1 everywhere counts
    ],
)
@pytest.mark.parametrize("flatten", [True, False])
def test_row_01_matches_by_structure_alone(conv, shape, flatten):
    model, x = Embed(conv, flatten), torch.randn(shape)
    program = _fused(model, x)
    assert len(_record(program).sites) == 1
    assert not any("conv" in target for target in _targets(program))
    _assert_same(program, model, x, torch.randn(3, *shape[1:]))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.anything = nn.Parameter(torch.randn(6, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x, self.anything, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)


def test_row_01_the_general_convolution_op_and_any_name():
    model, x = Functional(), torch.randn(2, 3, 4, 6)
    program = _fused(model, x)
    assert len(_record(program).sites) == 1
    _assert_same(program, model, x)


@pytest.mark.parametrize("bias", [True, False])
def test_row_02_groups_become_a_batched_product(bias):
    model, x = Embed(nn.Conv2d(6, 9, 2, stride=2, groups=3, bias=bias)), torch.randn(2, 6, 4, 8)
    program = _fused(model, x)
    assert "in 3 groups" in _record(program).sites[0]
    _assert_same(program, model, x, torch.randn(4, 6, 4, 8))


def test_row_03_flattened_input_leaves_one_linear_and_no_permute(case):
    one = case("qwen2_vl", "vision")
    program = one.program.apply(lg.FusePatchEmbed(), verify=True, strict=True)
    before, after = one.program.ir.forward, program.ir.forward
    span = [
        n for n in after.graph.nodes if any("patch_embed" in p for p, _ in n.meta.get("nn_module_stack", {}).values())
    ]
    assert [str(node.target) for node in span if "to." not in str(node.target)] == ["aten.linear.default"]
    assert len(after.nodes) < len(before.nodes)
    ranks = [value.dim() for n in after.graph.nodes if isinstance(value := n.meta.get("val"), torch.Tensor)]
    assert max(ranks) < 5


@pytest.mark.parametrize(("model_type", "kind"), [("videomae", "base"), ("vit", "base"), ("clip", "vision")])
def test_row_04_activations_are_cut_once_and_the_flatten_folds_away(case, model_type, kind):
    one = case(model_type, kind)
    program = one.program.apply(lg.FusePatchEmbed(conv2d=True), verify=True)
    made = [n for n in program.ir.forward.provenance if program.ir.forward.provenance[n].made_by == "fuse-patch-embed"]
    ops = [str(program.ir.forward.nodes[name].target) for name in made]
    assert ops.count("aten.linear.default") == 1
    assert ops.count("aten.permute.default") == 1
    assert not any("contiguous" in op or "transpose" in op for op in ops)
    torch.testing.assert_close(program(**one.inputs)[0], one.eager()[0], rtol=1e-5, atol=1e-5)


def test_row_04_three_dimensions(recorded):
    model, x = Embed(nn.Conv1d(4, 6, 5, stride=5)), torch.randn(2, 4, 20)
    _assert_same(_fused(model, x), model, x)


def test_row_05_what_the_kernel_does_not_divide_is_dropped_at_fixed_and_at_varying_sizes():
    model = Embed(nn.Conv2d(3, 5, 4, stride=4))
    x = torch.randn(2, 3, 11, 9)
    fixed = lg.trace(model, (x,), dynamic=False, progress=False).apply(lg.FusePatchEmbed(conv2d=True), verify=True)
    _assert_same(fixed, model, x)
    names = {"x": {0: "batch", 2: "height", 3: "width"}}
    varying = lg.trace(model, {"x": x}, dynamic=names, progress=False).apply(
        lg.FusePatchEmbed(conv2d=True), verify=True
    )
    for shape in ((2, 3, 11, 9), (1, 3, 8, 8), (3, 3, 15, 30)):
        _assert_same(varying, model, torch.randn(shape))


@pytest.mark.parametrize(
    "model_type", [pytest.param(t, marks=() if t in _EVERY_TIME else pytest.mark.slow) for t in CONV3D]
)
def test_row_06_families_of_conv3d_patch_embeddings(model_type):
    model = tiny_model(model_type)
    inputs = make_example_inputs(model)
    program = lg.optimize(model, ["fuse-patch-embed"], example_inputs=inputs, verify=True, progress=False)
    assert _record(program).sites
    assert not any("conv3d" in target for target in _targets(program))
    with torch.no_grad():
        expected = flatten_output(model(**inputs))[1]
    found = flatten_output(program(**inputs))[1]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_row_06_emu3_is_left_alone_with_the_reason():
    model = tiny_model("emu3")
    inputs = {"pixel_values": torch.randn(2, 8, 3, 32, 32)}
    traced = lg.trace(model, inputs, dynamic=False, progress=False)
    program = traced.apply(lg.FusePatchEmbed())
    refusals = _record(program).refusals
    threed = [item for item in refusals if "stride" in item[2] and "kernel" in item[2]]
    assert threed
    assert all(item[1] == "R1" for item in threed)
    assert not any("conv3d" in site and "kernel" in site for site in _record(program).sites)


@pytest.mark.parametrize(
    ("conv2d", "dtype", "fires", "reason"),
    [
        ("auto", torch.float32, False, "R6: expected input cut into patches already, or a 16-bit weight"),
        ("auto", torch.bfloat16, True, "bfloat16 is faster as Linear"),
        (False, torch.bfloat16, False, "R6: expected conv2d=True, found conv2d=False"),
        (True, torch.float32, True, ""),
        ({"kind": "layergraph conv2d table", "rows": [["float32", 48, 5, 1.4]]}, torch.float32, True, "1.40 times"),
        ([("float32", 48, 5, 0.8), ("float32", 9999, 5, 2.0)], torch.float32, False, "measured 0.80 times"),
        ([("bfloat16", 48, 5, 1.4)], torch.float32, False, "a dtype that the table has"),
    ],
)
def test_row_07_conv2d_is_decided_by_a_stated_rule_or_a_saved_table(conv2d, dtype, fires, reason):
    model, x = Embed(nn.Conv2d(3, 5, 4, stride=4)).to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    program = lg.trace(model, (x,), progress=False).apply(lg.FusePatchEmbed(conv2d=conv2d))
    record = _record(program)
    assert bool(record.sites) == fires
    assert reason in str(program.report().as_dict()) or reason in " ".join(
        [*record.sites, *(f"{code}: {text}" for _, code, text in record.refusals)]
    )


def test_row_07_a_table_from_a_file_is_measured_read_once_and_remembered(tmp_path):
    from layergraph.passes.conv_table import measure

    table = measure(shapes=((3, 16, 4, 8),), dtypes=(torch.float32,), batch=1, repeats=1)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    tap = lg.FusePatchEmbed(conv2d=str(path))
    path.unlink()
    assert tap.conv2d == (("float32", 48, 8, table["rows"][0][3]),)
    assert lg.FusePatchEmbed.from_options(json.loads(json.dumps(tap.options()))) == tap
    with pytest.raises(FileNotFoundError, match=r"no conv2d table table\.json"):
        lg.FusePatchEmbed(conv2d=str(path))
    path.write_text('{"kind": "something else"}')
    with pytest.raises(ValueError, match="this is no conv2d table"):
        lg.FusePatchEmbed(conv2d=str(path))
    with pytest.raises(ValueError, match="is not an option"):
        lg.FusePatchEmbed(conv2d="sometimes")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = Embed(nn.Conv2d(3, 5, 2, stride=2)), Embed(nn.Conv2d(3, 5, 4, stride=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fine(x).sum(1) + self.coarse(x).sum(1)


def test_row_08_instances_of_one_class_are_judged_one_by_one():
    model, x = Two(), torch.randn(2, 3, 8, 8)
    program = _fused(model, x)
    assert [site.partition(":")[0] for site in _record(program).sites] == ["fine.proj"]
    assert _record(program).refusals[0][:2] == ("coarse.proj", "R1")
    _assert_same(program, model, x)


def test_row_09_source_model_and_later_models_are_untouched(case):
    one = case("vit", "base")
    before = {name: tensor.clone() for name, tensor in one.model.state_dict().items()}
    expected = one.eager().last_hidden_state
    one.program.apply(lg.FusePatchEmbed(conv2d=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in one.model.state_dict().items())
    assert isinstance(tiny_model("vit").embeddings.patch_embeddings.projection, nn.Conv2d)
    assert torch.equal(one.eager().last_hidden_state, expected)


def test_row_10_dtype_and_bias_are_kept_and_inputs_cast():
    model = tiny_model("qwen2_vl", dtype=torch.bfloat16)
    inputs = make_example_inputs(model)
    program = lg.optimize(model, ["fuse-patch-embed"], example_inputs=inputs, progress=False)
    exact = tiny_model("qwen2_vl", dtype=torch.bfloat16).double()
    full = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    path = "patch_embed"
    tapped = program.apply(lg.TapOutputs(path))
    found = tapped(**{k: v.float() if v.is_floating_point() else v for k, v in inputs.items()})[path]
    assert found.dtype is torch.bfloat16
    expected = exact.patch_embed(full["hidden_states"])
    assert (found.double() - expected).abs().max() < 1e-2 * expected.abs().max()


def test_row_11_weights_map_back_bit_for_bit_in_either_layout(case, tmp_path):
    one = case("vit", "base")
    checked = check_pass(lg.FusePatchEmbed(conv2d=True), one.program, n_sites=1)
    assert checked.removed is True
    name = "embeddings.patch_embeddings.projection.weight"
    assert checked.after.state_dict("graph")[name].shape == (64, 192)
    assert torch.equal(checked.after.state_dict()[name], one.model.state_dict()[name])


def test_row_11_the_saved_folder_is_a_checkpoint_that_transformers_loads(case, tmp_path):
    from transformers import AutoModel

    one = case("vit", "base")
    folder = one.program.apply(lg.FusePatchEmbed(conv2d=True)).save(tmp_path / "vit", progress=False)
    again = AutoModel.from_pretrained(folder)
    expected = one.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_row_11_sharded_safetensors_with_an_index(case, tmp_path):
    from layergraph.ir import folder as folders

    one = case("vit", "base")
    program = one.program.apply(lg.FusePatchEmbed(conv2d=True))
    for layout in ("original", "graph"):
        folder = folders.save(program.ir, tmp_path / layout, layout=layout, max_shard_bytes=50_000)
        assert len(list(folder.glob("weights-*"))) > 3
        loaded = lg.load(folder, progress=False)
        assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in one.model.state_dict().items())
        assert torch.equal(loaded(**one.inputs)[0], program(**one.inputs)[0])


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 5, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).flatten(2) * self.proj.weight.sum()


def test_row_12_a_weight_that_something_else_reads_keeps_its_shape_and_says_so():
    model, x = Shared(), torch.randn(2, 3, 4, 4)
    program = _fused(model, x)
    assert "its weight is used elsewhere too" in _record(program).notes[0]
    assert program.state_dict("graph")["proj.weight"].shape == (5, 3, 2, 2)
    _assert_same(program, model, x)


def test_row_14_what_the_config_asks_for(case):
    model = tiny_model("qwen2_vl")
    inputs = make_example_inputs(model)
    traced = lg.trace(model, inputs, progress=False)
    for config, n_passes in (({"patch_embeddings": True}, 1), ({"patch_embeddings": {"conv2d": False}}, 1), ({}, 0)):
        assert len(lg.optimize(traced, fusion_config=config, progress=False).ir.history) == n_passes
    assert not lg.optimize(traced, fusion_config={"patch_embeddings": False}, progress=False).ir.history
    with pytest.raises(ValueError, match="unknown fusion 'experts'"):
        lg.optimize(traced, fusion_config={"experts": True}, progress=False)
    with pytest.raises(ValueError, match="expected   True, False or a mapping"):
        lg.optimize(traced, fusion_config={"patch_embeddings": "yes"}, progress=False)
    model.config.fusion_config = {"patch_embeddings": True}
    chosen = lg.optimize(model, example_inputs=inputs, progress=False)
    assert [record.name for record in chosen.ir.history] == ["fuse-patch-embed"]


def test_row_15_nothing_to_fuse_is_said_and_changes_nothing(case):
    one = case("llama", "lm")
    program = one.program.apply(lg.FusePatchEmbed())
    assert program.fingerprint == one.program.fingerprint
    assert "fuse-patch-embed" in str(program.report())
    with pytest.raises(lg.LayerGraphError, match="found nothing to do"):
        one.program.apply(lg.FusePatchEmbed(), strict=True)


def test_training_gradients_equal_the_convolutions_and_save_back(tmp_path):
    model, x = Embed(nn.Conv3d(3, 5, (2, 4, 4), stride=(2, 4, 4))), torch.randn(2, 3, 4, 8, 8)
    program = lg.trace(model, (x,), training=True, progress=False).apply(lg.FusePatchEmbed())
    model(x).square().sum().backward()
    program(x).square().sum().backward()
    trained = program.state_dict("graph")
    for name, parameter in model.named_parameters():
        gradient = trained[name].grad.reshape(parameter.shape)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for parameter in trained.values():
            parameter -= 0.1 * parameter.grad
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    back = lg.load(program.save(tmp_path / "trained", progress=False), progress=False).state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(back[name], parameter.detach(), rtol=1e-5, atol=1e-5)


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight * 2, stride=2)


@pytest.mark.parametrize(
    ("model", "code", "text"),
    [
        (nn.Conv2d(3, 5, 4, stride=2), "R1", "expected stride == kernel (4, 4), found stride (2, 2)"),
        (nn.Conv2d(3, 5, 2, stride=2, padding=1), "R2", "expected padding 0, found padding (1, 1)"),
        (nn.Conv2d(3, 5, 2, stride=2, dilation=2), "R3", "expected dilation 1, found dilation (2, 2)"),
        (nn.ConvTranspose2d(3, 5, 2, stride=2), "R4", "expected a convolution, found a transposed one"),
        (Computed(), "R5", "expected a parameter as weight, found computed by %mul"),
        (nn.Conv2d(3, 5, 2, stride=2), "R6", "expected conv2d=True, found conv2d=False"),
        (
            nn.Conv2d(3, 5, 8, stride=8),
            "R7",
            "expected example inputs with two patches or more along each size that may vary, "
            "found size 8 for a kernel of 8",
        ),
    ],
)
def test_refusals_are_reported_and_raised_under_strict(model, code, text):
    program = lg.trace(model, (torch.randn(2, 3, 8, 8),), progress=False)
    tap = lg.FusePatchEmbed(conv2d=code != "R6")
    after = program.apply(tap)
    assert after.fingerprint == program.fingerprint
    (refusal,) = after.ir.history[-1].refusals
    assert refusal[1:] == (code, text)
    with pytest.raises(lg.LayerGraphError, match=code):
        program.apply(tap, strict=True)


def test_row_02_groups_on_patches_cut_before_and_in_three_dimensions():
    for conv, shape in (
        (nn.Conv2d(4, 6, 2, stride=2, groups=2), (5, 4, 2, 2)),
        (nn.Conv1d(4, 4, 3, stride=3, groups=4), (2, 4, 9)),
    ):
        model, x = Embed(conv), torch.randn(shape)
        traced = lg.trace(model, {"x": x}, dynamic={"x": {0: "batch"}}, progress=False)
        _assert_same(traced.apply(lg.FusePatchEmbed(conv2d=True), verify=True), model, x, torch.randn(3, *shape[1:]))
