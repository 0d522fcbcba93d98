"""Edit: the only writer of graphs, signatures and state.

An edit works on a copy. :meth:`Edit.finish` checks everything and returns a new program, or raises and leaves nothing
behind. It keeps in step what torch leaves to the author of a pass (pytorch issue 108571): graph signature, state
dict, constants, example inputs, call specs, ``meta["val"]``, module paths, and our own interface, layer index and
provenance.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx.node import map_arg

from layergraph.errors import EditError, NotFoundError
from layergraph.ir import exported as torch_side
from layergraph.ir.interface import GraphInput
from layergraph.ir.layers import span
from layergraph.ir.program import GraphUnit, Program, Provenance
from layergraph.ir.weights import Remap

ATEN = torch.ops.aten


class Edit:
    """Edits one graph of a program.

    Args:
        program: what to start from; it is not changed.
        graph: name of the graph to edit.
        made_by: label recorded as the maker of new nodes.

    Use it as a context manager to have errors name the pass; call :meth:`finish` for the new program.
    """

    def __init__(self, program: Program, graph: str = "forward", made_by: str = "edit") -> None:
        self.program = program
        self.name = graph
        self.made_by = made_by
        unit = program[graph]
        exported = unit.exported
        self.graph: torch.fx.Graph = copy.deepcopy(exported.graph)
        self._exported = exported
        self._inputs = list(exported.graph_signature.input_specs)
        self._outputs = list(exported.graph_signature.output_specs)
        self._state: dict[str, torch.Tensor] = dict(exported.state_dict)
        self._constants: dict[str, Any] = dict(exported.constants)
        self._examples: dict[str, torch.Tensor] = dict((exported.example_inputs or ((), {}))[1])
        self._has_examples = exported.example_inputs is not None
        self._interface = unit.interface
        self._layers = unit.layers
        self._provenance = dict(unit.provenance)
        self._weights = program.weights
        self._aliases = dict(program.aliases)
        self._renames: dict[str, str | None] = {}
        self._nodes = {node.name: node for node in self.graph.nodes}
        self._fake_mode = torch_side.fake_mode_of(self.graph)
        self._kept: set[str] = set()
        self._changes: dict[str, Any] = {}

    def __enter__(self) -> Edit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, EditError) and error.pass_name is None:
            error.pass_name = self.made_by

    # Looking ------------------------------------------------------------------------------------------------------

    def node(self, name: str) -> torch.fx.Node:
        """The node of that name in the copy being edited."""
        try:
            return self._nodes[name]
        except KeyError:
            raise NotFoundError(
                f"no node named {name!r} in graph {self.name!r}",
                pass_name=self.made_by,
                do="take names from the program given to find(), or from layers",
            ) from None

    def value(self, node: torch.fx.Node) -> Any:
        """The fake tensor (or symbolic number) the node computes."""
        return node.meta["val"]

    def tensor_of(self, node: torch.fx.Node) -> torch.Tensor:
        """The parameter, buffer or constant behind a placeholder."""
        target = self.target_of(node)
        return self._state[target] if target in self._state else self._constants[target]

    def target_of(self, node: torch.fx.Node) -> str:
        """Name in the state dict (or constants) of a placeholder that is not a user input."""
        target = next((spec.target for spec in self._inputs if spec.arg.name == node.name), None)
        if target is None:
            raise EditError("not a parameter, buffer or constant", node=node.name, do="give a placeholder of one")
        return target

    def input_node(self, name: str) -> torch.fx.Node:
        """The placeholder of a user input.

        Raises:
            NotFoundError: the graph takes no such input.
        """
        specs = [spec for spec in self._inputs if spec.kind is InputKind.USER_INPUT]
        for item, spec in zip(self._interface.inputs, specs, strict=True):
            if item.name == name:
                return self._nodes[spec.arg.name]
        raise NotFoundError(
            f"no input {name!r}", pass_name=self.made_by, expected=", ".join(self._interface.input_names)
        )

    def output_node(self, name: str) -> torch.fx.Node:
        """The node that is returned as output ``name``."""
        if name not in self._interface.outputs:
            raise NotFoundError(f"no output {name!r}", pass_name=self.made_by, expected=", ".join(self.output_names))
        node: torch.fx.Node = self._flat_outputs()[self._first_user_output() + self._interface.outputs.index(name)]
        return node

    def module_output(self, path: str) -> torch.fx.Node:
        """What the first call of the module at ``path`` returned first."""
        calls = self._layers.by_path.get(path, ())
        name = calls[0].output() if calls else None
        if name is None:
            raise NotFoundError("no value of that module", pass_name=self.made_by, path=path)
        return self.node(name)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of what the graph returns, in order."""
        return self._interface.outputs

    def is_output(self, node: torch.fx.Node) -> bool:
        """Whether the graph returns it."""
        return node in self._flat_outputs()

    # Nodes --------------------------------------------------------------------------------------------------------

    def call(
        self,
        target: Callable[..., Any],
        *args: Any,
        before: torch.fx.Node | None = None,
        after: torch.fx.Node | None = None,
        like: torch.fx.Node | None = None,
        scope: Mapping[str, tuple[str, str]] | None = None,
        **kwargs: Any,
    ) -> torch.fx.Node:
        """Insert a call of an op and compute what it returns on fake tensors.

        Args:
            target: an ``OpOverload`` (``torch.ops.aten.add.Tensor``), or ``operator.getitem`` and the like.
            args, kwargs: nodes and plain values.
            before, after: where; exactly one.
            like: the node whose module the new one belongs to; by default the node it stands beside.
            scope: that module spelt out, as torch's ``nn_module_stack``: key -> (path, class), outermost first.
        """
        if (before is None) == (after is None):
            raise EditError("say either before= or after=", pass_name=self.made_by, do="give exactly one of them")
        beside = before if before is not None else after
        assert beside is not None
        where = self.graph.inserting_before(beside) if before is not None else self.graph.inserting_after(beside)
        value = self._evaluate(target, args, kwargs)
        with where:
            node = self.graph.call_function(target, args, kwargs)
        self._adopt(node, like or beside, value)
        if scope is not None:
            node.meta["nn_module_stack"] = dict(scope)
        return node

    def update_args(self, node: torch.fx.Node, *args: Any, **kwargs: Any) -> None:
        """Give a node other arguments and compute it, and all that depend on it, anew on fake tensors."""
        node.args, node.kwargs = args, kwargs
        self.refresh(node)

    def refresh(self, first: torch.fx.Node) -> None:
        """Compute ``first`` anew on fake tensors, and what depends on it as far as anything changes."""
        stale = {first, *first.users}
        node = first
        while node.op != "output":
            if node.op == "call_function" and node in stale:
                before = node.meta.get("val")
                node.meta["val"] = self._evaluate(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
                if not torch_side.same_value(before, node.meta["val"]):
                    stale.update(node.users)
            node = node.next

    def refresh_users(self, node: torch.fx.Node) -> None:
        """The same for everything that uses ``node``, for when it took the place of one with other strides."""
        for user in list(node.users):
            self.refresh(user)

    def replace(self, old: torch.fx.Node, new: torch.fx.Node, *, except_in: Sequence[torch.fx.Node] = ()) -> None:
        """Let every user of ``old`` use ``new``; outputs and module boundaries follow."""
        keep = set(except_in) | {new}
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in keep)
        self._outputs = [
            dataclasses.replace(spec, arg=TensorArgument(new.name)) if spec.arg.name == old.name else spec
            for spec in self._outputs
        ]
        self._renames[old.name] = new.name
        made = self._provenance.get(new.name)
        if made is not None:
            self._provenance[new.name] = Provenance(made.made_by, (*made.made_from, old.name))

    def enter(self, path: str, old: torch.fx.Node, new: torch.fx.Node) -> None:
        """Let all that the module at ``path`` computes start from ``new`` in place of ``old``.

        Users outside of the module keep ``old``; the recorded inputs of the module, and of those inside it, follow.
        """
        inside = set(span(self.graph, path))
        for user in list(old.users):
            if user in inside and user is not new:
                user.replace_input_with(old, new)
        self._layers = self._layers.entered(path, old.name, new.name)
        if not torch_side.same_value(old.meta["val"], new.meta["val"]):
            self.refresh_users(new)

    def erase(self, node: torch.fx.Node) -> None:
        """Remove a node that nothing uses. Inputs, parameters and outputs have methods of their own."""
        if node.op in ("placeholder", "output"):
            raise EditError("an input or output is not erased as a node", node=node.name, do="use remove_*")
        if node.users:
            raise EditError(
                "a node that is still used cannot be erased",
                node=node.name,
                found=f"used by {', '.join(user.name for user in node.users)}",
                do="replace() it first",
            )
        self._forget(node)

    # Outputs ------------------------------------------------------------------------------------------------------

    def add_output(self, name: str, node: torch.fx.Node, place: tuple[str | int, ...] = (), length: int = 0) -> None:
        """Return ``node`` as one more output called ``name``, at ``place`` in the model's return value."""
        if name in self._interface.outputs:
            raise EditError(f"there is an output {name!r} already", pass_name=self.made_by, do="choose another name")
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise EditError("only a tensor can be an output", node=node.name, do="take one of its elements")
        output = self._output_node()
        output.args = ((*self._flat_outputs(), node),)
        self._outputs.append(OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None))
        self._interface = self._interface.with_output(name, place or (name,), length)

    def remove_output(self, name: str) -> None:
        """No longer return ``name``; what only it needed goes too."""
        if name not in self._interface.outputs:
            raise NotFoundError(
                f"no output {name!r}", pass_name=self.made_by, expected=", ".join(self._interface.outputs)
            )
        if len(self._interface.outputs) == 1:
            raise EditError("a graph needs an output", pass_name=self.made_by, do="keep one, or add another first")
        position = self._first_user_output() + self._interface.outputs.index(name)
        flat = list(self._flat_outputs())
        del flat[position], self._outputs[position]
        self._output_node().args = (tuple(flat),)
        self._interface = self._interface.without_output(name)

    def replace_output(self, name: str, node: torch.fx.Node) -> None:
        """Return ``node`` under the name of an output that there is; other users of the old value keep it."""
        self.output_node(name)  # raises if there is none
        position = self._first_user_output() + self._interface.outputs.index(name)
        flat = list(self._flat_outputs())
        flat[position] = node
        self._output_node().args = (tuple(flat),)
        self._outputs[position] = dataclasses.replace(self._outputs[position], arg=TensorArgument(node.name))

    # Inputs, parameters, buffers ----------------------------------------------------------------------------------

    def add_input(
        self,
        name: str,
        shape: Sequence[int | torch.SymInt],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        example: torch.Tensor | None = None,
        default: str | None = None,
    ) -> torch.fx.Node:
        """One more tensor that the caller gives by name. ``shape`` may use sizes of other nodes' values.

        ``example`` (zeros by default) is what ahead-of-time compilation and verification will call it with.
        """
        if name in self._interface.input_names:
            raise EditError(f"there is an input {name!r} already", pass_name=self.made_by, do="choose another name")
        device = torch.device(device) if device is not None else self._device()
        with self._fake_mode:
            value = torch.empty(tuple(shape), dtype=dtype, device=device)
        node = self._add_placeholder(name, value, InputSpec(InputKind.USER_INPUT, TensorArgument(name), None))
        sizes = [torch_side.hint(size) for size in shape]
        self._examples[name] = torch.zeros(sizes, dtype=dtype, device=device) if example is None else example
        item = torch_side.graph_input(name, value, default)
        inputs = (*self._interface.inputs, item)
        arguments = self._interface.arguments
        arguments = arguments if name in arguments else (*arguments, name)
        self._interface = dataclasses.replace(self._interface, inputs=inputs, arguments=arguments)
        return node

    def remove_input(self, name: str) -> None:
        """No longer take input ``name``; nothing may use it any more."""
        node = self._unused_placeholder(name)
        self._drop_placeholder(node)
        self._examples.pop(name, None)
        inputs = tuple(item for item in self._interface.inputs if item.name != name)
        self._interface = dataclasses.replace(self._interface, inputs=inputs)

    def add_parameter(self, target: str, tensor: torch.Tensor) -> torch.fx.Node:
        """A new parameter under the dotted name ``target``; a frozen one unless it requires grad already."""
        parameter = torch_side.as_parameter(tensor)
        return self._add_state(target, parameter, InputKind.PARAMETER, None)

    def add_buffer(self, target: str, tensor: torch.Tensor, *, persistent: bool = True) -> torch.fx.Node:
        """A new buffer under the dotted name ``target``; only persistent ones are part of the state dict."""
        return self._add_state(target, tensor, InputKind.BUFFER, persistent)

    def remove_state(self, target: str) -> None:
        """Drop a parameter or buffer that nothing uses any more, from graph and state."""
        spec = self._spec_of(target)
        self._drop_placeholder(self._unused_placeholder(spec.arg.name))
        self._state.pop(target, None)
        self._constants.pop(target, None)

    def replace_state(self, node: torch.fx.Node, tensor: torch.Tensor, remap: Remap | None = None) -> None:
        """Give a parameter or buffer another value and shape, under the same name; its users are *not* refreshed.

        ``remap`` says how the new value comes from the original and goes back; without it the change is not undone
        when weights are saved in the original layout.
        """
        spec = next(spec for spec in self._inputs if spec.arg.name == node.name)
        if spec.kind is InputKind.PARAMETER:
            tensor = torch_side.as_parameter(tensor)
        store = self._state if spec.target in self._state else self._constants
        old = store[spec.target]
        store[spec.target] = tensor
        for alias, kept in list(self._aliases.items()):
            # Tied names that no graph uses show the same tensor in the state dict: they follow.
            if kept == spec.target and self._state.get(alias) is old:
                self._state[alias] = tensor
        node.meta["val"] = self._fake_mode.from_tensor(tensor, static_shapes=True)
        if remap is not None:
            remap = dataclasses.replace(remap, made_by=self.made_by)
            if remap not in self._weights.remaps:  # another graph of the program may have made it already
                self._weights = self._weights.add(remap)

    def keep_state(self, target: str) -> None:
        """Keep a parameter or buffer in graph and state though nothing may use it any more."""
        self._kept.add(self._spec_of(target).target or target)

    def freeze_parameters(self) -> None:
        """No parameter of this graph takes gradients any more; other programs over the same tensors are untouched."""
        frozen: dict[int, torch.nn.Parameter] = {}
        for target, tensor in self._state.items():
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                again = torch.nn.Parameter(tensor.detach(), requires_grad=False)
                self._state[target] = frozen.setdefault(id(tensor), again)

    # What is known of the graph and its program -------------------------------------------------------------------

    def add_module_call(
        self,
        path: str,
        cls: str,
        inputs: Sequence[tuple[str, torch.fx.Node]],
        outputs: Sequence[tuple[str, torch.fx.Node]],
    ) -> None:
        """Record one more module call in the layer index, so that what a pass made can be named by path."""
        named = [tuple((key, node.name) for key, node in pairs) for pairs in (inputs, outputs)]
        returns = "tensor" if [key for key, _ in outputs] == [""] else "tuple"
        self._layers = self._layers.with_call(path, cls, named[0], named[1], returns)

    def change_program(self, **fields: Any) -> None:
        """Set fields of the program to be (``shadow``, ``model``); graphs and weights have methods of their own."""
        self._changes.update(fields)

    # Mutation of inputs -------------------------------------------------------------------------------------------

    def add_mutation(self, placeholder: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
        """Write ``value`` into an input or buffer in place, after everything else has read it."""
        if placeholder.op != "placeholder":
            raise EditError("only an input or a buffer can be mutated", node=placeholder.name, do="give a placeholder")
        return self.call(ATEN.copy_.default, placeholder, value, before=self._output_node(), like=value)

    def remove_mutation(self, node: torch.fx.Node) -> None:
        """Undo :meth:`add_mutation`, given the node it returned."""
        if node.target is not ATEN.copy_.default:
            raise EditError("not a mutation made by add_mutation", node=node.name, do="give the node it returned")
        self.erase(node)

    # The end ------------------------------------------------------------------------------------------------------

    def finish(self) -> Program:
        """The edited program.

        Nodes that nothing uses any more are gone, and with them the parameters and buffers that only they used.

        Raises:
            EditError: the result is not a valid exported program, or sizes would have become fixed.
        """
        used_before = {spec.target for spec in self._inputs if self._nodes[spec.arg.name].users}
        self._eliminate_dead(used_before)
        try:
            exported = torch_side.build(
                self._exported,
                self.graph,
                self._inputs,
                self._outputs,
                self._state,
                self._constants,
                input_names=self._interface.input_names,
                output_names=self._interface.outputs,
                examples=self._examples if self._has_examples else None,
            )
        except Exception as error:
            raise EditError(
                "the edited graph is not a valid exported program",
                pass_name=self.made_by,
                found=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                do="check what the pass's rewrite inserts and removes",
            ) from error
        alive = {node.name for node in self.graph.nodes}
        unit_before = self.program[self.name]
        unit = GraphUnit(
            exported,
            self._interface,
            self._layers.renamed(self._renames),
            {name: made for name, made in self._provenance.items() if name in alive},
            unit_before.cache,
        )
        aliases = {alias: kept for alias, kept in self._aliases.items() if alias in self._state}
        return self.program.evolve(
            graphs=share_state(self.program.graphs, self.name, unit),
            weights=self._weights,
            aliases=aliases,
            **self._changes,
        )

    # Inside -------------------------------------------------------------------------------------------------------

    def _evaluate(self, target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        def fake(node: torch.fx.Node) -> Any:
            return node.meta["val"]

        try:
            with torch_side.no_new_guards(self._fake_mode), self._fake_mode, torch_side.no_grad():
                return target(*map_arg(args, fake), **map_arg(kwargs, fake))
        except EditError as error:
            error.pass_name = self.made_by
            raise
        except Exception as error:
            raise EditError(
                f"{torch_side.op_name(target)} cannot take these arguments",
                pass_name=self.made_by,
                found=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                do="check shapes and dtypes of what the pass inserts",
            ) from error

    def _adopt(self, node: torch.fx.Node, like: torch.fx.Node, value: Any) -> None:
        node.meta["val"] = value
        if "nn_module_stack" in like.meta:
            node.meta["nn_module_stack"] = like.meta["nn_module_stack"]
        node.meta["torch_fn"] = (node.name, torch_side.op_name(node.target))
        sources = tuple(source.name for source in node.all_input_nodes)
        self._provenance[node.name] = Provenance(self.made_by, sources)
        self._nodes[node.name] = node

    def _forget(self, node: torch.fx.Node) -> None:
        self.graph.erase_node(node)
        self._nodes.pop(node.name)
        self._renames.setdefault(node.name, None)

    def _eliminate_dead(self, used_before: set[str | None]) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node.op not in ("placeholder", "output") and not node.users and not node.is_impure():
                self._forget(node)
        for spec in list(self._inputs):
            node = self._nodes[spec.arg.name]
            if spec.target is None or node.users or spec.target not in used_before or spec.target in self._kept:
                continue
            self._drop_placeholder(node)
            dropped = self._state.pop(spec.target, None)
            self._constants.pop(spec.target, None)
            for alias, kept in self._aliases.items():
                # Other names of a tensor that is gone. In use under another name they have a spec of their own.
                if kept == spec.target and dropped is not None and self._state.get(alias) is dropped:
                    self._state.pop(alias)

    def _output_node(self) -> torch.fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    def _flat_outputs(self) -> tuple[Any, ...]:
        return tuple(self._output_node().args[0])  # type: ignore[arg-type]

    def _first_user_output(self) -> int:
        return next(i for i, spec in enumerate(self._outputs) if spec.kind is OutputKind.USER_OUTPUT)

    def _device(self) -> torch.device:
        for spec in self._inputs:
            value = self._nodes[spec.arg.name].meta.get("val")
            if isinstance(value, torch.Tensor):
                return value.device
        return torch.device("cpu")

    def _spec_of(self, target: str) -> InputSpec:
        for spec in self._inputs:
            if spec.target == target:
                return spec
        raise NotFoundError(f"no parameter or buffer {target!r}", pass_name=self.made_by, do="see program.state_dict()")

    def _add_state(self, target: str, tensor: torch.Tensor, kind: InputKind, persistent: bool | None) -> torch.fx.Node:
        if target in self._state or target in self._constants:
            raise EditError(f"there is a tensor {target!r} already", pass_name=self.made_by, do="choose another name")
        prefix = "p" if kind is InputKind.PARAMETER else "b"
        name = f"{prefix}_{re.sub(r'[^0-9A-Za-z_]', '_', target)}"
        value = self._fake_mode.from_tensor(tensor, static_shapes=True)
        spec = InputSpec(kind, TensorArgument(name), target, persistent)
        node = self._add_placeholder(name, value, spec)
        (self._constants if persistent is False else self._state)[target] = tensor
        return node

    def _add_placeholder(self, name: str, value: torch.Tensor, spec: InputSpec) -> torch.fx.Node:
        # Signature order is parameters, buffers, constants, user inputs: keep each kind together.
        position = max((i + 1 for i, other in enumerate(self._inputs) if other.kind is spec.kind), default=None)
        if position is None:
            position = self._default_position(spec.kind)
        placeholders = self.graph.find_nodes(op="placeholder", sort=True)
        first = placeholders[position] if position < len(placeholders) else _after_placeholders(self.graph)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        self._inputs.insert(position, dataclasses.replace(spec, arg=TensorArgument(node.name)))
        self._nodes[node.name] = node
        self._provenance[node.name] = Provenance(self.made_by)
        return node

    def _default_position(self, kind: InputKind) -> int:
        order = [InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ]
        rank = order.index(kind) if kind in order else len(order)
        ranks = [order.index(spec.kind) if spec.kind in order else len(order) for spec in self._inputs]
        return sum(other <= rank for other in ranks)

    def _unused_placeholder(self, name: str) -> torch.fx.Node:
        node = self.node(name)
        if node.users:
            raise EditError(
                "something still uses it",
                pass_name=self.made_by,
                node=name,
                found=f"used by {', '.join(user.name for user in node.users)}",
                do="replace those uses first",
            )
        return node

    def _drop_placeholder(self, node: torch.fx.Node) -> None:
        self._inputs = [spec for spec in self._inputs if spec.arg.name != node.name]
        self._forget(node)


def share_state(graphs: Mapping[str, GraphUnit], name: str, edited: GraphUnit) -> dict[str, GraphUnit]:
    """All graphs over one state dict: the edited one's, and what only the others still use."""
    if len(graphs) == 1:
        return {name: edited}
    state = dict(edited.exported.state_dict)
    for other, unit in graphs.items():
        if other != name:
            for target in unit.targets.values():
                if target in unit.exported.state_dict:
                    state.setdefault(target, unit.exported.state_dict[target])
    units = {**graphs, name: edited}
    return {
        key: dataclasses.replace(unit, exported=torch_side.with_state(unit.exported, state))
        for key, unit in units.items()
    }


def _after_placeholders(graph: torch.fx.Graph) -> torch.fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


__all__ = ["Edit", "GraphInput"]
