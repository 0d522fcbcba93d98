"""What leans on the inner parts of torch's ExportedProgram, in one place. Checked with torch 2.11 to 2.14."""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputSpec, OutputSpec
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from layergraph.errors import EditError
from layergraph.ir.interface import GraphInput

# torch's tracing state is one for a process, and graphs of one trace share a fake tensor mode and a shape environment,
# through which even a size is turned into text. Whatever traces, edits, reads or writes graphs holds this; replaying
# one does not.
graph_lock = threading.RLock()
_P = ParamSpec("_P")
_R = TypeVar("_R")


def one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, holding :data:`graph_lock`."""

    @functools.wraps(function)
    def held(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with graph_lock:
            return function(*args, **kwargs)

    return held


no_grad: Callable[[], AbstractContextManager[Any]] = torch.no_grad
# As in tracing: without it some ops (baddbmm that broadcasts) find only kernels that want concrete sizes.
as_in_tracing: Callable[[], AbstractContextManager[Any]] = enable_python_dispatcher


def fake_mode_of(graph: torch.fx.Graph) -> FakeTensorMode:
    """The fake tensor mode the graph was traced under (its sizes are symbols of that mode's shape environment)."""
    mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    return mode if mode is not None else FakeTensorMode(allow_non_fake_inputs=True)


def copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy whose nodes have the same names: fx renames those that are called like Python's builtins (``input``)."""
    twin = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, twin.nodes, strict=True):
        new.name = old.name
    return twin


@contextmanager
def no_new_guards(mode: FakeTensorMode) -> Iterator[None]:
    """Within the block, computing on fake tensors may not fix a size that was dynamic.

    Raises:
        EditError: it did.
    """
    shape_env = mode.shape_env
    if shape_env is None:
        yield
        return
    replacements, ranges = dict(shape_env.replacements), dict(shape_env.var_to_range)
    n_guards = len(shape_env.guards)

    def put_back() -> None:
        # Every program traced with this one reads sizes through this environment.
        shape_env.replacements.clear()
        shape_env.replacements.update(replacements)
        shape_env.var_to_range.clear()
        shape_env.var_to_range.update(ranges)
        del shape_env.guards[n_guards:]
        # Sizes remember what they were last replaced with, by these counters.
        shape_env._update_version_counter()
        shape_env._version_counter += 1
        shape_env._replacements_version_counter = getattr(shape_env, "_replacements_version_counter", 0) + 1

    try:
        yield
    except BaseException:
        put_back()
        raise
    found = shape_env.replacements.items()
    fixed = [str(symbol) for symbol, value in found if symbol not in replacements and value.is_number]
    if fixed:
        put_back()
        raise EditError(
            "the inserted op fixes a dynamic size",
            found=", ".join(fixed),
            do="use ops that work for every size (reshape with sizes taken from the graph, no comparison of sizes)",
        )


def fresh_size(mode: FakeTensorMode, size: int, name: str) -> torch.SymInt:
    """A size that may vary, equal to no other; ``size`` is what stands for it in examples.

    Raises:
        EditError: the graph was traced with all sizes fixed.
    """
    if mode.shape_env is None:
        raise EditError("the graph has no dynamic sizes", do="trace with dynamic=True")
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    value = mode.from_tensor(torch.empty(size, device="meta"), symbolic_context=context, source=ConstantSource(name))
    fresh = value.shape[0]
    assert isinstance(fresh, torch.SymInt)
    return fresh


def hint(size: int | torch.SymInt) -> int:
    """The size at which the graph was traced."""
    if isinstance(size, torch.SymInt):
        value = size.node.hint
        return int(value) if value is not None else 2
    return int(size)


