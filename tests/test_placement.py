"""``program.to``: the program in another dtype is what transformers loads in it; on a device, all of it is there."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.errors import InputError, InputTypeError, NotSupportedError
from layergraph.ir.fingerprint import graph_text
from layergraph.ir.graph_json import dump_graph, load_graph
from layergraph.testing.zoo import tiny_model


def in_dtype(model, folder, dtype):
    """The oracle: what transformers loads from the model's checkpoint."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype).eval()


# A norm that says float32 and means it; weights stored transposed; experts; embeddings scaled by a rounded root.
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("gpt2", marks=pytest.mark.slow),
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
    ],
)
def test_a_decoder_in_another_dtype_is_what_transformers_loads(name, tmp_path):
    model = tiny_model(name, "lm")
    expected = in_dtype(model, tmp_path, torch.bfloat16)
    program = lg.optimize(model, [lg.TapOutputs("hidden_states")], progress=False)
    cast = program.to(torch.bfloat16, progress=False)
    ids = torch.randint(5, 60, (2, 9))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        theirs = expected(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    ours = cast(input_ids=ids, attention_mask=mask)
    assert ours.logits.dtype == theirs.logits.dtype
    # Experts run as other code than eager's: sums in another order, in bfloat16.
    bound = 2e-2 if name == "mixtral" else 0.0
    for one, other in zip((ours.logits, *ours.hidden_states), (theirs.logits, *theirs.hidden_states), strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(cast.generate(**given), expected.generate(**given))
    # The way back gives the graphs it came from, and the program it started from is as it was.
    assert cast.to(torch.float32, progress=False).fingerprint == program.fingerprint
    assert program(input_ids=ids, attention_mask=mask).logits.dtype == torch.float32
    assert cast.ir.n_parameters == program.ir.n_parameters
    assert cast.remove("tap-outputs").ir.original is None


def test_weights_that_transformers_never_loads_in_half_precision_stay(tmp_path):
    model = tiny_model("t5", "encoder")
    expected = in_dtype(model, tmp_path, torch.float16)
    cast = lg.trace(model, progress=False).to(torch.float16, progress=False)
    theirs = {name: tensor.dtype for name, tensor in expected.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in cast.state_dict().items()} == theirs
    assert set(theirs.values()) == {torch.float16, torch.float32}


def test_a_loaded_tower_is_cast_with_its_passes_run_again(tmp_path):
    model = tiny_model("qwen2_vl", "vision")
    expected = in_dtype(model, tmp_path / "model", torch.bfloat16)
    lg.optimize(model, [lg.FusePatchEmbed()], progress=False).save(tmp_path / "saved", progress=False)
    cast = lg.load(tmp_path / "saved", progress=False).to(torch.bfloat16, progress=False)
    assert [record.label for record in cast.report().records] == ["fuse-patch-embed"]
    directly = lg.optimize(expected, [lg.FusePatchEmbed()], progress=False)
    assert cast.fingerprint == directly.fingerprint
    assert all(torch.equal(tensor, directly.state_dict()[name]) for name, tensor in cast.state_dict().items())


def test_adapters_become_what_weaving_into_that_dtype_makes_of_them(tmp_path):
    model = tiny_model("llama", "lm")
    expected = in_dtype(model, tmp_path, torch.bfloat16)
    shadow = lg.WeaveShadow(config={"r": 4})
    cast = lg.trace(model, cached=False, progress=False).apply(shadow).to(torch.bfloat16, progress=False)
    directly = lg.trace(expected, cached=False, progress=False).apply(shadow)
    assert cast.fingerprint == directly.fingerprint
    ids = torch.randint(5, 60, (2, 6))
    # Untrained: the base's own outputs, in the new dtype.
    with torch.no_grad():
        assert torch.equal(cast(input_ids=ids).logits, expected(input_ids=ids, use_cache=False).logits)


def test_weights_that_a_pass_dropped_are_not_needed():
    model = tiny_model("llama", "base")
    program = lg.trace(model, cached=False, progress=False)
    cut = program.apply(lg.TapOutputs("hidden_states", entries=[1], only=True))
    cast = cut.to(torch.bfloat16, progress=False)
    ids = torch.randint(5, 60, (2, 6))
    whole = program.apply(lg.TapOutputs("hidden_states", entries=[1]))
    expected = whole.to(torch.bfloat16, progress=False)(input_ids=ids).hidden_states[1]
    assert torch.equal(cast(input_ids=ids).hidden_states[1], expected)
    assert len(cast.state_dict()) == len(cut.state_dict())


def test_a_device_takes_everything_along():
    model = tiny_model("llama", "lm")
    program = lg.optimize(model, [lg.WeaveShadow(config={"r": 4}), "fuse-patch-embed"], progress=False)
    there = program.to("meta")
    for unit in there.ir.graphs.values():
        values = [node.meta.get("val") for node in unit.graph.nodes]
        exported = unit.exported
        tensors = [*exported.state_dict.values(), *exported.constants.values(), *exported.example_inputs[1].values()]
        every = [item for item in (*values, *tensors) if isinstance(item, torch.Tensor)]
        assert {item.device.type for item in every} == {"meta"}
        assert "cpu" not in graph_text(exported)
        exported.validate()
    assert all(tensor.is_meta for tensor in there.adapters["default"].tensors.values())
    assert there.ir.n_parameters == program.ir.n_parameters  # what was tied still is
    assert {unit.exported.state_dict["lm_head.weight"].device.type for unit in program.ir.graphs.values()} == {"cpu"}
    source = there.ir.source
    assert all("cpu" not in graph_text(unit.exported) for unit in source.graphs.values())


def test_both_at_once_and_nothing_to_do():
    program = lg.trace(tiny_model("bert"), progress=False)
    there = program.to("meta", torch.bfloat16)
    assert {(tensor.device.type, tensor.dtype) for tensor in there.state_dict().values() if tensor.is_floating_point()}
    assert there.to("meta").fingerprint == there.fingerprint
    same = program.to("cpu", torch.float32)
    assert same.exported is program.exported and same is not program


def test_a_graph_saved_on_another_device_loads_on_the_cpu():
    program = lg.trace(tiny_model("llama", "base"), cached=False, progress=False)
    saved = dump_graph(program.exported).replace(b'{"type": "cpu", "index": null}', b'{"type": "cuda", "index": 0}')
    assert b"cuda" in saved
    exported = program.exported
    loaded = load_graph(saved, dict(exported.state_dict), exported.constants, None, "forward")
    assert graph_text(loaded) == graph_text(exported)


def test_inside_a_model_it_moves_and_casts_with_the_model(tmp_path):
    model = tiny_model("qwen2_vl", "vlm")
    expected = copy.deepcopy(model).to(torch.bfloat16).model.visual
    tower = lg.optimize(model.model.visual, [lg.FusePatchEmbed()], progress=False)
    model.model.visual = tower.as_module()
    before = tower.state_dict()
    model.to(torch.bfloat16)
    patches = torch.randn(16, before["patch_embed.proj.weight"][0].numel(), dtype=torch.bfloat16)
    grid = torch.tensor([[1, 4, 4]])
    with torch.no_grad():
        ours, theirs = model.model.visual(patches, grid_thw=grid), expected(patches, grid_thw=grid)
    # A product in place of the convolution, in bfloat16: 8 bits of mantissa over two blocks.
    torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, rtol=2e-2, atol=3e-2)
    assert model.model.visual.dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for tensor in tower.state_dict().values())
    model.to("meta")
    assert model.model.visual.device.type == "meta"
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).float()


