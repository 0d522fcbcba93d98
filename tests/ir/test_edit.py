"""Edit keeps graph, signature, state and values in step, whatever it adds or removes (issue: item 2; 0-product)."""

from __future__ import annotations

import io
import operator
from collections.abc import Callable

import pytest
import torch

import layergraph as lg
from layergraph.errors import EditError, InputTypeError, NotFoundError
from layergraph.ir import Edit
from layergraph.ir.execute import run_graph
from layergraph.ir.program import Program
from layergraph.ir.weights import Remap, RemapKind, register_remap
from layergraph.verify import check_structure

ATEN = torch.ops.aten


@pytest.fixture(scope="module")
def program(stack_program: lg.Program) -> Program:
    return stack_program.ir


def add_output(edit: Edit) -> None:
    node = edit.node(edit.program.forward.layers.by_path["blocks.1"][0].output())
    edit.add_output("middle", node)


def add_computed_output(edit: Edit) -> None:
    node = edit.node(edit.program.forward.layers.by_path["blocks.0"][0].output())
    edit.add_output("mean", edit.call(ATEN.mean.dim, node, [1], after=node))


def add_input(edit: Edit) -> None:
    x = edit.node("x")
    y = edit.add_input("y", edit.value(x).shape, torch.float32, example=torch.ones(2, 3, 8))
    first = edit.node(edit.program.forward.layers.by_path["blocks.0.norm"][0].first_input)
    edit.replace(first, edit.call(ATEN.add.Tensor, x, y, before=_first_use(x)), except_in=[])


def _first_use(node: torch.fx.Node) -> torch.fx.Node:
    user = node.next
    while user.op == "placeholder":
        user = user.next
    return user


def add_parameter(edit: Edit) -> None:
    weight = edit.add_parameter("extra.weight", torch.eye(8))
    out = edit.node(edit.program.forward.layers.by_path["blocks.2"][0].output())
    edit.replace(out, edit.call(ATEN.linear.default, out, weight, after=out))


def add_persistent_buffer(edit: Edit) -> None:
    _add_buffer(edit, persistent=True)


def add_constant_buffer(edit: Edit) -> None:
    _add_buffer(edit, persistent=False)


def _add_buffer(edit: Edit, *, persistent: bool) -> None:
    buffer = edit.add_buffer("extra.buffer", torch.zeros(8), persistent=persistent)
    out = edit.node(edit.program.forward.layers.by_path["blocks.2"][0].output())
    edit.replace(out, edit.call(ATEN.add.Tensor, out, buffer, after=out))


def add_input_mutation(edit: Edit) -> None:
    out = edit.node(edit.program.forward.layers.by_path["blocks.0"][0].output())
    cache = edit.add_input("cache", edit.value(out).shape, torch.float32)
    edit.add_mutation(cache, out)


def remove_shift(edit: Edit) -> None:
    """Erase the use of a non-persistent buffer: it goes with its last use."""
    node = edit.node("b_shift").users.__iter__().__next__()
    edit.replace(node, node.args[0])


EDITS: dict[str, Callable[[Edit], None]] = {
    "output": add_output,
    "computed output": add_computed_output,
    "input": add_input,
    "parameter": add_parameter,
    "persistent buffer": add_persistent_buffer,
    "constant buffer": add_constant_buffer,
    "input mutation": add_input_mutation,
    "buffer removed": remove_shift,
}


def run(program: Program, exported: torch.export.ExportedProgram, size: int = 2) -> tuple[dict, dict]:
    """Outputs and inputs afterwards (mutations show there), at a size other than traced if asked."""
    torch.manual_seed(1)
    inputs = {
        item.name: torch.randn([size if isinstance(dim, str) else dim for dim in item.shape])
        for item in program.forward.interface.inputs
    }
    with torch.no_grad():
        return exported.module()(**inputs), inputs


