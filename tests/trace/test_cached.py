"""Tracing the cached graph: what it keeps, what may vary, kinds of models, refusals. Oracle: uncached eager."""

import pytest
import torch

import layergraph as lg
from layergraph.errors import NotSupportedError
from layergraph.testing.zoo import tiny_model


@pytest.fixture(scope="module")
def gemma():
    return lg.trace(tiny_model("gemma3_text", "lm"), cached=True)


def test_it_keeps_what_the_model_keeps(gemma):
    step = gemma.ir["step"]
    assert {(group.name, group.window) for group in step.cache.groups} == {("full", None), ("window4", 4)}
    assert [(tensor.layer, tensor.role, tensor.heads, tensor.features) for tensor in step.cache.tensors] == [
        (layer, role, 2, 16) for layer in (0, 1) for role in ("keys", "values")
    ]
    assert len({tensor.group for tensor in step.cache.tensors}) == 2


def test_batch_tokens_kept_and_slots_of_each_group_vary(gemma):
    shapes = {item.name: item.shape for item in gemma.ir["step"].interface.inputs}
    assert shapes["input_ids"] == ("batch", "tokens") and shapes["logits_to_keep"] == ("kept",)
    assert shapes["inputs_embeds"] == ("batch", "tokens", 64)
    assert shapes["full_positions"] == ("full_slots", "batch")
    assert shapes["window4_positions"] == ("window4_slots", "batch")
    assert {shape for name, shape in shapes.items() if name.startswith("cache_")} == {
        ("full_slots", "batch", 2, 16),
        ("window4_slots", "batch", 2, 16),
    }


def test_cache_tensors_are_the_only_inputs_it_changes(gemma):
    step = gemma.ir["step"]
    placeholders = dict(zip(step.exported.graph_signature.user_inputs, step.interface.input_names, strict=True))
    writes = [node for node in step.graph.nodes if node.op == "call_function" and _is_write(node.target)]
    inputs = {name for name in step.interface.input_names if name.startswith("cache_")}
    changed = [placeholders[node.args[0].name] for node in writes]
    assert sorted(changed) == sorted(inputs | {"full_positions", "window4_positions"})


def _is_write(target):
    return getattr(getattr(target, "_schema", None), "is_mutable", False)


def test_both_graphs_stand_on_one_state(gemma):
    forward, step = gemma.programs["forward"], gemma.programs["step"]
    assert all(forward.state_dict[name] is tensor for name, tensor in step.state_dict.items())


def test_the_model_is_as_it_was():
    model = tiny_model("gpt_neo", "lm")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    lg.trace(model, cached=True)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert not module._forward_hooks and not module._forward_pre_hooks


# One of each kind by default: states beside keys and values. All families: scripts/cover_cached.py.
_KINDS = ["nemotron_h", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bloom", "minimax", "llama4_text"))]


@pytest.mark.parametrize("model_type", _KINDS)
def test_kinds_of_models_step_like_uncached_eager(model_type):
    model = tiny_model(model_type, "lm")
    program = lg.trace(model, cached=True)
    ids = torch.randint(3, 90, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"attention_mask": mask, "use_cache": False}
    if model_type != "bloom":
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = model(input_ids=ids, **given).logits
    session = program.session()
    parts = [slice(0, 5), slice(5, 9), slice(9, 10), slice(10, 11), slice(11, 12)]
    logits = torch.cat([session.step(ids[:, part], mask[:, part], logits_to_keep=0)["logits"] for part in parts], 1)
    torch.testing.assert_close(logits[mask.bool()], wanted[mask.bool()], rtol=1e-5, atol=1e-5)


def test_states_of_its_own_kind_are_refused_by_name():
    with pytest.raises(NotSupportedError, match="RWKV keeps its states in a list of its own"):
        lg.trace(tiny_model("rwkv", "lm"), cached=True)


def test_a_loop_over_tokens_is_refused_by_name():
    """Mamba's reference scan is a Python loop over tokens: its graph would hold for one length only."""
    program = lg.trace(tiny_model("mamba", "lm"))
    assert "step" not in program.programs and program.ir.model.uncached_because
    with pytest.raises(NotSupportedError) as caught:
        program.session()
    assert program.ir.model.uncached_because in str(caught.value)
