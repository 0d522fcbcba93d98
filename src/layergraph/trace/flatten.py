"""Between a model's arguments and return value, and the flat named tensors of a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from layergraph.errors import InputError, InputTypeError, TraceError
from layergraph.ir.interface import Leaf, flat_name
from layergraph.ir.template import Template
from layergraph.trace.marks import qualified

_BAKED_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class FlatInputs:
    """A call's arguments, flat.

    Attributes:
        tensors: by flat name, in call order. A tensor inside a container is ``argument_0``, ``argument_key``...
        baked: arguments that hold no tensor; their values become part of the graph.
        containers: of arguments that hold tensors inside of something: what stands where, see :class:`Interface`.
        rebuild: from flat tensors back to keyword arguments.
    """

    tensors: Mapping[str, torch.Tensor]
    baked: Mapping[str, Any]
    containers: Mapping[str, tuple[Leaf, ...]]
    rebuild: Callable[[Mapping[str, torch.Tensor]], dict[str, Any]]


def forward_arguments(model: nn.Module) -> tuple[str, ...]:
    """Names of forward's arguments in order, ``*args`` and ``**kwargs`` left out."""
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in fixed)


def plain_defaults(model: nn.Module) -> dict[str, Any]:
    """Arguments of forward that are something other than None when they are not given, as far as that is plain."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not None and isinstance(parameter.default, _BAKED_TYPES)
    }


def bind_example(model: nn.Module, example: Any) -> dict[str, Any]:
    """Example inputs (a mapping, a tuple of positional arguments, or one tensor) as keyword arguments.

    Raises:
        InputTypeError: none of these.
        InputError: forward does not take them.
    """
    if isinstance(example, torch.Tensor):
        example = (example,)
    if isinstance(example, Mapping):
        args: tuple[Any, ...] = ()
        kwargs = dict(example)
    elif isinstance(example, (tuple, list)):
        args, kwargs = tuple(example), {}
    else:
        raise InputTypeError(
            "example_inputs is neither a mapping, a tuple nor a tensor",
            found=type(example).__name__,
            do="pass the keyword arguments of forward as a dict",
        )
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(model).__name__}.forward does not take these example inputs",
            expected=str(signature),
            found=str(error),
            do="name the arguments as forward does",
        ) from error
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise InputError(
                f"{type(model).__name__}.forward takes *{name}, which a graph cannot",
                do="wrap the model in a module whose forward names its arguments",
            )
        arguments.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return arguments


def flatten_inputs(arguments: Mapping[str, Any]) -> FlatInputs:
    """Split arguments into flat tensors and baked values.

    Raises:
        InputError: a value inside is neither a tensor nor plain data.
    """
    tensors: dict[str, torch.Tensor] = {}
    baked: dict[str, Any] = {}
    containers: dict[str, tuple[Leaf, ...]] = {}
    seen: set[int] = set()
    plans: dict[str, tuple[list[tuple[str | None, Any]], Any]] = {}
    for name, value in arguments.items():
        leaves, spec = pytree.tree_flatten_with_path(value)
        plan: list[tuple[str | None, Any]] = []
        for keys, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                flat = flat_name(name, keys)
                if flat in tensors:
                    raise InputError(
                        f"two tensors of the example inputs would both be called {flat!r}",
                        do="give the arguments (or the keys inside them) names that stay apart when joined by _",
                    )
                # torch makes one of a tensor that it meets twice, as two inputs or as an input and a weight.
                again = leaf.detach().clone() if id(leaf) in seen else leaf.detach()
                tensors[flat] = again.requires_grad_(leaf.requires_grad)
                seen.add(id(leaf))
                plan.append((flat, None))
            elif isinstance(leaf, _BAKED_TYPES):
                plan.append((None, leaf))
            else:
                raise InputError(
                    f"argument {name!r} holds a {type(leaf).__name__}, which a graph cannot take",
                    do="leave it out, or pass tensors and plain values only",
                )
        plans[name] = (plan, spec)
        if not any(flat for flat, _ in plan):
            baked[name] = value
        elif not isinstance(value, torch.Tensor):
            places = [pytree.keystr(keys) for keys, _ in leaves]
            containers[name] = tuple((place, *item) for place, item in zip(places, plan, strict=True))

    def rebuild(flat_tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {
            name: pytree.tree_unflatten([flat_tensors[flat] if flat else leaf for flat, leaf in plan], spec)
            for name, (plan, spec) in plans.items()
        }

    return FlatInputs(tensors, baked, containers, rebuild)


def flatten_output(value: Any, name: str = "") -> tuple[Template, dict[str, torch.Tensor]]:
    """The return value as a template, and its tensors by flat name (``logits``, ``hidden_states.3``, ``output``).

    Raises:
        TraceError: it holds something that is neither a tensor, a container of them, nor plain data.
    """
    tensors: dict[str, torch.Tensor] = {}

    def walk(item: Any, path: str) -> Template:
        if isinstance(item, torch.Tensor):
            flat = path or "output"
            if flat in tensors:
                raise TraceError(
                    f"the model returns two tensors that would both be called {flat!r}",
                    do="give the keys of what it returns names that stay apart when joined by dots",
                )
            tensors[flat] = item
            return {"$": flat}
        if item is None or hasattr(item, "get_seq_length"):
            return None  # caches do not come out of an uncached graph
        if isinstance(item, (bool, int, float, str)):
            return {"const": item}
        if isinstance(item, Mapping):
            fields = {str(key): walk(child, _join(path, str(key))) for key, child in item.items()}
            if hasattr(item, "to_tuple"):
                declared = getattr(type(item), "__dataclass_fields__", {})
                fields = {**{key: None for key in declared if key not in fields}, **fields}
                order = [*declared, *(key for key in fields if key not in declared)]
                return {"class": qualified(type(item)), "fields": {key: fields[key] for key in order}}
            return {"dict": fields}
        if isinstance(item, (tuple, list)):
            kind = "list" if isinstance(item, list) else "tuple"
            return {kind: [walk(child, _join(path, str(i))) for i, child in enumerate(item)]}
        raise TraceError(
            f"the model returns a {type(item).__name__}, which a graph cannot",
            path=path,
            do="return tensors, tuples, dicts or ModelOutputs",
        )

    return walk(value, name), tensors


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


__all__ = ["FlatInputs", "bind_example", "flatten_inputs", "flatten_output", "forward_arguments", "plain_defaults"]
