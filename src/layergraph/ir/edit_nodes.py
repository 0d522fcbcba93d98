"""The part of Edit that deals with nodes: look, insert, replace, erase, compute anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx.node import map_arg

from layergraph.errors import EditError, NotFoundError
from layergraph.ir import exported as torch_side
from layergraph.ir.layers import span
from layergraph.ir.program import Program, Provenance


class NodeEdit:
    """A copy of one graph of a program, and what is known about it, while nodes are edited."""

    def __init__(self, program: Program, graph: str = "forward", made_by: str = "edit") -> None:
        self.program = program
        self.name = graph
        self.made_by = made_by
        unit = program[graph]
        exported = unit.exported
        self.graph: torch.fx.Graph = torch_side.copy_graph(exported.graph)
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
        self._cache = unit.cache
        self._weights = program.weights
        self._aliases = dict(program.aliases)
        self._renames: dict[str, str | None] = {}
        self._nodes = {node.name: node for node in self.graph.nodes}
        self._fake_mode = torch_side.fake_mode_of(self.graph)
        self._kept: set[str] = set()
        self._changes: dict[str, Any] = {}

    # Looking ------------------------------------------------------------------------------------------------------

    def node(self, name: str) -> torch.fx.Node:
        """The node of that name in the copy being edited."""
        if name in self._nodes:
            return self._nodes[name]
        if name in self._renames:
            heir = self._renames[name]
            raise NotFoundError(
                f"node {name!r} of graph {self.name!r} is gone: this edit removed it",
                pass_name=self.made_by,
                found=f"replaced by {heir}" if heir else None,
                do="let no two sites share a node that one removes: make them one site, or start from one that stays",
            )
        raise NotFoundError(
            f"no node named {name!r} in graph {self.name!r}",
            pass_name=self.made_by,
            do="take names from the program given to find(), or from layers",
        )

    def value(self, node: torch.fx.Node) -> Any:
        """The fake tensor (or symbolic number) the node computes."""
        return node.meta["val"]

    def tensor_of(self, node: torch.fx.Node) -> torch.Tensor:
        """A copy of the parameter, buffer or constant behind a placeholder, without gradient.

        The model that was traced holds the tensor itself: :meth:`replace_state` gives the program another.
        """
        target = self.target_of(node)
        return (self._state[target] if target in self._state else self._constants[target]).detach().clone()

    def target_of(self, node: torch.fx.Node) -> str:
        """Name in the state dict (or constants) of a placeholder that is not a user input."""
        node = self._own(node)
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
        if isinstance(target, torch._ops.OpOverloadPacket):
            named = ", ".join(f"torch.ops.{target}.{name}" for name in target.overloads())
            raise EditError(
                f"{target} is an op without its overload", pass_name=self.made_by, do=f"name one of {named}"
            )
        beside = self._own(before if before is not None else after)
        map_arg((args, kwargs), self._own)
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
        map_arg((args, kwargs), self._own)
        node = self._own(node)
        node.args, node.kwargs = args, kwargs
        self.refresh(node)

    def refresh(self, first: torch.fx.Node) -> None:
        """Compute ``first`` anew on fake tensors, and what depends on it as far as anything changes."""
        stale = {first, *first.users}
        node = first
        while node.op != "output":
            if node.op == "call_function" and node in stale:
                before = node.meta.get("val")
                node.meta["val"] = self._evaluate(node.target, node.args, node.kwargs)
                if not torch_side.same_value(before, node.meta["val"]):
                    stale.update(node.users)
            node = node.next

    def refresh_users(self, node: torch.fx.Node) -> None:
        """The same for everything that uses ``node``, for when it took the place of one with other strides."""
        for user in list(node.users):
            self.refresh(user)

    def replace(self, old: torch.fx.Node, new: torch.fx.Node, *, except_in: Sequence[torch.fx.Node] = ()) -> None:
        """Let every user of ``old`` use ``new``; outputs and module boundaries follow.

        What this edit inserted for ``new`` to be computed from ``old`` goes on using ``old``, and so do ``except_in``.
        """
        old, new = self._own(old), self._own(new)
        if old is new:
            return
        keep = {*except_in, *self._chain(new)}
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in keep)
        self._outputs = [
            dataclasses.replace(spec, arg=TensorArgument(new.name)) if spec.arg.name == old.name else spec
            for spec in self._outputs
        ]
        self._renames[old.name] = new.name
        self._renames.pop(new.name, None)  # replaced before, and now back
        made = self._provenance.get(new.name)
        if made is not None:
            self._provenance[new.name] = Provenance(made.made_by, (*made.made_from, old.name))

    def enter(self, path: str, old: torch.fx.Node, new: torch.fx.Node) -> None:
        """Let all that the module at ``path`` computes start from ``new`` in place of ``old``.

        Users outside of the module keep ``old``, and so does what this edit inserted to compute ``new``; the recorded
        inputs of the module, and of those inside it, follow.
        """
        old, new = self._own(old), self._own(new)
        inside = set(span(self.graph, path)) - self._chain(new)
        for user in list(old.users):
            if user in inside:
                user.replace_input_with(old, new)
        self._layers = self._layers.entered(path, old.name, new.name)
        if not torch_side.same_value(old.meta["val"], new.meta["val"]):
            self.refresh_users(new)

    def erase(self, node: torch.fx.Node) -> None:
        """Remove a node that nothing uses. Inputs, parameters and outputs have methods of their own."""
        node = self._own(node)
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

    def _chain(self, new: torch.fx.Node) -> set[torch.fx.Node]:
        """``new`` and what this edit inserted to compute it: led back to it, they would depend on themselves."""
        before = self.program[self.name].nodes
        chain, stack = {new}, [new]
        while stack:
            made = [item for item in stack.pop().all_input_nodes if item.name not in before and item not in chain]
            chain.update(made)
            stack += made
        return chain

    # Inside -------------------------------------------------------------------------------------------------------

    def _own(self, node: Any) -> torch.fx.Node:
        """The node, if it is one of the graph being edited: one of another would tie the two together.

        Raises:
            EditError: it is not, or no node at all.
        """
        if isinstance(node, torch.fx.Node) and self._nodes.get(node.name) is node:
            return node
        name = node.name if isinstance(node, torch.fx.Node) else None
        if name is not None and name not in self._nodes:
            self.node(name)  # says what became of it
        raise EditError(
            "a node of another graph" if name is not None else "not a node",
            pass_name=self.made_by,
            node=name,
            found=None if name is not None else repr(node)[:80],
            do="rewrite() works on a copy: take its nodes with edit.node(name)",
        )

    def _evaluate(self, target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        def fake(node: torch.fx.Node) -> Any:
            return node.meta["val"]

        try:
            with (
                torch_side.no_new_guards(self._fake_mode),
                self._fake_mode,
                torch_side.no_grad(),
                torch_side.as_in_tracing(),
            ):
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

    def _output_node(self) -> torch.fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    def _flat_outputs(self) -> tuple[Any, ...]:
        return tuple(self._output_node().args[0])

    def _first_user_output(self) -> int:
        return next(i for i, spec in enumerate(self._outputs) if spec.kind is OutputKind.USER_OUTPUT)


__all__ = ["NodeEdit"]
