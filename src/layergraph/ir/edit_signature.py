"""The part of Edit that deals with the signature: outputs, inputs, parameters, buffers, mutation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import torch
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from layergraph.errors import EditError, InputTypeError, NotFoundError
from layergraph.ir import exported as torch_side
from layergraph.ir.edit_nodes import NodeEdit
from layergraph.ir.interface import inputs_of, with_names
from layergraph.ir.program import Provenance
from layergraph.ir.template import is_occupied
from layergraph.ir.weights import Remap

ATEN = torch.ops.aten


class SignatureEdit(NodeEdit):
    """Adds and removes what goes in and out of the graph, and the state behind it."""

    # Outputs ------------------------------------------------------------------------------------------------------

    def add_output(self, name: str, node: torch.fx.Node, place: tuple[str | int, ...] = (), length: int = 0) -> None:
        """Return ``node`` as one more output called ``name``, at ``place`` in the model's return value."""
        if not isinstance(name, str) or not name:
            raise EditError("an output has no name", pass_name=self.made_by, found=repr(name), do="give it one")
        if name in self._interface.outputs:
            raise EditError(f"there is an output {name!r} already", pass_name=self.made_by, do="choose another name")
        node = self._own(node)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise EditError("only a tensor can be an output", node=node.name, do="take one of its elements")
        place = place or (name,)
        if is_occupied(self._interface.template, place):
            raise EditError(
                f"the model returns something else as {'.'.join(map(str, place))} already",
                pass_name=self.made_by,
                node=node.name,
                do="choose another name",
            )
        output = self._output_node()
        output.args = ((*self._flat_outputs(), node),)
        self._outputs.append(OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None))
        self._interface = self._interface.with_output(name, place, length)

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
        node = self._own(node)
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

    def new_size(self, example: int, name: str) -> torch.SymInt:
        """A size for :meth:`add_input` that may vary, equal to no other; ``example`` is its size in the example."""
        return torch_side.fresh_size(self._fake_mode, example, name)

    def example(self, name: str) -> torch.Tensor:
        """What input ``name`` is in the example that compilation and verification call the graph with."""
        return self._examples[name]

    def remove_input(self, name: str) -> None:
        """No longer take input ``name``; nothing may use it any more."""
        for condition in self._interface.conditions:
            if name in inputs_of(condition):
                raise EditError(
                    f"the graph holds under a condition on input {name!r}",
                    pass_name=self.made_by,
                    found=condition,
                    do="keep the input",
                )
        node = self._unused_placeholder(name)
        self._drop_placeholder(node)
        self._examples.pop(name, None)
        inputs = tuple(item for item in self._interface.inputs if item.name != name)
        self._interface = dataclasses.replace(self._interface, inputs=inputs)

    def add_condition(self, condition: str, nodes: Mapping[str, torch.fx.Node]) -> None:
        """Have each call checked for a condition on sizes that a spliced graph brings; see :class:`Interface`.

        Args:
            nodes: what stands here for each input that the condition speaks of.

        Raises:
            EditError: one of them is no input of this graph, so that nothing could check it.
        """
        inputs = {self.input_node(name): name for name in self._interface.input_names}
        names = {name: inputs.get(nodes[name]) for name in inputs_of(condition)}
        if missing := [name for name, own in names.items() if own is None]:
            raise EditError(
                f"a spliced graph holds under a condition on {missing[0]!r}, which is no input here",
                pass_name=self.made_by,
                found=condition,
                do="splice a graph that holds for every size",
            )
        text = with_names(condition, {name: str(own) for name, own in names.items()})
        conditions = dict.fromkeys((*self._interface.conditions, text))
        self._interface = dataclasses.replace(self._interface, conditions=tuple(conditions))

    def add_parameter(self, target: str, tensor: torch.Tensor) -> torch.fx.Node:
        """A new parameter under the dotted name ``target``; a frozen one unless it requires grad already."""
        self._check_tensor(target, tensor)
        return self._add_state(target, torch_side.as_parameter(tensor), InputKind.PARAMETER, None)

    def add_buffer(self, target: str, tensor: torch.Tensor, *, persistent: bool = True) -> torch.fx.Node:
        """A new buffer under the dotted name ``target``; only persistent ones are part of the state dict."""
        return self._add_state(target, tensor, InputKind.BUFFER, persistent)

    def remove_state(self, target: str) -> None:
        """Drop a parameter or buffer that nothing uses any more, from graph and state."""
        spec = self._spec_of(target)
        self._drop_placeholder(self._unused_placeholder(spec.arg.name))
        self._state.pop(target, None)
        self._constants.pop(target, None)

    def replace_state(
        self, node: torch.fx.Node, tensor: torch.Tensor | None = None, remap: Remap | None = None
    ) -> None:
        """Give a parameter or buffer another value and shape, under the same name; its users are *not* refreshed.

        Call it once in each graph that has the node: with a remap that was applied before, the graph takes the value
        that is there, and its own placeholder gets the new shape.

        Args:
            tensor: the new value; by default what the remap makes of the tensors it names.
            remap: how the new value comes from the original and goes back; without it the change is not undone when
                weights are saved in the original layout.
        """
        target = self.target_of(node)
        spec = self._spec_of(target)
        store = self._state if target in self._state else self._constants
        old = store[target]
        if tensor is None and remap is None:
            raise EditError("neither a tensor nor a remap", pass_name=self.made_by, do="give one of them, or both")
        if tensor is not None:
            self._check_tensor(target, tensor)
        if remap is not None:
            remap = dataclasses.replace(remap, made_by=self.made_by)
            if remap in self._weights.remaps:
                tensor = old  # the pass rewrote it in another graph of the program already
            else:
                made = self._remapped(remap, target, old)
                if tensor is not None and (tensor.shape, tensor.dtype) != (made.shape, made.dtype):
                    raise EditError(
                        f"the tensor is not what remap {remap.kind!r} makes",
                        pass_name=self.made_by,
                        path=target,
                        expected=f"{made.dtype}{list(made.shape)}",
                        found=f"{tensor.dtype}{list(tensor.shape)}",
                        do="give the remap alone, which makes the tensor itself",
                    )
                tensor = made if tensor is None else tensor
                self._weights = self._weights.add(remap)
        assert tensor is not None
        if spec.kind is InputKind.PARAMETER:
            tensor = torch_side.as_parameter(tensor)
        store[spec.target] = tensor
        for alias, kept in list(self._aliases.items()):
            # Tied names that no graph uses show the same tensor in the state dict: they follow.
            if kept == spec.target and self._state.get(alias) is old:
                self._state[alias] = tensor
        node.meta["val"] = self._fake_mode.from_tensor(tensor, static_shapes=True)

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

    # Inside -------------------------------------------------------------------------------------------------------

    def _remapped(self, remap: Remap, target: str, old: torch.Tensor) -> torch.Tensor:
        """What a remap makes of the tensors it names, as far as it goes by the name ``target``."""
        missing = [name for name in remap.original if name not in self._state]
        if missing:
            raise EditError(
                f"the state dict has no {missing[0]!r}",
                pass_name=self.made_by,
                do="name tensors as edit.target_of(node) gives them",
            )
        with torch.no_grad():
            made = remap.forward([self._state[name].detach() for name in remap.original])
        if len(made) != len(remap.rewritten) or target not in remap.rewritten:
            raise EditError(
                f"remap {remap.kind!r} makes {len(made)} tensors of these, under other names",
                pass_name=self.made_by,
                path=target,
                expected="one for each name it rewrites to, this one among them",
                found=", ".join(remap.rewritten) or "no name",
                do="name what stands in the graph afterwards",
            )
        return made[remap.rewritten.index(target)].requires_grad_(old.requires_grad)

    def _check_tensor(self, target: str, tensor: object) -> None:
        """Refuse what cannot stand beside the graph's other tensors."""
        if not isinstance(tensor, torch.Tensor):
            raise InputTypeError(
                "not a tensor",
                pass_name=self.made_by,
                path=target,
                found=repr(tensor)[:80],
                do="give a torch.Tensor",
            )
        if tensor.device.type != self._device().type:
            raise EditError(
                "a tensor on another device than the graph",
                pass_name=self.made_by,
                path=target,
                expected=str(self._device()),
                found=str(tensor.device),
                do="make it there: edit.value(node).device",
            )

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
        self._check_tensor(target, tensor)
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


def _after_placeholders(graph: torch.fx.Graph) -> torch.fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


__all__ = ["SignatureEdit"]
