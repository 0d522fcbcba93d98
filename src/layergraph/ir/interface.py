"""How a graph's flat inputs and outputs stand for the model's own arguments and return value.

Graphs take flat tensors by keyword and return flat tensors by name. An :class:`Interface` holds the names, the
defaults the model itself would have used, and a *template*: the shape of the model's return value as plain data,
with names of graph outputs at its leaves. Everything here serialises to JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from layergraph.errors import InputError, InputTypeError
from layergraph.ir.template import Template, drop_from_template, place_in_template

Leaf = tuple[str, str | None, Any]
"""One thing inside an argument: where (``[0]['mask']``), the input it is, or None and the plain value it was."""


@dataclass(frozen=True)
class GraphInput:
    """One tensor the graph takes.

    Attributes:
        name: keyword of the graph.
        shape: per dimension an int, the name of a symbol (equal names are equal sizes), or a multiple (``4*images``).
        dtype: as torch prints it, without the prefix (``int64``).
        default: what the model does when it is not given: ``ones_like:X`` or ``zeros_like:X`` for another input
            ``X``, or None when it is required.
        limits: ``(dimension, lowest, highest)`` where the graph only holds within bounds.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    default: str | None = None
    limits: tuple[tuple[int, int, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        limits = [list(limit) for limit in self.limits]
        shape = list(self.shape)
        return {"name": self.name, "shape": shape, "dtype": self.dtype, "default": self.default, "limits": limits}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GraphInput:
        limits = tuple(tuple(limit) for limit in data["limits"])
        return cls(data["name"], tuple(data["shape"]), data["dtype"], data["default"], limits)


@dataclass(frozen=True)
class Interface:
    """What goes in and comes out of one graph, by name.

    Attributes:
        arguments: argument names of the model's forward, in its order (for positional calls).
        inputs: the tensors the graph takes, in graph order.
        outputs: names of the graph's outputs, in graph order.
        template: the return value, see :data:`Template`.
        baked: arguments that were given at trace time and are not tensors: their values are part of the graph.
        containers: arguments that hold tensors inside of lists, mappings and the like -> what stands where.
        prologue: ``{"name", "version", "params"}`` of the host code that makes the graph's inputs from the
            model's own, or None.
        conditions: what must hold of the sizes for the graph to be right (``(ids.shape[1] + 63) // 64 == 2`` where
            the model loops over chunks of text), as Python over inputs by name.
    """

    arguments: tuple[str, ...]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[str, ...]
    template: Template
    baked: Mapping[str, Any] = field(default_factory=dict)
    prologue: Mapping[str, Any] | None = None
    conditions: tuple[str, ...] = ()
    containers: Mapping[str, tuple[Leaf, ...]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "arguments": list(self.arguments),
            "inputs": [item.to_dict() for item in self.inputs],
            "outputs": list(self.outputs),
            "template": self.template,
            "baked": dict(self.baked),
            "prologue": self.prologue,
            "conditions": list(self.conditions),
            "containers": {name: [list(leaf) for leaf in leaves] for name, leaves in self.containers.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Interface:
        return cls(
            arguments=tuple(data["arguments"]),
            inputs=tuple(GraphInput.from_dict(item) for item in data["inputs"]),
            outputs=tuple(data["outputs"]),
            template=data["template"],
            baked=data["baked"],
            prologue=data["prologue"],
            conditions=tuple(data.get("conditions", ())),
            containers={name: tuple(map(tuple, leaves)) for name, leaves in data.get("containers", {}).items()},
        )

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.inputs)

    def with_output(self, name: str, place: tuple[str | int, ...], length: int = 0) -> Interface:
        """The same interface with one more output, standing at ``place`` in the return value.

        ``place`` is a field name, or a field name and an index into a tuple of ``length`` entries (others None).
        """
        template = place_in_template(self.template, place, {"$": name}, length)
        return replace(self, outputs=(*self.outputs, name), template=template)

    def without_output(self, name: str) -> Interface:
        template = drop_from_template(self.template, name)
        return replace(self, outputs=tuple(item for item in self.outputs if item != name), template=template)

    def unpack(self, name: str, value: Any) -> dict[str, Any]:
        """The inputs inside one argument that is a container.

        Raises:
            InputError: it holds other things than when it was traced: they would be ignored in silence.
        """
        expected = {place: (flat, plain) for place, flat, plain in self.containers[name]}
        given = {pytree.keystr(keys): leaf for keys, leaf in pytree.tree_flatten_with_path(value)[0]}

        def fail(what: str, wanted: str, found: str) -> InputError:
            do = "give what was given at trace time, or trace again with this among the example_inputs"
            return InputError(what, expected=wanted, found=found, do=do)

        if given.keys() != expected.keys():
            more = [place for place in (*given, *expected) if (place in given) != (place in expected)]
            verb = "holds something at" if more[0] in given else "holds nothing at"
            shape = ", ".join(name + place for place in expected)
            raise fail(f"argument {name!r} {verb} {name}{more[0]}", shape, ", ".join(name + place for place in given))
        inputs = {}
        for place, (flat, plain) in expected.items():
            leaf = given[place]
            if flat is not None:
                inputs[flat] = leaf
            elif not (_is_plain(leaf) and (leaf == plain or repr(leaf) == repr(plain))):  # nan is not equal to nan
                found = repr(leaf) if _is_plain(leaf) else f"a {type(leaf).__name__}"
                raise fail(f"{name}{place} was another when the model was traced", repr(plain), found)
        return inputs

    @cached_property
    def _places(self) -> dict[str, str]:
        """For inputs inside of containers, what a caller would write."""
        return {flat: name + place for name, leaves in self.containers.items() for place, flat, _ in leaves if flat}

    def _argument(self, flat: str) -> str:
        """The argument that an input is given by."""
        return next((name for name in self.containers if self._places.get(flat, "").startswith(f"{name}[")), flat)

    @property
    def _taken(self) -> str:
        return ", ".join(dict.fromkeys(map(self._argument, self.input_names)))

    def check(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Flat tensors in graph order, defaults filled in.

        Raises:
            InputError: a name is unknown, missing, or a tensor has another rank, dtype or size than traced.
            InputTypeError: a value is not a tensor.
        """
        names = self.input_names
        unknown = [name for name in given if name not in names]
        if unknown:
            raise InputError(
                f"the program has no input {', '.join(map(repr, unknown))}",
                expected=self._taken,
                do="leave it out, or trace again with example_inputs that hold it",
            )
        tensors: dict[str, torch.Tensor] = {}
        sizes: dict[str, tuple[int, str]] = {}
        for item in self.inputs:
            value = given.get(item.name)
            if value is None:
                value = self._default(item, tensors, given)
            _check_tensor(item, value, sizes, self._places.get(item.name, item.name))
            tensors[item.name] = value
        if broken := [text for text in self.conditions if not holds(text, tensors)]:
            raise wrong_sizes(broken, tensors)
        return tensors

    def _default(self, item: GraphInput, done: Mapping[str, Any], given: Mapping[str, Any]) -> torch.Tensor:
        kind, _, source = (item.default or "").partition(":")
        like = done.get(source, given.get(source))
        if not isinstance(like, torch.Tensor):
            raise InputError(
                f"input {self._places.get(item.name, item.name)!r} is missing",
                expected=f"{item.dtype}[{', '.join(map(str, item.shape))}]",
                do=f"pass {self._argument(item.name)}=...; the program takes {self._taken}",
            )
        make = torch.ones if kind == "ones_like" else torch.zeros
        return make(like.shape[: len(item.shape)], dtype=getattr(torch, item.dtype), device=like.device)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


_SIZE = re.compile(r"(\w+)\.shape\[(\d+)\]")
_ARITHMETIC = re.compile(r"(?:[\d\s()+\-*/%<>=!,]|max|min|or|and)+")


def holds(condition: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a condition on sizes is met; one that cannot be worked out is."""
    text = _SIZE.sub(lambda found: str(tensors[found[1]].shape[int(found[2])]), condition)
    if "**" in text or not _ARITHMETIC.fullmatch(text):
        return True
    try:
        # Only digits and operators, as the pattern above says.
        return bool(eval(text, {"__builtins__": {}}, {"max": max, "min": min}))
    except (ArithmeticError, SyntaxError, TypeError, ValueError):
        return True


def inputs_of(condition: str) -> tuple[str, ...]:
    """The inputs whose sizes a condition speaks of."""
    return tuple(dict.fromkeys(name for name, _ in _SIZE.findall(condition)))


def with_names(condition: str, names: Mapping[str, str]) -> str:
    """The same condition over inputs of other names."""
    return _SIZE.sub(lambda found: f"{names[found[1]]}.shape[{found[2]}]", condition)


def wrong_sizes(broken: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> InputError:
    """The error for sizes that break conditions under which the graph was traced."""
    told = {name for text in broken for name in inputs_of(text)}
    return InputError(
        "the graph does not take inputs of these sizes",
        expected="; ".join(sorted(broken, key=len)[:2]),
        found=", ".join(f"{name} {list(tensors[name].shape)}" for name in tensors if name in told),
        do="use sizes that meet the condition, or trace again with example_inputs of such sizes",
    )


def flat_name(argument: str, keys: Sequence[Any]) -> str:
    """Name of a tensor inside an argument: ``pair_0``, ``batch_pixels``."""
    texts = (str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in keys)
    return re.sub(r"\W", "_", "_".join([argument, *texts]))


def _check_tensor(item: GraphInput, value: Any, sizes: dict[str, tuple[int, str]], name: str) -> None:
    expected = f"{item.dtype}[{', '.join(map(str, item.shape))}]"
    if not isinstance(value, torch.Tensor):
        raise InputTypeError(
            f"input {name!r} is not a tensor", expected=expected, found=type(value).__name__, do="pass a tensor"
        )
    found = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.dim() != len(item.shape):
        raise InputError(
            f"input {name!r} has the wrong number of dimensions", expected=expected, found=found, do="reshape it"
        )
    if str(value.dtype) != f"torch.{item.dtype}":
        raise InputError(
            f"input {name!r} has the wrong dtype",
            expected=expected,
            found=found,
            do=f"convert it with .to(torch.{item.dtype})",
        )
    for size, want in zip(value.shape, item.shape, strict=True):
        if isinstance(want, int):
            if size != want:
                raise InputError(
                    f"input {name!r} has a size that the graph fixes otherwise",
                    expected=expected,
                    found=found,
                    do="use that size, or trace again with this one",
                )
            continue
        factor, _, label = want.rpartition("*")
        if factor.isdigit() and label.isidentifier():
            if size % int(factor):
                raise InputError(
                    f"input {name!r} has a size that is no multiple of {factor}",
                    expected=expected,
                    found=found,
                    do="pad it, or pass whole groups",
                )
            size, want = size // int(factor), label
        first, owner = sizes.setdefault(want, (size, name))
        if first != size:
            raise InputError(
                f"inputs {owner!r} and {name!r} disagree on {want}",
                expected=f"{want} = {first} as in {owner}",
                found=found,
                do="give both the same size there",
            )
    for dim, lowest, highest in item.limits:
        if not lowest <= value.shape[dim] <= highest:
            raise InputError(
                f"input {name!r} has a size outside of what the graph was traced for",
                expected=f"{lowest} to {highest} in dimension {dim}",
                found=found,
                do="stay within it, or trace again with example_inputs of such a size",
            )


__all__ = [
    "GraphInput",
    "Interface",
    "Leaf",
    "flat_name",
    "holds",
    "inputs_of",
    "with_names",
    "wrong_sizes",
]