def same_value(a: Any, b: Any) -> bool:
    """Whether two fake values have the same dtype, sizes and strides (compared as text: no guards)."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and str((a.shape, a.stride())) == str((b.shape, b.stride()))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(same_value, a, b))
    return str(a) == str(b)


def shape_of(value: torch.Tensor) -> tuple[int | str, ...]:
    """Sizes as ints, or as text for symbolic ones."""

    def one(size: int | torch.SymInt) -> int | str:
        fixed = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else int(size)
        return str(size) if fixed is None else fixed

    return tuple(one(size) for size in value.shape)


_UNBOUNDED = 2**31  # sizes that torch bounds only by what an index can hold


def graph_input(
    name: str, value: torch.Tensor, default: str | None, ranges: Mapping[Any, Any] | None = None
) -> GraphInput:
    """What the interface says of one input; ``ranges`` are the bounds of size symbols."""
    limits = []
    bounds = {str(symbol): bound for symbol, bound in (ranges or {}).items()}
    for dim, size in enumerate(shape_of(value)):
        bound = bounds.get(str(size))
        if bound is None:
            continue
        # torch writes 2 where it only means "not fixed at 1": graphs take sizes of 1 all the same.
        lowest = int(bound.lower) if bound.lower.is_Integer and bound.lower > 2 else 0
        highest = int(bound.upper) if bound.upper.is_Integer else _UNBOUNDED
        if lowest or highest < _UNBOUNDED:
            limits.append((dim, lowest, highest))
    return GraphInput(name, shape_of(value), str(value.dtype).removeprefix("torch."), default, tuple(limits))


def size_conditions(exported: ExportedProgram) -> list[str]:
    """What torch noted about the sizes of inputs while tracing, as Python over ``name.shape[dim]``."""
    noted = getattr(exported, "_guards_code", None) or ()
    plain = (re.sub(r"\btorch\.sym_(max|min)\(", r"\1(", text) for text in noted)  # as torch 2.14 writes them
    return list(dict.fromkeys(re.sub(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", r"\1.shape[\2]", text) for text in plain))


def op_name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=tensor.requires_grad)


def call_specs(input_names: Sequence[str], output_names: Sequence[str]) -> ModuleCallEntry:
    """The root call: keyword tensors in, a dict of tensors out."""
    _, in_spec = pytree.tree_flatten(((), dict.fromkeys(input_names, 0)))
    _, out_spec = pytree.tree_flatten(dict.fromkeys(output_names, 0))
    signature = ModuleCallSignature(
        inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec, forward_arg_names=list(input_names)
    )
    return ModuleCallEntry("", signature)


def build(
    base: ExportedProgram,
    graph: torch.fx.Graph,
    inputs: list[InputSpec],
    outputs: list[OutputSpec],
    state: dict[str, torch.Tensor],
    constants: dict[str, Any],
    *,
    input_names: Sequence[str],
    output_names: Sequence[str],
    examples: Mapping[str, torch.Tensor] | None,
) -> ExportedProgram:
    """A validated ExportedProgram like ``base`` around another graph, signature and state."""
    graph.lint()
    return ExportedProgram(
        root=base.graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=state,
        range_constraints=_ranges(base, graph),
        module_call_graph=[call_specs(input_names, output_names)],
        example_inputs=None if examples is None else ((), {name: examples[name] for name in input_names}),
        constants=constants,
        verifiers=base.verifiers,
    )


def _ranges(base: ExportedProgram, graph: torch.fx.Graph) -> dict[Any, Any]:
    """The bounds of every size symbol: those of ``base``, and of sizes that inputs added since have brought."""
    ranges = dict(base.range_constraints)
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                known = size.node.shape_env.var_to_range
                ranges.update({s: known[s] for s in size.node.expr.free_symbols if s not in ranges and s in known})
    return ranges


def with_own_graph(exported: ExportedProgram) -> ExportedProgram:
    """The same program with a graph of its own, which may be written to; subgraphs and tensors are shared."""
    other = copy.copy(exported)
    other._graph_module = torch.fx.GraphModule(exported.graph_module, copy_graph(exported.graph))
    other._graph_module.meta.update(exported.graph_module.meta)
    return other


def on_device(exported: ExportedProgram, device: torch.device | str) -> ExportedProgram:
    """A copy whose graph (factory calls, values, subgraphs), constants and examples are on ``device``.

    The state is taken as it is. Examples of the meta device become zeros when they leave it.
    """
    target = torch.device(device)
    other = with_own_graph(exported)
    _graph_on_device(other.graph_module, target)
    other._constants = {name: to_device(value, target) for name, value in exported.constants.items()}
    if exported.example_inputs is not None:
        other._example_inputs = pytree.tree_map_only(
            torch.Tensor, lambda value: to_device(value, target), exported.example_inputs
        )
    return other


def _graph_on_device(owner: torch.fx.GraphModule, target: torch.device) -> None:
    for name, child in list(owner.named_children()):
        if isinstance(child, torch.fx.GraphModule):
            twin = torch.fx.GraphModule(child, copy_graph(child.graph))
            twin.meta.update(child.meta)
            _graph_on_device(twin, target)
            setattr(owner, name, twin)
    for node in owner.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": target}
        node.args = tuple(target if isinstance(arg, torch.device) else arg for arg in node.args)
        if str(node.target) == "wrap_with_autocast" and target.type != "meta":  # which has no autocast
            node.args = (target.type, *node.args[1:])
        node.meta["val"] = pytree.tree_map_only(torch.Tensor, lambda value: value.to(target), node.meta.get("val"))
    owner.recompile()


def to_device(value: Any, target: torch.device) -> Any:
    """A tensor there, zeros if it had no data; a parameter stays one, of the same kind. Anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device == target:
        return value
    there = value.detach()
    there = torch.zeros_like(there, device=target) if value.is_meta else there.to(target)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(there, requires_grad=value.requires_grad)
    return there.requires_grad_(value.requires_grad)


def with_state(
    exported: ExportedProgram,
    state: dict[str, torch.Tensor],
    *,
    constants: dict[str, Any] | None = None,
    examples: Mapping[str, torch.Tensor] | None = None,
) -> ExportedProgram:
    """The same program, graph and all, over other tensors. Shallow: graphs are never edited in place."""
    other = copy.copy(exported)
    other._state_dict = state
    if constants is not None:
        other._constants = constants
    if examples is not None:
        other._example_inputs = ((), dict(examples))
    return other


__all__ = [
    "as_in_tracing",
    "as_parameter",
    "build",
    "call_specs",
    "copy_graph",
    "fake_mode_of",
    "fresh_size",
    "graph_input",
    "graph_lock",
    "hint",
    "no_grad",
    "no_new_guards",
    "on_device",
    "one_at_a_time",
    "op_name",
    "same_value",
    "shape_of",
    "size_conditions",
    "to_device",
    "with_own_graph",
    "with_state",
]
