"""The contract between passes and pipeline: what a pass does wrong is told with its name, and nothing is half done."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.errors import InputError, InputTypeError, NotFoundError, PassError
from layergraph.passes import make_pass, registry

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


@pytest.mark.parametrize("option", [torch.nn.Linear, torch.ones(1), {1: object()}, lambda x: x, float("nan")])
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


@dataclass(frozen=True)
class Typed(lg.Pass):
    pass_name: ClassVar[str] = "test-typed"

    limit: float = 1.0
    layers: tuple[int, ...] = ()
    mode: Literal["soft", "hard"] | None = None
    words: frozenset[str] = frozenset()
    exact: bool = False
    names: Sequence[str] = ()
    table: Mapping[str, float] | None = None
    any_of_ours: lg.Site | None = None

    def find(self, program, graph):
        return lg.Findings()

    def rewrite(self, site, edit):
        raise AssertionError("it finds nothing")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"limit": "abc"}, r"option limit of test-typed is of another type[\s\S]*float[\s\S]*'abc', str"),
        ({"limit": True}, "option limit"),
        ({"layers": (1, 2.0)}, r"option layers[\s\S]*tuple\[int, ...\]"),
        ({"layers": 2}, "option layers"),
        ({"mode": "both"}, r"option mode[\s\S]*Literal\['soft', 'hard'\]"),
        ({"words": [1]}, "option words"),
        ({"exact": 1}, "option exact"),
        ({"exact": [{}]}, "option exact"),
        ({"limit": 10**400}, "option limit"),
        ({"names": "abc"}, "option names"),
        ({"table": {"a": "b"}}, "option table"),
    ],
)
def test_options_are_of_the_types_of_their_fields(options, says) -> None:
    with pytest.raises(InputTypeError, match=says):
        Typed(**options)


def test_options_that_fit_are_taken_and_lists_become_what_the_field_is() -> None:
    made = Typed(limit=2, layers=[0, 1], mode="hard", words=["b", "a"], any_of_ours=object())
    assert (made.limit, made.layers, made.words) == (2, (0, 1), frozenset("ab"))
    assert type(made.limit) is float  # or the graph would say div(x, 2) where it says div(x, 2.0) for an equal pass
    again = Typed.from_options(Typed(layers=[1]).options())
    assert again == Typed(layers=(1,)) and hash(again) == hash(Typed(layers=(1,)))


def test_a_name_takes_no_options(program) -> None:
    for passes in (["fuse-patch-embed:conv2d=True"], ["tap-outputs:what=first"]):
        with pytest.raises(
            InputError, match=r"the name of a pass holds options[\s\S]*(FusePatchEmbed|TapOutputs)\(...\)"
        ):
            lg.optimize(program, passes)


def test_a_program_of_a_pass_that_is_not_imported_names_it(program, tmp_path, monkeypatch) -> None:
    @dataclass(frozen=True)
    class Negate(lg.Pass):
        pass_name: ClassVar[str] = "test-negate"
        promise: ClassVar[str] = "defined"

        def reference(self, outputs):
            return {name: -value for name, value in outputs.items()}

        def find(self, program, graph):
            last = next(node for node in reversed(program[graph].graph.nodes) if node.target is ATEN.linear.default)
            return lg.Findings((lg.Site("second", (last.name,)),))

        def rewrite(self, site, edit):
            node = edit.node(site.nodes[0])
            edit.replace(node, edit.call(ATEN.neg.default, node, after=node))

    monkeypatch.setitem(registry._PASSES, "test-negate", Negate)
    made = program.apply(Negate(), verify=True).apply(lg.TapOutputs("first"))
    made.save(tmp_path / "made")
    x = torch.randn(2, 4)
    assert torch.equal(made(x)["output"], -program(x))
    monkeypatch.delitem(registry._PASSES, "test-negate")
    loaded = lg.load(tmp_path / "made", progress=False)
    assert torch.equal(loaded(x)["output"], -program(x))
    assert loaded.remove("test-negate").remove("tap-outputs").fingerprint == program.fingerprint
    for change in (lambda: loaded.apply("fuse-patch-embed"), lambda: make_pass("test-negate", {})):
        with pytest.raises(NotFoundError, match=r"the pass 'test-negate' ran on this program and is not known here"):
            change()


def test_what_stands_on_dropped_weights_can_be_removed_from_above_them(program, monkeypatch) -> None:
    """Removing a pass needs no weights that another one, which stays, has dropped."""
    monkeypatch.setitem(registry._PASSES, "test-rounded", Rounded)
    cut = program.apply(lg.TapOutputs("first", only=True))
    assert "second.weight" not in cut.state_dict()
    both = cut.apply(Rounded())
    x = torch.randn(2, 4)
    assert not torch.equal(both(x)["first"], cut(x)["first"])
    on_top = program.apply(Rounded()).apply(lg.TapOutputs("%round_default"))
    with pytest.raises(InputError, match=r"cannot be removed from under tap-outputs[\s\S]*remove 'tap-outputs' first"):
        on_top.remove("test-rounded")
    assert on_top.remove("tap-outputs").remove("test-rounded").fingerprint == program.fingerprint
    back = both.remove("test-rounded")
    assert back.fingerprint == cut.fingerprint and torch.equal(back(x)["first"], cut(x)["first"])
    with pytest.raises(InputError, match="a pass dropped weights that it needs"):
        back.remove("tap-outputs")
    with pytest.raises(InputError, match="a pass dropped weights that it needs"):
        both.remove("tap-outputs")


@dataclass(frozen=True)
class Rounded(lg.Pass):
    """What enters ``first`` on a grid."""

    pass_name: ClassVar[str] = "test-rounded"
    promise: ClassVar[str] = "defined"

    def reference(self, outputs):
        return {}

    def find(self, program, graph):
        call = program[graph].layers.by_path["first"][0]
        return lg.Findings((lg.Site("first", (call.first_input,)),))

    def rewrite(self, site, edit):
        given = edit.node(site.nodes[0])
        edit.enter("first", given, edit.call(ATEN.round.default, given, after=given))
