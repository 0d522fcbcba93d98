"""Arguments that are no tensors, and names: a program says the model's numbers, or that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import layergraph as lg
from layergraph.errors import InputError, InputTypeError, NotFoundError, TraceError

X = torch.randn(3, 4)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: float | None = 1.0, size: Any = (3, 4), mask: Any = None) -> torch.Tensor:
        return x.reshape(size[0], -1) * (100 if scale is None else scale)


def test_none_is_not_the_default_of_an_argument() -> None:
    program = lg.trace(Scaled(), {"x": X})
    assert torch.equal(program(X, scale=1.0), X)
    assert torch.equal(program(X, mask=None), X)
    with pytest.raises(InputError, match=r"scale was 1\.0 when the model was traced"):
        program(X, scale=None)
    with pytest.raises(InputError, match=r"scale was 3\.0"):
        lg.trace(Scaled(), {"x": X, "scale": 3.0})(X, scale=None)


def test_a_tensor_for_what_was_a_number_is_named() -> None:
    with pytest.raises(InputError, match=r"scale was 3\.0"):
        lg.trace(Scaled(), {"x": X, "scale": 3.0})(X, scale=torch.tensor([3.0, 3.0]))


def test_containers_that_were_traced_are_known_again_after_loading(tmp_path: Path) -> None:
    program = lg.trace(Scaled(), {"x": X, "size": (2, 6)})
    loaded = lg.load(program.save(tmp_path / "saved"))
    for one in (program, loaded):
        assert one(x=X, size=(2, 6)).shape == one(x=X, size=[2, 6]).shape == (2, 6)
        with pytest.raises(InputError, match="size was"):
            one(x=X, size=(6, 2))


class TwoNames(nn.Module):
    def forward(self, a: tuple[torch.Tensor, ...], a_0: torch.Tensor) -> torch.Tensor:
        return a[0] * 2 + a_0


class TwoResults(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"a": {"b": x}, "a.b": x * 3}


def test_names_that_would_meet_are_refused() -> None:
    with pytest.raises(InputError, match="both be called 'a_0'"):
        lg.trace(TwoNames(), {"a": (X,), "a_0": X + 1})
    with pytest.raises(TraceError, match=r"both be called 'a\.b'"):
        lg.trace(TwoResults(), {"x": X})


@pytest.mark.parametrize(
    "dynamic",
    [
        {"x": 0},
        {"x": {0: 5}},
        {"x": {7: "b"}},
        {"x": {-2: "b"}},
        {"x": {"b": 0}},
        {"x": {0: ""}},
        {"x": {0: "my batch"}},
    ],
)
def test_dynamic_that_names_no_size_is_named(dynamic: Any) -> None:
    with pytest.raises(InputError, match="which sizes of 'x' may vary"):
        lg.trace(Scaled(), {"x": X}, dynamic=dynamic)


def test_sizes_of_one_name_are_equal_in_the_examples() -> None:
    for dynamic in ({"x": {0: "n", 1: "n"}}, {"x": {0: "n"}, "mask": {1: "n"}}):
        with pytest.raises(InputError, match=r"two sizes 'n' that differ[\s\S]*3, as in dimension 0 of 'x'[\s\S]*4 in"):
            lg.trace(Scaled(), {"x": X, "mask": X}, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", ["x", 5, None])
def test_dynamic_of_another_type_is_named(dynamic: Any) -> None:
    with pytest.raises(InputTypeError, match="dynamic is neither"):
        lg.trace(Scaled(), {"x": X}, dynamic=dynamic)


def test_a_folder_does_not_choose_what_is_imported() -> None:
    program = lg.trace(Scaled(), {"x": X})
    model = type(program.ir.model)("m:M", config={}, config_class="antigravity:Config")
    module = lg.Program(program.ir.evolve(model=model)).as_module()
    with pytest.raises(NotFoundError, match="is not loaded"):
        _ = module.config


class Added(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, more: Any = None) -> torch.Tensor:
        return a * 2 + b + (0 if more is None else more[0])


def test_one_tensor_given_twice_is_two_inputs() -> None:
    x, y, z = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    program = lg.trace(Added(), {"a": x, "b": x, "more": [x]}, dynamic=False)
    assert torch.equal(program(x, y, [z]), x * 2 + y + z)
    layer = nn.Linear(4, 4)
    for held in (layer.weight, layer.weight.data, layer.bias):
        model = nn.Sequential(layer)
        program = lg.trace(model, (held.expand(4, 4),) if held is layer.bias else (held,), dynamic=False)
        x = torch.randn(4, 4)
        assert torch.equal(program(x), model(x))


class Packed(nn.Module):
    def forward(self, l: Any) -> torch.Tensor:  # noqa: E741 - as short as users' own
        extra = 0 if l["b"][1] is None else l["b"][1]
        return l["a"] * l["n"] + l["b"][0] + extra


def test_what_containers_hold_beside_what_was_traced_is_told(tmp_path: Path) -> None:
    """None of it may be ignored: the model would have used it."""
    given: dict[str, Any] = {"a": X, "b": (X + 1, None), "n": 3}
    program = lg.trace(Packed(), {"l": given})
    wanted = Packed()(given)
    for one in (program, lg.load(program.save(tmp_path / "saved"))):
        assert torch.equal(one(l=given), wanted)
        assert torch.equal(one(l={"n": 3, "b": [X + 1, None], "a": X}), wanted)
        assert torch.equal(one(l_a=X, l_b_0=X + 1), wanted)
        for wrong, text in (
            ({**given, "c": X}, r"holds something at l\['c'\]"),
            ({**given, "b": (X, None, X)}, r"holds something at l\['b'\]\[2\]"),
            ({**given, "b": (X,)}, r"holds nothing at l\['b'\]\[1\]"),
            ({**given, "b": (X, X)}, r"l\['b'\]\[1\] was another[\s\S]*None[\s\S]*a Tensor"),
            ({**given, "n": 4}, r"l\['n'\] was another[\s\S]*3[\s\S]*4"),
            ({**given, "n": X}, r"l\['n'\] was another"),
            (None, r"argument 'l' holds something at l\n"),
            (X, r"argument 'l' holds something at l\n"),
            ([X, X], r"argument 'l' holds something at l\[0\]"),
            ({**given, "a": X.double()}, r"input \"l\['a'\]\" has the wrong dtype"),
            ({**given, "a": X[0]}, r"input \"l\['a'\]\" has the wrong number of dimensions"),
        ):
            with pytest.raises(InputError, match=text):
                one(l=wrong)
        with pytest.raises(InputTypeError, match=r"input \"l\['a'\]\" is not a tensor"):
            one(l={**given, "a": 1.0})
        with pytest.raises(InputError, match=r"input \"l\['a'\]\" is missing[\s\S]*pass l=...; the program takes l"):
            one()