def assert_same(a: tuple[dict, dict], b: tuple[dict, dict]) -> None:
    for left, right in zip(a, b, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", EDITS)
def test_each_kind_of_edit_passes_verifier_save_load_and_decompositions(program: Program, kind: str) -> None:
    edit = Edit(program, made_by=kind)
    EDITS[kind](edit)
    after = edit.finish()
    check_structure(after)
    exported = after.forward.exported
    assert_same(run(after, exported), run(after, exported.run_decompositions()))
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    assert_same(run(after, exported, size=5), run(after, torch.export.load(buffer), size=5))


@pytest.mark.parametrize("kind", EDITS)
def test_each_kind_of_edit_leaves_the_program_it_started_from_alone(program: Program, kind: str) -> None:
    fingerprint, state = program.fingerprint, {name: id(t) for name, t in program.state.items()}
    edit = Edit(program)
    EDITS[kind](edit)
    edit.finish()
    assert program.fingerprint == fingerprint
    assert {name: id(t) for name, t in program.state.items()} == state


def all_edits(program: Program) -> Program:
    edit = Edit(program, made_by="all")
    for name, change in EDITS.items():
        if name != "input":  # replaces the first node of the graph; the mutation below adds an input of its own
            if name == "constant buffer":
                edit.add_buffer("constant", torch.ones(8), persistent=False)
                continue
            change(edit)
    constant = edit.node("b_constant")
    mean = edit.node("mean_dim")
    edit.replace(mean, edit.call(ATEN.add.Tensor, mean, constant, after=mean))
    return edit.finish()


def test_one_program_with_all_edits_runs_by_graph_and_by_module(program: Program) -> None:
    after = all_edits(program)
    check_structure(after)
    torch.manual_seed(1)
    inputs = {"x": torch.randn(4, 6, 8), "cache": torch.randn(4, 6, 8)}
    ours = {name: tensor.clone() for name, tensor in inputs.items()}
    with torch.no_grad():
        outputs = run_graph(after.forward, ours)
        theirs = after.forward.exported.module()(**inputs)
    assert_same((outputs, ours), (theirs, inputs))
    assert list(outputs) == ["output", "middle", "mean"]


def test_one_program_with_all_edits_compiles_ahead_of_time(program: Program, tmp_path) -> None:
    after = all_edits(program)
    path = torch._inductor.aoti_compile_and_package(after.forward.exported, package_path=str(tmp_path / "all.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    inputs = {"x": torch.randn(4, 6, 8), "cache": torch.randn(4, 6, 8)}
    ours = {name: tensor.clone() for name, tensor in inputs.items()}
    with torch.no_grad():
        expected = run_graph(after.forward, ours)
        found = compiled(**inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs["cache"], ours["cache"], rtol=1e-5, atol=1e-5)


def test_one_program_with_all_edits_but_mutation_exports_to_onnx(program: Program, tmp_path) -> None:
    """ONNX graphs are pure: a mutated input has no counterpart there, so the mutation is removed first."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX is an extra; `make test` installs it")
    pytest.importorskip("onnxscript", reason="ONNX is an extra; `make test` installs it")
    after = all_edits(program)
    edit = Edit(after)
    copies = [node for node in edit.graph.nodes if node.target is ATEN.copy_.default]
    edit.remove_mutation(copies[0])
    edit.remove_input("cache")
    after = edit.finish()
    path = tmp_path / "all.onnx"
    torch.onnx.export(after.forward.exported.run_decompositions(), f=str(path), dynamo=True, verbose=False)
    x = torch.randn(2, 3, 8)
    session = onnxruntime.InferenceSession(str(path))
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = run_graph(after.forward, {"x": x})
    for ours, theirs in zip(expected.values(), found, strict=True):
        torch.testing.assert_close(torch.from_numpy(theirs), ours, rtol=1e-4, atol=1e-5)


def test_adding_and_removing_leads_back_to_the_fingerprint(program: Program) -> None:
    edit = Edit(program)
    add_output(edit)
    add_computed_output(edit)
    cache = edit.add_input("cache", edit.value(edit.node("x")).shape, torch.float32)
    copy = edit.add_mutation(cache, edit.node("x"))
    added = edit.finish()
    assert added.fingerprint != program.fingerprint
    edit = Edit(added)
    edit.remove_mutation(edit.node(copy.name))
    edit.remove_input("cache")
    edit.remove_output("mean")
    edit.remove_output("middle")
    assert edit.finish().fingerprint == program.fingerprint


def test_weights_that_nothing_uses_any_more_are_gone(program: Program) -> None:
    edit = Edit(program)
    call = program.forward.layers.by_path["blocks.1"][0]
    edit.replace(edit.node(call.output()), edit.node(call.first_input))
    after = edit.finish()
    assert not [name for name in after.state_dict if name.startswith("blocks.1.")]
    assert after.n_parameters == program.n_parameters * 2 // 3
    check_structure(after)


def test_provenance_names_maker_and_sources(program: Program) -> None:
    edit = Edit(program, made_by="my-pass")
    add_computed_output(edit)
    made = edit.finish().forward.provenance["mean_dim"]
    assert made.made_by == "my-pass"
    assert made.made_from == (program.forward.layers.by_path["blocks.0"][0].output(),)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda edit: edit.node("nope"), NotFoundError, "no node named 'nope'"),
        (lambda edit: edit.erase(edit.node("add")), EditError, "still used"),
        (lambda edit: edit.erase(edit.node("x")), EditError, "not erased as a node"),
        (lambda edit: edit.remove_output("output"), EditError, "needs an output"),
        (lambda edit: edit.remove_output("nope"), NotFoundError, "no output"),
        (lambda edit: edit.remove_input("x"), EditError, "still uses"),
        (lambda edit: edit.add_output("output", edit.node("add")), EditError, "already"),
        (lambda edit: edit.add_parameter("scale", torch.ones(1)), EditError, "already"),
        (lambda edit: edit.call(ATEN.add.Tensor, edit.node("x"), 1), EditError, "before= or after="),
        (
            lambda edit: edit.call(ATEN.mm.default, edit.node("x"), edit.node("x"), after=edit.node("add")),
            EditError,
            "cannot take these arguments",
        ),
        (lambda edit: edit.add_mutation(edit.node("add"), edit.node("x")), EditError, "only an input or a buffer"),
        (lambda edit: edit.replace(edit.node("add"), None), EditError, r"not a node[\s\S]*None"),
        (lambda edit: edit.replace(edit.program.forward.nodes["add"], edit.node("x")), EditError, "of another graph"),
        (lambda edit: edit.add_output("new", edit.program.forward.nodes["add"]), EditError, "of another graph"),
        (
            lambda edit: edit.call(ATEN.neg.default, edit.program.forward.nodes["add"], after=edit.node("add")),
            EditError,
            "of another graph",
        ),
        (
            lambda edit: edit.call(ATEN.clamp, edit.node("add"), -1, 1, after=edit.node("add")),
            EditError,
            r"aten.clamp is an op without its overload[\s\S]*torch.ops.aten.clamp.default, torch.ops.aten",
        ),
        (lambda edit: edit.add_output("", edit.node("add")), EditError, "an output has no name"),
        (lambda edit: edit.tensor_of(edit.node("x")), EditError, "not a parameter"),
        (lambda edit: edit.replace_state(edit.node("add"), torch.ones(1)), EditError, "not a parameter"),
        (lambda edit: edit.replace_state(edit.node("b_scale"), [1.0]), InputTypeError, "not a tensor"),
        (lambda edit: edit.replace_state(edit.node("b_scale")), EditError, "neither a tensor nor a remap"),
        (lambda edit: edit.add_parameter("more", [1.0]), InputTypeError, "not a tensor"),
        (lambda edit: edit.add_buffer("more", torch.ones(1, device="meta")), EditError, "on another device"),
        (
            lambda edit: edit.replace_state(edit.node("b_scale"), torch.ones(2), reshape("scale", [8], [1, 8])),
            EditError,
            r"not what remap 'reshape' makes[\s\S]*\[1, 8\][\s\S]*\[2\]",
        ),
        (
            lambda edit: edit.replace_state(edit.node("b_scale"), remap=reshape("scale", [8], [1, 8], "other")),
            EditError,
            "under other names",
        ),
    ],
)
def test_wrong_edits_are_named_errors(program: Program, change, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        change(Edit(program))


def reshape(name: str, old: list[int], new: list[int], rewritten: str | None = None) -> Remap:
    return Remap("reshape", (name,), (rewritten or name,), {"original_shape": old, "rewritten_shape": new})


def test_what_tensor_of_gives_is_the_pass_s_own(program: Program) -> None:
    edit = Edit(program)
    held = program.state_dict["scale"].clone()
    edit.tensor_of(edit.node("b_scale")).data.mul_(3)
    assert torch.equal(program.state_dict["scale"], held)


def test_replacing_in_circles_ends(program: Program) -> None:
    edit = Edit(program)
    node = edit.node("add")
    edit.replace(node, node)
    other = edit.call(ATEN.mul.Tensor, node, 1.0, after=node)
    edit.replace(node, other, except_in=[other])
    edit.replace(other, node)
    after = edit.finish()
    check_structure(after)
    assert after.fingerprint == program.fingerprint


def test_a_remap_is_a_name_and_two_directions() -> None:
    for name, kind in (("y", None), (None, RemapKind(list, list)), ("y", lambda tensors, params: tensors)):
        with pytest.raises(InputTypeError, match="a name and its two directions"):
            register_remap(name, kind)


def test_an_op_that_fixes_a_dynamic_size_is_refused(program: Program) -> None:
    edit = Edit(program)
    node = edit.node("add")
    before = str(program.forward.nodes["add"].meta["val"].shape)
    with pytest.raises(EditError, match="fixes a dynamic size"):
        edit.call(ATEN.view.default, node, [2, 3, 8], after=node)
    # Sizes are kept in an environment that all programs of one trace share: it must be as it was.
    assert str(program.forward.nodes["add"].meta["val"].shape) == before


def test_an_edit_out_of_order_is_refused_at_the_end(program: Program) -> None:
    """A node that uses a later one: lint finds it, nothing of the program changes."""
    edit = Edit(program, made_by="wrong")
    last = edit.node(program.forward.layers.by_path["blocks.2"][0].output())
    first = edit.node("layer_norm")
    edit.update_args(first, last, *first.args[1:])
    with pytest.raises(EditError, match="not a valid exported program"):
        edit.finish()


def test_multiple_results_are_taken_apart(program: Program) -> None:
    edit = Edit(program)
    node = edit.node("add")
    pair = edit.call(ATEN.topk.default, node, 2, -1, after=node)
    edit.add_output("values", edit.call(operator.getitem, pair, 0, after=pair))
    after = edit.finish()
    check_structure(after)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        assert run_graph(after.forward, {"x": x})["values"].shape == (2, 3, 2)


@pytest.mark.parametrize("how", ["replace", "enter"])
def test_a_chain_of_inserted_nodes_goes_on_using_what_it_replaces(program: Program, how: str) -> None:
    edit = Edit(program, "forward", made_by="test")
    call = program.forward.layers.by_path["blocks.1"][0]
    given = edit.node(call.first_input)
    first = edit.call(ATEN.div.Tensor, given, 0.5, after=given)
    last = edit.call(ATEN.mul.Tensor, edit.call(ATEN.round.default, first, after=first), 0.5, after=first.next)
    if how == "replace":
        edit.replace(given, last)
    else:
        edit.enter("blocks.1", given, last)
    after = edit.finish()
    check_structure(after)
    nodes = after.forward.nodes
    assert nodes[first.name].args[0] is nodes[given.name]
    assert after.forward.layers.by_path["blocks.1"][0].first_input == last.name
    x = torch.randn(2, 3, 8)
    assert not torch.equal(run_graph(after.forward, {"x": x})["output"], run_graph(program.forward, {"x": x})["output"])
