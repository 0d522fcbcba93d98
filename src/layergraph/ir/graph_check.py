"""A saved graph is data until this says so: looked through before torch reads it.

Reading a graph is not harmless in itself. torch evaluates its size expressions as Python (``sympify``), looks its ops
up by dotted name, pastes names of nodes into source code that it compiles, and executes its guards once
``exported.module()`` is asked for. A folder from elsewhere must not get to choose what runs there, so every text that
goes one of these ways has to be of the few forms that saving writes.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._export.serde import serialize as serde

from layergraph.errors import FormatError

_NUMBERS = {
    "Symbol",
    "Integer",
    "Float",
    "Rational",
    "Add",
    "Mul",
    "Pow",
    "Mod",
    "Max",
    "Min",
    "Abs",
    "floor",
    "ceiling",
}
_NUMBERS |= {
    "oo",
    "int_oo",
    "Half",
    "One",
    "Zero",
    "NegativeOne",
    "Infinity",
    "NegativeInfinity",
    "NegativeIntInfinity",
}
_TRUTHS = {"Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan"}
_TRUTHS |= {"StrictGreaterThan", "And", "Or", "Not", "true", "false", "Piecewise", "ExprCondPair", "IntInfinity"}
_TORCH = {"FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv"}
_TORCH |= {"LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt"}
_TORCH |= {"RoundToInt", "RoundDecimal", "ToFloat", "Identity", "IsNonOverlappingAndDenseIndicator"}
_EXPRESSION = _NUMBERS | _TRUTHS | _TORCH
_ASSUMPTIONS = {"positive", "integer", "nonnegative", "negative", "real", "precision", "evaluate"}
_GUARD = {"L", "math", "max", "min", "Max", "Min", "abs", "int", "float", "bool", "and_", "or_", "not_"} | _EXPRESSION
_GUARD |= {"torch"}  # torch 2.14 writes torch.sym_max where it wrote max; no attribute but those below is let through
_METHODS = {"size", "stride", "storage_offset", "shape", "dim", "ndim", "numel", "floor", "ceil", "trunc", "sqrt"}
_METHODS |= {"isnan", "inf", "item", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_int", "sym_float"}
_SYNTAX = (
    ast.Expression,
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.keyword,
    ast.Tuple,
    ast.List,
    ast.UnaryOp,
    ast.unaryop,
    ast.BinOp,
    ast.operator,
    ast.BoolOp,
    ast.boolop,
    ast.Compare,
    ast.cmpop,
)
_CONTAINERS = ("builtins.tuple", "builtins.list", "builtins.dict", None)
# Functions of torch's own that stand in graphs beside ops: autocast, gradients, and what vmap leaves behind.
_FUNCTIONS = {
    "torch.sym_sum",
    "torch._C._set_grad_enabled",
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    "torch.fx.experimental.symbolic_shapes.cast_symbool_to_symint_guardless",
    "torch._functorch.predispatch._add_batch_dim",
    "torch._functorch.predispatch._remove_batch_dim",
    "torch._functorch.predispatch._vmap_increment_nesting",
    "torch._functorch.predispatch._vmap_decrement_nesting",
    "torch._functorch.predispatch.lazy_load_decompositions",
}
# Registered, and yet no part of any model: opens (and makes) a file by name.
_NOT_OPS = ("torch.ops.aten.from_file.",)
# Keys under which torch's schema holds a text that becomes something else than data.
_NAMES = ("name", "as_name", "user_input_name")
_OPERATORS = ("target", "as_operator")


def check_graph(data: bytes, name: str) -> Any:
    """The JSON of a graph, parsed, when all it holds is of a form that saving writes.

    Raises:
        FormatError: it is no JSON, or holds a text that torch would run as code.
    """
    try:
        graph = json.loads(data)
        for key, text in _texts(graph, ""):
            _check(key, text, name)
    except (ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"the graph {name!r} cannot be read",
            found=f"{type(error).__name__}: {error}"[:300],
            do="copy the folder again, or save again",
        ) from error
    return graph


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for inner, child in value.items():
            yield from _texts(child, inner)
    elif isinstance(value, list):
        for child in value:
            yield from _texts(child, key)
    elif isinstance(value, str):
        yield key, value


def _check(key: str, text: str, graph: str) -> None:
    what = ""
    if key in _NAMES:
        what = "" if text == "" or text.isidentifier() else "a name that is none"
    elif key in _OPERATORS:
        what = "" if is_operator(text) else "an op that is not registered with torch"
    elif key == "expr_str":
        what = "" if _is_plain(text, _is_size) else "a size that is no arithmetic"
    elif key == "guards_code":
        what = "" if _is_plain(text, _is_guard) else "a condition that is no arithmetic on sizes"
    elif key in ("in_spec", "out_spec"):
        what = "" if _is_spec(text) else "arguments of an unknown kind"
    if what:
        raise FormatError(
            f"the graph {graph!r} holds {what}",
            found=repr(text)[:200],
            do="import the library that registers the op before loading"
            if key in _OPERATORS
            else "do not use this folder: it is damaged, or made to run code; save again from the model",
            shell="name the library that registers the op: --import MODULE" if key in _OPERATORS else None,
        )


def is_operator(text: str) -> bool:
    """Whether a text names what a graph may call: an op registered with torch, or arithmetic on sizes."""
    if text.startswith(_NOT_OPS):
        return False
    if text in _FUNCTIONS or text in _arithmetic():
        return True
    if not text.startswith("torch.ops."):
        return False
    found: Any = torch.ops
    try:
        for part in text.removeprefix("torch.ops.").split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        return False
    return isinstance(found, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))


def _arithmetic() -> set[str]:
    return {f"{op.__module__}.{op.__name__}" for op in serde._SYM_OPS} | {"_operator.getitem"}


def _is_plain(text: str, is_allowed: Callable[[ast.AST], bool]) -> bool:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return False
    return all(is_allowed(node) for node in ast.walk(tree))


def _is_size(node: ast.AST) -> bool:
    """As ``sympy.srepr`` writes expressions; texts are the names of symbols and nothing else."""
    if isinstance(node, ast.Call):
        is_symbol = isinstance(node.func, ast.Name) and node.func.id in ("Symbol", "Float")
        texts = [arg for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        return isinstance(node.func, ast.Name) and (is_symbol or not texts)
    if isinstance(node, ast.Name):
        return node.id in _EXPRESSION or _is_symbol(node.id)
    if isinstance(node, ast.keyword):
        return node.arg in _ASSUMPTIONS
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str) or _is_symbol(node.value) or _is_number(node.value)
    return isinstance(node, _SYNTAX)


def _is_guard(node: ast.AST) -> bool:
    """As torch writes guards: ``L['x'].size()[1] == 3``."""
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS
    if isinstance(node, ast.Call):
        return isinstance(node.func, (ast.Name, ast.Attribute))
    if isinstance(node, ast.Name):
        return node.id in _GUARD
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str) or node.value.isidentifier()
    return isinstance(node, (*_SYNTAX, ast.Subscript)) and not isinstance(node, ast.keyword)


def _is_symbol(text: str) -> bool:
    """``s77``, ``u0``, ``zuf1``: letters, then digits; never a name that Python or sympy knows."""
    return text.rstrip("0123456789").isalpha() and text[-1:].isdigit() and text.isascii()


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("e", "", 1).lstrip("+-").replace("-", "", 1).isdigit()


def _is_spec(text: str) -> bool:
    """Tuples, lists and dicts by text: torch would import whatever other containers name."""
    if not text:
        return True
    _, spec = json.loads(text)
    stack = [spec]
    while stack:
        item = stack.pop()
        if not isinstance(item, dict) or item.get("type") not in _CONTAINERS:
            return False
        context = json.loads(item["context"]) if item.get("context") is not None else None
        if context is not None and not (isinstance(context, list) and all(isinstance(key, str) for key in context)):
            return False
        stack.extend(item.get("children_spec", ()))
    return True


__all__ = ["check_graph", "is_operator"]
