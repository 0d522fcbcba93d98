"""Model -> Program: export a private copy, with every module call recorded, flat tensors in and out."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from layergraph.errors import InputError, LayerGraphError, NotSupportedError, TraceError
from layergraph.ir import exported as torch_side
from layergraph.ir.interface import GraphInput, Interface
from layergraph.ir.layers import LayerIndex
from layergraph.ir.program import GraphUnit, ModelInfo, Program
from layergraph.ir.template import Template
from layergraph.ir.weights import WeightMap
from layergraph.trace.conditions import conditions
from layergraph.trace.flatten import (
    bind_example,
    flatten_inputs,
    flatten_output,
    forward_arguments,
    plain_defaults,
)
from layergraph.trace.hf_request import NEEDS_PYTHON
from layergraph.trace.isolate import isolate
from layergraph.trace.marks import Recorder, qualified
from layergraph.trace.peft_model import is_peft_model, unwrap_adapters
from layergraph.trace.sizes import size_labels

Progress = Callable[[str], None]


def trace(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    dynamic: bool | Mapping[str, Mapping[int, str]] = True,
    training: bool = False,
    cached: bool | None = None,
    progress: Progress | None = None,
) -> Program:
    """The program of ``model``, untouched by any pass. The model is not changed, weights are shared with it.

    Args:
        model: any ``nn.Module``; Hugging Face models need no example inputs. A PeftModel is traced with the adapters
            that are active, its inputs being the base model's.
        example_inputs: keyword arguments of forward as a mapping, positional ones as a tuple, or one tensor.
        dynamic: True finds out which sizes may vary (batch and sequence, patches and images for vision towers);
            False fixes all; a mapping names them: ``{"input_ids": {0: "batch", 1: "sequence"}}``.
        training: keep dropout alive and gradients flowing, over copies of the weights.
        cached: whether to trace the cached graph of a decoder too; None where the model has one and nothing about
            the trace is special.
        progress: called with a line of text at each stage.

    Raises:
        TraceError: the model cannot be exported; names the module and torch's reason.
        InputError, InputTypeError, NotSupportedError: see :func:`isolate` and :func:`bind_example`.
    """
    say = progress or (lambda text: None)
    if is_peft_model(model):
        model = unwrap_adapters(model)
    with torch_side.graph_lock:
        say(f"copying the modules of {type(model).__name__}")
        twin = isolate(model, training=training)
        hf = _hugging_face(twin)
        if example_inputs is not None:
            arguments = bind_example(twin, example_inputs)
        elif hf is not None:
            arguments = hf.example_inputs(twin)
        else:
            raise InputError(
                f"{type(model).__name__} is not a Hugging Face model, so its inputs are not known",
                do="pass example_inputs={'x': tensor, ...}",
                shell=NEEDS_PYTHON,
            )
        prologue = hf.prologue(twin, arguments) if hf is not None else None
        prepared = prologue(dict(arguments)) if prologue is not None else arguments
        flat = flatten_inputs(prepared)
        if not flat.tensors:
            raise InputError("example_inputs hold no tensor", do="pass the tensors that forward takes")
        if example_inputs is not None:
            _try_eager(model, arguments, hf)
        labels = size_labels(twin, flat, prepared, dynamic, hf)
        shapes = {
            name: dict.fromkeys(labels.get(name, range(tensor.dim()) if dynamic is True else ()), Dim.AUTO)
            for name, tensor in flat.tensors.items()
        }
        say("tracing")
        forward = twin.forward
        exported, template, layers = _export(
            twin, flat.tensors, shapes, lambda tensors: forward(**flat.rebuild(tensors)), labels, hf, training=training
        )
        interface = Interface(
            arguments=forward_arguments(model),
            inputs=tuple(_graph_inputs(exported, flat.tensors, labels, hf)),
            outputs=tuple(_names(template)),
            template=template,
            baked={
                **{name: value for name, value in plain_defaults(model).items() if name not in arguments},
                **{name: value for name, value in flat.baked.items() if name in arguments},
            },
            containers=flat.containers,
            prologue=prologue.to_dict() if prologue is not None else None,
            conditions=conditions(exported),
        )
        info = ModelInfo(qualified(type(model)), training=training)
        if hf is not None:
            info = hf.model_info(twin, model, training)
        units = {"forward": GraphUnit(exported, interface, layers)}
        if cached is not False and hf is not None:
            say("tracing with a cache")
            step, reason = _trace_step(twin, cached, training or example_inputs is not None or dynamic is not True, hf)
            if step is not None:
                shared = torch_side.with_state(step.exported, exported.state_dict)
                units["step"] = replace(step, exported=shared)
            info = replace(info, uncached_because=reason)
        if hf is not None and (found := hf.returned(twin, prepared, layers)):
            units = {name: replace(unit, layers=replace(unit.layers, returned=found)) for name, unit in units.items()}
        say(f"traced {sum(len(unit.nodes) for unit in units.values())} nodes")
        return Program(units, WeightMap(), info, aliases=_aliases(exported))


def _trace_step(twin: nn.Module, wanted: bool | None, is_special: bool, hf: Any) -> tuple[GraphUnit | None, str | None]:
    """The cached graph, or None and the reason why there is none.

    Raises:
        NotSupportedError, TraceError: it was asked for in so many words (``cached=True``) and cannot be had.
    """
    if not hf.can_cache(twin):
        reason = f"{type(twin).__name__} does not generate text from token ids alone"
        if wanted:
            raise NotSupportedError("there is no cached graph of this model", found=reason, do="leave cached out")
        return None, reason
    if is_special and not wanted:
        return None, "traced for training, or with example inputs or sizes of the caller's own"
    try:
        return _cached_unit(twin, hf.plan_cached(twin), hf), None
    except LayerGraphError as error:
        if wanted:
            raise
        return None, f"{error.what}: {error.found}" if error.found else error.what


def trace_cached(module: nn.Module, *, half: str, embeddings: str, width: int) -> GraphUnit:
    """The cached graph of a decoder alone, for its graph to be spliced into another.

    Args:
        half, embeddings, width: see :func:`layergraph.trace.cached.plan_cached`.

    Raises:
        NotSupportedError: it keeps what cached graphs do not hold. TraceError: it cannot be exported.
    """
    from layergraph.trace import hf

    with torch_side.graph_lock:
        twin = isolate(module)
        return _cached_unit(twin, hf.plan_cached(twin, half=half, embeddings=embeddings, width=width), hf)


def _cached_unit(twin: nn.Module, plan: Any, hf: Any) -> GraphUnit:
    shapes = {name: dict.fromkeys(plan.dims[name], Dim.AUTO) for name in plan.tensors}
    exported, template, layers = _export(twin, plan.tensors, shapes, plan.call, plan.dims, hf, training=False)
    interface = Interface(
        arguments=tuple(plan.tensors),
        inputs=tuple(_graph_inputs(exported, plan.tensors, plan.dims, None)),
        outputs=tuple(_names(template)),
        template=template,
        conditions=conditions(exported),
    )
    hf.refuse_fixed(plan, exported, interface.conditions)
    return GraphUnit(exported, interface, layers, cache=plan.geometry)


def _try_eager(model: nn.Module, arguments: Mapping[str, Any], hf: Any) -> None:
    """Run a copy of the model once on example inputs of the caller's: fake tensors miss wrong dtypes, eager does not.

    Raises:
        TraceError: the model itself fails on them.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    if any(tensor.device.type == "meta" for tensor in (*tensors, *model.parameters())):
        return
    copies = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, dict(arguments))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            twin = isolate(model)
            if hf is not None:
                hf.set_flags(twin)  # as it is traced: some models fail with the cache that they make by default
            twin(**copies)
    except LayerGraphError:
        raise
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} itself fails on these example inputs",
            expected="inputs that its forward takes",
            found=shorten(error),
            do="check their shapes and dtypes",
        ) from error