def changed(model):
    model.layers[0].mlp.act_fn = nn.Tanh()
    return lg.trace(model, progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lg.trace(Plain(), (torch.randn(2, 4),), progress=False), "only a Hugging Face model"),
        (lambda: changed(tiny_model("llama", "base")), "does not lead to this program's graph"),
        (
            lambda: lg.trace(tiny_model("llama", "base"), {"inputs_embeds": torch.randn(2, 5, 64)}, progress=False),
            "does not lead to this program's graph",
        ),
        (
            lambda: lg.trace(tiny_model("llama", "base").to("meta"), cached=False, progress=False),
            "on the meta device and have no data",
        ),
    ],
)
def test_what_cannot_be_traced_again_is_refused_by_name(make, message, capfd):
    program = make()
    kind = InputError if "meta" in message else NotSupportedError
    with pytest.raises(kind, match=message):
        program.to(torch.bfloat16, progress=False)
    assert "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("targets", "kind", "message"),
    [
        ((), InputTypeError, "neither"),
        ((None,), InputTypeError, "neither a device nor a dtype"),
        ((True,), InputTypeError, "neither"),
        ((torch.int8,), InputError, "cannot be in torch.int8"),
        ((torch.complex64,), InputError, "cannot be in torch.complex64"),
        (("gpu",), InputError, "no device 'gpu'"),
        (("cpu", 1.5), InputTypeError, "neither"),
        ((torch.float8_e4m3fn,), InputError, "cannot be in torch.float8_e4m3fn"),
        ((torch.float32, torch.float16), InputError, "two of a kind: dtype"),
        (("cpu", "meta"), InputError, "two of a kind: device"),
        (("bfloat16",), InputError, r"write torch\.bfloat16, not its name"),
        (("torch.float16",), InputError, r"write torch\.float16, not its name"),
    ],
)
def test_wrong_targets_are_named(stack_program, targets, kind, message):
    with pytest.raises(kind, match=message):
        stack_program.to(*targets)


