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


@pytest.mark.parametrize("dynamic", [{"x": 0}, {"x": {0: 5}}, {"x": {7: "b"}}, {"x": {-2: "b"}}, {"x": {"b": 0}}])
def test_dynamic_that_names_no_size_is_named(dynamic: Any) -> None:
    with pytest.raises(InputError, match="which sizes of 'x' may vary"):
        lg.trace(Scaled(), {"x": X}, dynamic=dynamic)


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
