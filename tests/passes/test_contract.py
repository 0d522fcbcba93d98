"""The contract between passes and pipeline: what a pass does wrong is told with its name, and nothing is half done."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.errors import InputTypeError, PassError

ATEN = torch.ops.aten


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@dataclass(frozen=True)
class Faulty(lg.Pass):
    """Fails as its option says."""

    pass_name: ClassVar[str] = "test-faulty"

    how: Any = None
    more: tuple[Any, ...] = field(default=())

    def find(self, program, graph):
        relu = next(node for node in program[graph].graph.nodes if node.target is ATEN.relu.default)
        if self.how == "find raises":
            raise KeyError("of the pass")
        if self.how == "find inserts":
            with program[graph].graph.inserting_after(relu):
                program[graph].graph.call_function(ATEN.neg.default, (relu,))
        if self.how == "find changes":
            relu.args = (relu.args[0].args[0],)
        if self.how == "find erases":
            relu.replace_all_uses_with(relu.args[0])
            program[graph].graph.erase_node(relu)
        if self.how == "find returns None":
            return None
        if self.how == "find returns a list":
            return [lg.Site("first", (relu.name,))]
        return lg.Findings((lg.Site("first", (relu.name,)),))

    def rewrite(self, site, edit):
        if self.how == "rewrite raises":
            return 1 // 0
        if self.how == "rewrite asks for nothing":
            edit.node("nowhere")
        return None


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    return lg.trace(Twice().eval(), {"x": torch.randn(3, 4)}, progress=False)


FAULTS = {
    "find raises": r"find\(\) of Faulty failed[\s\S]*pass test-faulty[\s\S]*KeyError",
    "find inserts": r"find\(\) of Faulty wrote to the graph[\s\S]*write in rewrite",
    "find changes": r"find\(\) of Faulty wrote to the graph",
    "find erases": r"find\(\) of Faulty wrote to the graph",
    "find returns None": r"returned no Findings[\s\S]*NoneType",
    "find returns a list": r"returned no Findings[\s\S]*list",
    "rewrite raises": r"rewrite\(\) of Faulty failed[\s\S]*pass test-faulty, first[\s\S]*ZeroDivisionError",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_pass_at_fault_is_named_and_the_program_stays(program, how) -> None:
    held, x = program.fingerprint, torch.randn(2, 4)
    wanted, listing = program(x), str(program)
    with pytest.raises(PassError, match=FAULTS[how]) as caught:
        program.apply(Faulty(how))
    if "raises" in how:
        assert isinstance(caught.value.__cause__, (KeyError, ZeroDivisionError))
    assert torch.equal(program(x), wanted)
    assert (str(program), lg.trace(Twice().eval(), {"x": x}, progress=False).fingerprint) == (listing, held)


def test_an_error_of_ours_in_rewrite_says_at_which_site(program) -> None:
    with pytest.raises(LookupError, match=r"no node named 'nowhere'[\s\S]*pass test-faulty, first"):
        program.apply(Faulty("rewrite asks for nothing"))


@pytest.mark.parametrize("option", [torch.nn.Linear, torch.ones(1), {1: object()}, lambda x: x])
def test_options_that_cannot_be_saved_are_refused_before_anything_runs(program, option) -> None:
    with pytest.raises(InputTypeError, match=r"option 'how' of Faulty is no plain data[\s\S]*pass test-faulty"):
        program.apply(Faulty(option))
    with pytest.raises(InputTypeError, match="option 'more'"):
        program.apply(Faulty(None, (option,)))


def test_apply_takes_one_pass(program) -> None:
    for several in ([Faulty()], (Faulty(), "tap-outputs")):
        with pytest.raises(InputTypeError, match=r"apply takes one pass[\s\S]*optimize\(program, passes=\[\.\.\.\]\)"):
            program.apply(several)


def test_a_verified_pass_after_an_unverified_one_can_be_removed_again() -> None:
    model = Twice().eval()
    before = lg.trace(model, {"x": torch.randn(3, 4)}, progress=False).apply(lg.TapOutputs("second", name="taps"))
    tap = lg.TapOutputs("first", only=True)
    after = before.apply(tap, verify=True)
    assert "second.weight" not in after.state_dict()
    back = after.remove(tap)
    assert back.fingerprint == before.fingerprint
    x = torch.randn(2, 4)
    assert torch.equal(back(x)["output"], copy.deepcopy(model)(x))
