"""check_pass passes what keeps its word and catches what does not."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.errors import EditError, InputError, PromiseError, StructureError
from layergraph.ir.edit import Edit
from layergraph.passes.registry import register_pass
from layergraph.testing import check_pass
from layergraph.testing.zoo import tiny_model

ATEN = torch.ops.aten


@register_pass
@dataclass(frozen=True)
class AddZero(lg.Pass):
    """Adds a constant to every linear: exact for 0, a lie otherwise."""

    pass_name: ClassVar[str] = "test-add-zero"

    amount: float = 0.0
    from_where: str = ""

    def find(self, program, graph):
        nodes = [node for node in program[graph].graph.nodes if node.target is ATEN.linear.default]
        return lg.Findings(tuple(lg.Site(node.name, (node.name,)) for node in nodes))

    def rewrite(self, site, edit: Edit) -> None:
        node = edit.node(site.nodes[0])
        edit.replace(node, edit.call(ATEN.add.Tensor, node, self.amount, after=node))


@register_pass
@dataclass(frozen=True)
class Moves(AddZero):
    """Says that outputs change, and that those before do not tell how."""

    pass_name: ClassVar[str] = "test-moves"
    promise: ClassVar[str] = "defined"

    def reference(self, outputs):
        return {}


@register_pass
@dataclass(frozen=True)
class Careless(AddZero):
    """Writes in find."""

    pass_name: ClassVar[str] = "test-careless"

    def find(self, program, graph):
        found = super().find(program, graph)
        return lg.Findings(found.sites[: torch.randint(0, 2, ()).item()])


@dataclass(frozen=True)
class Unregistered(AddZero):
    pass_name: ClassVar[str] = "test-unregistered"


@register_pass
@dataclass(frozen=True)
class LosesOutput(AddZero):
    pass_name: ClassVar[str] = "test-loses-output"

    def rewrite(self, site, edit: Edit) -> None:
        if len(edit.output_names) > 1:
            edit.remove_output(edit.output_names[0])


def test_a_pass_that_keeps_its_word_passes(stack_program: lg.Program) -> None:
    checked = check_pass(AddZero(), stack_program, n_sites=3)
    assert checked.removed is True
    assert checked.after.report().as_dict()["passes"][0]["errors"] == {"output": 0.0}
    assert "test-add-zero" in checked.after.explain("add_tensor")


def test_a_defined_pass_is_compared_with_a_model_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for part in (twin[0], twin[2]):
            part.bias += 0.5
    inputs = {"input": torch.randn(2, 8)}
    check_pass(Moves(amount=0.5), model, inputs, n_sites=2, expected=twin)
    with pytest.raises(PromiseError, match=r"output output of graph forward[\s\S]*what `expected` gives[\s\S]*off"):
        check_pass(Moves(amount=0.25), model, inputs, expected=twin)


def test_a_reference_that_is_missing_is_named() -> None:
    @register_pass
    @dataclass(frozen=True)
    class Silent(AddZero):
        pass_name: ClassVar[str] = "test-silent"
        promise: ClassVar[str] = "defined"

    with pytest.raises(PromiseError, match=r"reference\(\)"):
        check_pass(Silent(amount=1.0), nn.Linear(8, 8).eval(), {"input": torch.randn(2, 8)})


def test_the_wrong_count_of_sites_is_caught(stack_program: lg.Program) -> None:
    with pytest.raises(PromiseError, match="number of sites"):
        check_pass(AddZero(), stack_program, n_sites=4)


def test_a_broken_promise_is_caught_and_the_program_stays(stack_program: lg.Program) -> None:
    fingerprint = stack_program.fingerprint
    with pytest.raises(PromiseError, match="promises to be exact") as caught:
        check_pass(AddZero(amount=1.0), stack_program)
    assert caught.value.pass_name == "test-add-zero"
    assert stack_program.fingerprint == fingerprint


def test_a_find_that_is_not_pure_is_caught(stack_program: lg.Program) -> None:
    torch.manual_seed(1)
    with pytest.raises(PromiseError):
        for _ in range(20):
            check_pass(Careless(), stack_program)


def test_a_pass_that_is_not_registered_is_told_how(stack_program: lg.Program) -> None:
    with pytest.raises(InputError, match="register_pass"):
        check_pass(Unregistered(), stack_program)


def test_a_lost_output_is_caught(stack_program: lg.Program) -> None:
    tapped = stack_program.apply(lg.TapOutputs("blocks.0"))
    with pytest.raises(PromiseError, match="gone"):
        check_pass(LosesOutput(), tapped)


def test_an_edit_error_names_the_pass_and_those_before(stack_program: lg.Program) -> None:
    @register_pass
    @dataclass(frozen=True)
    class Breaks(AddZero):
        pass_name: ClassVar[str] = "test-breaks"

        def rewrite(self, site, edit: Edit) -> None:
            edit.erase(edit.node(site.nodes[0]))

    with pytest.raises(EditError) as caught:
        lg.optimize(stack_program, passes=[lg.TapOutputs("blocks.0"), Breaks()])
    assert caught.value.pass_name == "test-breaks"
    assert caught.value.ran == ("tap-outputs",)


@pytest.mark.parametrize("item", [lg.TapOutputs("hidden_states"), lg.FusePatchEmbed(conv2d=True)])
def test_our_own_passes_keep_theirs(item: lg.Pass) -> None:
    assert check_pass(item, tiny_model("vit", "base")).removed is True


def test_structure_rules_catch_what_they_name(stack_program: lg.Program) -> None:
    from layergraph.ir.program import GraphUnit
    from layergraph.verify.structure import RULES, check_structure

    unit = stack_program.ir.forward
    wrong = GraphUnit(unit.exported, unit.interface.with_output("ghost", ("ghost",)), unit.layers)
    with pytest.raises(StructureError, match="interface-matches"):
        check_structure(stack_program.ir.evolve(graphs={"forward": wrong}))
    renamed = GraphUnit(unit.exported, unit.interface, unit.layers.renamed({"add": "nowhere"}))
    with pytest.raises(StructureError, match="layers-exist"):
        check_structure(stack_program.ir.evolve(graphs={"forward": renamed}))
    assert all(rule.__doc__ for rule in RULES.values())


def test_labels_stay_what_they_were_and_lead_back_in_any_order(stack_program: lg.Program) -> None:
    taps = [lg.TapOutputs(f"blocks.{i}") for i in range(3)]
    program = lg.optimize(stack_program, passes=[taps[0], AddZero(), taps[1], taps[2]])
    assert [record.label for record in program.ir.history] == [
        "tap-outputs",
        "test-add-zero",
        "tap-outputs#2",
        "tap-outputs#3",
    ]
    less = program.remove("tap-outputs").remove("test-add-zero")
    assert [record.label for record in less.ir.history] == ["tap-outputs#2", "tap-outputs#3"]
    assert less.apply(taps[0]).ir.history[-1].label == "tap-outputs#4"
    assert less.remove("tap-outputs#3").remove(taps[1]).fingerprint == stack_program.fingerprint