def _hugging_face(model: nn.Module) -> Any:
    """The module of Hugging Face knowledge if the model is one of its models, else None."""
    if not any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__):
        return None
    from layergraph.trace import hf

    return hf


def _export(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Any],
    call: Callable[[Mapping[str, torch.Tensor]], Any],
    labels: Mapping[str, Mapping[int, str]],
    hf: Any,
    *,
    training: bool,
) -> tuple[ExportedProgram, Template, LayerIndex]:
    """Export ``call`` (which runs ``model``) as a graph from flat tensors to a dict of tensors.

    Sizes of the same label are one symbol from the start: torch would find out later, in its own passes, and change
    what our graph's values say.
    """
    recorder = Recorder()
    found: dict[str, Any] = {}
    forward = model.forward

    def flat_forward(**given: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes: dict[str, Any] = {}
        for name, dims in labels.items():
            for dim, label in dims.items():
                size = given[name].shape[dim]
                torch._check(sizes.setdefault(label, size) == size)
        found["template"], outputs = flatten_output(call(given))
        if not outputs:
            raise TraceError(f"{type(model).__name__} returns no tensor", do="check the example inputs")
        return outputs

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in tensors]
    flat_forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    model.forward = flat_forward  # the copy's own attribute: nobody else sees it
    try:
        with ExitStack() as stack:
            stack.enter_context(hf.context(model) if hf is not None else nullcontext())
            stack.enter_context(recorder.watch(model))
            stack.enter_context(_quiet())
            if not training:
                stack.enter_context(torch.no_grad())
            exported = torch.export.export(model, (), dict(tensors), dynamic_shapes=dict(shapes), strict=False)
    except LayerGraphError:
        raise
    except Exception as error:
        path = recorder.where()
        raise TraceError(
            f"torch.export cannot trace {type(model).__name__}",
            path=path or None,
            found=shorten(error),
            do="make the forward of that module free of data-dependent Python, or trace a submodule",
        ) from error
    finally:
        model.forward = forward
    layers = recorder.collect(exported.graph_module)
    template = found["template"]
    root_class = qualified(type(model)).replace(":", ".")
    return _clean(exported, list(tensors), [*_names(template)], root_class), template, layers