@pytest.mark.parametrize(
    ("targets", "message"),
    [({"dtype": "float32"}, "dtype= is no dtype"), ({"device": torch.half}, "device= is no device")],
)
def test_keywords_say_which_is_meant(stack_program, targets, message):
    with pytest.raises(InputTypeError, match=message):
        stack_program.to(**targets)
    assert all(tensor.is_meta for tensor in stack_program.to(device="meta").state_dict().values())
    with pytest.raises(InputError, match="two of a kind: device"):
        stack_program.to("cpu", device="meta")
    with pytest.raises(NotSupportedError, match="only a Hugging Face model"):
        stack_program.to(dtype=torch.float16)


def test_an_input_on_another_device_than_the_weights_is_named():
    layer = nn.Linear(4, 4)
    program = lg.trace(layer, torch.randn(2, 4), progress=False).to("meta")
    with pytest.raises(InputError, match=r"input 'input' is on another device[\s\S]*meta[\s\S]*cpu[\s\S]*load_weights"):
        program(torch.randn(2, 4))


def test_a_device_that_is_not_here_is_named(stack_program):
    if torch.cuda.is_available():
        pytest.skip("it is here")
    with pytest.raises(InputError, match="no device 'cuda' here"):
        stack_program.to("cuda")


def test_a_config_that_names_no_class_is_refused():
    program = lg.trace(tiny_model("bert"), progress=False)
    info = dataclasses.replace(program.ir.model, cls="transformers.models.bert.modeling_bert:Nothing")
    with pytest.raises(NotSupportedError, match="is not there"):
        lg.Program(program.ir.evolve(model=info)).to(torch.float16, progress=False)


def test_a_deep_copy_has_weights_and_adapters_of_its_own_and_the_same_ties():
    program = lg.trace(tiny_model("gpt2", "lm"), progress=False)
    tapped = program.apply(lg.TapOutputs("hidden_states"))
    twin = copy.deepcopy(tapped)
    ids = torch.randint(5, 60, (2, 9))
    expected = tapped(ids).logits
    assert copy.copy(tapped) is tapped and twin.fingerprint == tapped.fingerprint
    assert torch.equal(twin(ids).logits, expected)
    state = twin.state_dict("graph")
    assert not {id(tensor) for tensor in state.values()} & {
        id(tensor) for tensor in tapped.state_dict("graph").values()
    }
    assert twin.ir.n_parameters == tapped.ir.n_parameters
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    assert torch.equal(tapped(ids).logits, expected) and not twin(ids).logits.any()
    assert twin.remove("tap-outputs").fingerprint == program.fingerprint


def test_a_program_without_data_takes_no_inputs_with_data():
    with torch.device("meta"):
        model = tiny_model("llama", "lm")
    program = lg.trace(model, progress=False)
    with pytest.raises(InputError, match=r"another device than the program[\s\S]*load_weights"):
        program(torch.randint(5, 60, (2, 9)))
    assert program(torch.randint(5, 60, (2, 9)).to("meta")).logits.is_meta