def shorten(error: BaseException, n_lines: int = 3) -> str:
    """The first telling lines of one of torch's long messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " / ".join(lines[:n_lines])[:400]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _clean(
    exported: ExportedProgram, input_names: list[str], output_names: list[str], root_class: str
) -> ExportedProgram:
    """Settle signature and call spec, and drop what has no meaning outside of this trace.

    Source positions name files of the tracing machine. Metadata assertions repeat what the interface checks at the
    door. Nodes that torch adds for sizes belong to the model itself.
    """
    root = {"L__self__": ("", root_class)}
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target is torch.ops.aten._assert_tensor_metadata.default:
                    module.graph.erase_node(node)
                    continue
                for key in ("stack_trace", "from_node", "custom"):
                    node.meta.pop(key, None)
                stack = node.meta.get("nn_module_stack")
                if stack is not None and any(key.startswith("_empty") for key in stack):
                    node.meta["nn_module_stack"] = root
            module.recompile()
    signature = exported.graph_signature
    return torch_side.build(
        exported,
        exported.graph,
        list(signature.input_specs),
        list(signature.output_specs),
        dict(exported.state_dict),
        dict(exported.constants),
        input_names=input_names,
        output_names=output_names,
        examples=exported.example_inputs[1] if exported.example_inputs else None,
    )


def _graph_inputs(
    exported: ExportedProgram,
    tensors: Mapping[str, torch.Tensor],
    labels: Mapping[str, Mapping[int, str]],
    hf: Any,
) -> list[GraphInput]:
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    items = []
    names: dict[str, str] = {}  # symbol of torch -> what people call that size
    for name, node in zip(tensors, exported.graph_signature.user_inputs, strict=True):
        default = hf.default_of(name, tensors) if hf is not None else None
        items.append(torch_side.graph_input(name, values[node], default, exported.range_constraints))
        for dim, size in enumerate(items[-1].shape):
            if isinstance(size, str) and size.isidentifier() and size not in names:
                # Sizes that the model's author calls the same are the same, though torch may not have to know.
                names[size] = labels.get(name, {}).get(dim) or f"s{len(names)}"

    def named(size: int | str) -> int | str:
        return size if isinstance(size, int) else re.sub(r"\b[a-z]\d+\b", lambda m: names.get(m[0], m[0]), size)

    return [replace(item, shape=tuple(map(named, item.shape))) for item in items]


def _names(template: Any) -> Iterator[str]:
    """Names of graph outputs in the order in which they stand in the return value."""
    if isinstance(template, dict):
        if "$" in template:
            yield template["$"]
        elif "const" not in template:
            for key in ("tuple", "list"):
                for child in template.get(key, ()):
                    yield from _names(child)
            for child in (template.get("dict") or template.get("fields") or {}).values():
                yield from _names(child)


def _aliases(exported: ExportedProgram) -> dict[str, str]:
    """Names in the state dict that show the same tensor as another: alias -> the name the graph uses."""
    used = {spec.target for spec in exported.graph_signature.input_specs}
    first: dict[int, str] = {}
    for name, tensor in exported.state_dict.items():
        if id(tensor) not in first or (name in used and first[id(tensor)] not in used):
            first[id(tensor)] = name
    return {name: first[id(tensor)] for name, tensor in exported.state_dict.items() if first[id(tensor)] != name}


__all__ = ["Progress", "shorten", "trace", "trace_cached"]
