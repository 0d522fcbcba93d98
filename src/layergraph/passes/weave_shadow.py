"""weave-shadow: a frozen decoder and a trained shadow adapter become one graph (ShadowPEFT, arXiv 2604.19254)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from layergraph.errors import EditError, InputError, NotFoundError, NotSupportedError
from layergraph.ir.adapter import ALPHA, LOSS_WEIGHT, ShadowPlan
from layergraph.ir.edit import Edit
from layergraph.ir.inline import inline
from layergraph.ir.layers import ModuleCall, span
from layergraph.ir.program import GraphUnit, Program
from layergraph.kernels.ops import INJECT, INJECT_WEIGHTS, UPDATE, UPDATE_WEIGHTS
from layergraph.passes.base import Findings, Pass, Promise, Site
from layergraph.passes.shadow_loss import add_auxiliary_loss

ATEN = torch.ops.aten
_PREFIX = "shadow"


@dataclass(frozen=True)
class WeaveShadow(Pass):
    """Weave a shadow adapter into a decoder: seed a state, inject it before each block, update it after.

    Before (block 1 of a Llama, its residual and norm both reading what enters)::

        layer 1 (model.layers.1)   h: f32[batch,sequence,64]
          input_layernorm
            %0 f32[batch,sequence,64] = to(h, f32)

    After::

        shadow.layers.1.inject
            %0 f32[batch,sequence,64] = layergraph.shadow_inject(^add_4, ^shadow_update, ...)
        layer 1 (model.layers.1)   h: f32[batch,sequence,64]
          input_layernorm
            %0 f32[batch,sequence,64] = to(h, f32)

    ``h`` is the injected state now, for every tap of what enters the block as well. The backbone that makes the first
    state lies under ``shadow.backbone``; ``shadow.seed``, ``shadow.layers.N.inject`` and ``shadow.layers.N.update``
    can be tapped by path. The update after the last block changes nothing and is left out.

    The cached graph is woven likewise: its backbone keeps keys and values of its own, the shadow's half of the cache.

    Adapter tensors and strength are inputs of the graph, filled in by the program from the adapter that a call
    chooses: another adapter is no other graph.

    There are no refusals: whatever cannot be woven is an error, for a graph with half a shadow would be wrong.

    * targets that are not contiguous, or match no block;
    * a block that runs more than once, or whose hidden state is not found among what it takes and returns;
    * an adapter for another model.

    With an untrained adapter (its up-projections zero) the outputs are bit-equal to those before. So they are with
    strength zero, which is how :meth:`reference` is checked; with trained weights peft is the reference.

    Args:
        adapter: a folder that peft wrote, a Hub id, or a PeftModel with a SHADOW adapter. None with a config for a
            fresh one; None without takes the adapters that the model or program brings.
        config: ``peft.ShadowConfig``, or a mapping of its fields, for an untrained adapter.
        name: what the program calls the adapter; ``default`` by default.
        plan: filled in by :func:`layergraph.optimize` and :meth:`Program.apply`.
    """

    pass_name: ClassVar[str] = "weave-shadow"
    promise: ClassVar[Promise] = "defined"
    moves_inputs: ClassVar[bool] = True

    adapter: Any = None
    config: Any = None
    name: str | None = None
    plan: ShadowPlan | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.adapter is not None and self.config is not None:
            raise InputError(
                "adapter and config are two ways to say the same",
                pass_name=self.pass_name,
                do="give adapter= for a trained one, config= for a fresh one",
            )

    def options(self) -> dict[str, Any]:
        """As data. Objects are left out: the program holds their adapters by name."""
        adapter = str(self.adapter) if isinstance(self.adapter, (str,)) or hasattr(self.adapter, "__fspath__") else None
        config = dict(self.config) if isinstance(self.config, dict) else None
        return {"adapter": adapter, "config": config, "name": self.name}

    def resolved_options(self, findings: Findings) -> dict[str, Any]:
        """The program's own copy of the adapter is what counts after a run."""
        return {"adapter": None, "config": None, "name": self._plan.shadow.active}

    def left(self, options: dict[str, Any]) -> bool:
        """There is one shadow in a program, so it was this one."""
        return True

    def reference(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """What was returned before: the example inputs hold the adapter with strength zero."""
        return outputs

    def keeps(self, program: Program, graph: str) -> bool:
        """A cached graph needs a backbone with a cache of its own."""
        return graph in self._plan.backbones

    def find(self, program: Program, graph: str) -> Findings:
        plan, unit = self._plan, program[graph]
        if program.shadow is not None and any(call.path == f"{_PREFIX}.seed" for call in unit.layers.calls):
            raise InputError(
                "a shadow is woven in already",
                pass_name=self.pass_name,
                found=", ".join(program.shadow.adapters),
                do="add_adapter() adds another adapter; remove('weave-shadow') takes the shadow out",
                shell="start from a folder without a shadow",
            )
        sites = [Site(_PREFIX, (), f"seeded by {len(plan.backbones[graph].nodes)} nodes, {_seed(plan)}", "seed")]
        for number, path in enumerate(plan.blocks):
            call = _block(unit, path)
            nodes = (_hidden_in(call), _hidden_out(call))
            sites.append(Site(path, nodes, "injected before, updated after", number))
        sites.append(Site("(program)", (), f"adapters {', '.join(plan.shadow.adapters)}", "settle"))
        alpha = plan.shadow[plan.shadow.active or ""].alpha
        notes = (f"{len(plan.blocks)} blocks, rank {plan.shadow.geometry['r']}, alpha {alpha}",)
        return Findings(tuple(sites), notes=notes)

    def rewrite(self, site: Site, edit: Edit) -> None:
        if site.data == "seed":
            _Weaver(self._plan, edit).seed()
        elif site.data == "settle":
            _Weaver(self._plan, edit).settle()
        else:
            _Weaver(self._plan, edit).block(site.data, *(edit.node(name) for name in site.nodes))

    @property
    def _plan(self) -> ShadowPlan:
        if self.plan is None:
            raise InputError(
                "the pass has no adapter yet",
                pass_name=self.pass_name,
                do="run it with layergraph.optimize or program.apply, which read the adapter",
            )
        return self.plan


def _seed(plan: ShadowPlan) -> str:
    source = "the base's embeddings" if plan.embeddings is not None else "the inputs"
    return f"from {source}" + (", projected" if plan.projection is not None else "")


def _block(unit: GraphUnit, path: str) -> ModuleCall:
    calls = unit.layers.by_path.get(path, ())
    if len(calls) != 1:
        raise NotSupportedError(
            "a block must run once",
            pass_name="weave-shadow",
            path=path,
            expected="one call",
            found=f"{len(calls)} calls",
            do="target other blocks" if calls else "weave before passes that drop blocks",
        )
    return calls[0]


def _hidden_in(call: ModuleCall) -> str:
    node = dict(call.inputs).get("hidden_states") or call.first_input
    if node is None:
        raise NotSupportedError("the block takes no tensor", pass_name="weave-shadow", path=call.path)
    return node


def _hidden_out(call: ModuleCall) -> str:
    """As peft finds it: the tensor, the first of a tuple, or a field of an object."""
    node: str | None = None
    if call.returns in ("tensor", "tuple"):
        node = call.output(0) if call.n_outputs else None
    elif call.returns == "mapping":
        outputs = dict(call.outputs)
        node = outputs.get("hidden_states") or outputs.get("last_hidden_state")
    if node is None:
        raise NotSupportedError(
            "the block's hidden state is not found in what it returns",
            pass_name="weave-shadow",
            path=call.path,
            expected="a tensor, a tuple, or an object with hidden_states",
            found=call.returns,
        )
    return node


class _Weaver:
    """One weaving in one edit. Stateless: what earlier sites made is found in the graph by name."""

    def __init__(self, plan: ShadowPlan, edit: Edit) -> None:
        self.plan, self.edit = plan, edit

    # The seed -----------------------------------------------------------------------------------------------------

    def seed(self) -> None:
        """Add the adapter's inputs, replace saved modules, and make s^(0) ahead of the first block."""
        self._add_inputs()
        for module in self.plan.saved:
            self._use_saved(module.path, module.inputs)
        edit, plan = self.edit, self.plan
        unit = plan.backbones[edit.name]
        first = edit.node(_hidden_in(_block(edit.program[edit.name], plan.blocks[0])))
        before = self._first_inside(plan.blocks[0], first)
        if unit.cache is not None:
            self._add_cache(unit)
        bound = {name: self._bind(name) for name in unit.interface.input_names}
        state = {target: self._input(name) for target, name in plan.backbone_state.items()}
        made = inline(edit, unit, bound, state=state, before=before, prefix=f"{_PREFIX}.backbone")
        if "last_hidden_state" not in made:
            raise NotSupportedError(
                "the shadow backbone returns no last_hidden_state", pass_name=edit.made_by, found=", ".join(made)
            )
        seed = made["last_hidden_state"]
        if plan.projection is not None:
            scope = self._scope(f"{_PREFIX}.projection")
            seed = edit.call(ATEN.linear.default, seed, self._input(plan.projection), before=before, scope=scope)
        edit.add_module_call(f"{_PREFIX}.seed", "layergraph:ShadowBackbone", (), (("", seed),))

    def _bind(self, name: str) -> torch.fx.Node:
        """The host's node for an input of the backbone: its own input, or the embeddings that it makes."""
        unit = self.edit.program[self.edit.name]
        if name == "inputs_embeds" and self.plan.embeddings is not None and "input_ids" in unit.interface.input_names:
            calls = unit.layers.by_path.get(self.plan.embeddings, ())
            node = calls[0].output() if calls else None
            if node is None:
                raise NotFoundError(
                    "the base's embeddings are not in the graph",
                    pass_name=self.edit.made_by,
                    path=self.plan.embeddings,
                    do="trace with input_ids",
                )
            return self.edit.node(node)
        return self._input(name)

    def _add_inputs(self) -> None:
        shadow, edit = self.plan.shadow, self.edit
        wanted = tuple(name for name in shadow.input_names if name != LOSS_WEIGHT or self._has_loss())
        # Examples hold the adapter with strength zero: then the outputs are those before, which can be checked.
        for name, example in shadow.inputs(None, wanted, edit.program.state_dict).items():
            example = example.detach()
            edit.add_input(name, example.shape, example.dtype, example.device, example)

    def _add_cache(self, unit: GraphUnit) -> None:
        """The shadow's half of the cache: inputs beside the base's half, of the same batch and own lengths."""
        edit, cache = self.edit, unit.cache
        assert cache is not None
        tokens = edit.value(self._input("token_positions"))
        batch, count = tokens.shape
        order: torch.Tensor = edit.example("token_positions")
        device, rows = tokens.device, order.shape[0]

        def add(name: str, shape: tuple[Any, ...], sizes: tuple[int, ...], dtype: str, fill: int = 0) -> None:
            example = torch.full(sizes, fill, dtype=getattr(torch, dtype), device=device)
            edit.add_input(name, shape, example.dtype, device, example)

        for number, group in enumerate(cache.groups):
            n_slots = order.shape[1] + 8 * (number + 2)
            slots = edit.new_size(n_slots, f"{group.name}_slots")
            edit.add_input(group.write, (batch, count), torch.int64, device, order.clone())
            add(group.positions, (slots, batch), (n_slots, rows), "int64", -1)
            for tensor in cache.tensors:
                if tensor.group == group.name:
                    each = (tensor.heads, tensor.features)
                    add(tensor.name, (slots, batch, *each), (n_slots, rows, *each), tensor.dtype)
        for state in cache.states:
            add(state.name, (batch, *state.shape), (rows, *state.shape), state.dtype)
        edit.extend_cache(cache)

    def _use_saved(self, path: str, inputs: Any) -> None:
        """Within one module, read an adapter's weights in place of the base's, which stay for when none is active."""
        edit = self.edit
        targets = {target: name for name, target in edit.program[edit.name].targets.items()}
        inside = set(span(edit.graph, path))
        for target, name in inputs.items():
            if target not in targets:
                raise EditError("a module to save has a weight that the graph does not read", path=path, found=target)
            edit.keep_state(target)
            new = self._input(name)
            # A tied weight is taken under each of its names, and read under one of them.
            aliases = edit.program.aliases
            kept = aliases.get(target, target)
            for tied in [kept, *(alias for alias, other in aliases.items() if other == kept)]:
                if tied in targets:
                    old = edit.node(targets[tied])
                    for user in list(old.users):
                        if user in inside:
                            user.replace_input_with(old, new)

    # A block ------------------------------------------------------------------------------------------------------

    def block(self, number: int, hidden: torch.fx.Node, out: torch.fx.Node) -> None:
        """Inject before the block, update after it."""
        edit, path, roles = self.edit, self.plan.blocks[number], self.plan.roles[number]
        state = self._state(number)
        before = self._first_inside(path, hidden)
        name = f"{_PREFIX}.layers.{path.rpartition('.')[2]}"
        scope = self._scope(f"{name}.inject")
        weights = [self._input(str(roles[role])) for role in INJECT_WEIGHTS]
        source = state
        if self._is_training() and self.plan.dropout > 0:
            # The op takes h - s itself: give it an s of which that is the dropped-out difference.
            dtype = edit.value(weights[0]).dtype
            delta = edit.call(ATEN.sub.Tensor, hidden, state, before=before, scope=scope)
            delta = edit.call(ATEN.to.dtype, delta, dtype, before=before, scope=scope)
            kept = edit.call(ATEN.dropout.default, delta, self.plan.dropout, True, before=before, scope=scope)
            source = edit.call(ATEN.sub.Tensor, hidden, kept, before=before, scope=scope)
        injected = edit.call(INJECT, hidden, source, *weights, self._input(ALPHA), before=before, scope=scope)
        edit.enter(path, hidden, injected)
        pairs = (("hidden", hidden), ("shadow", state))
        edit.add_module_call(f"{name}.inject", "layergraph:ShadowInject", pairs, (("", injected),))
        if number + 1 == len(self.plan.blocks):
            return
        update = [self._input(str(roles[role])) for role in UPDATE_WEIGHTS]
        scope = self._scope(f"{name}.update")
        after = edit.call(UPDATE, out, state, *update, after=out, scope=scope)
        edit.add_module_call(
            f"{name}.update", "layergraph:ShadowUpdate", (("hidden", out), ("shadow", state)), (("", after),)
        )

    def _state(self, number: int) -> torch.fx.Node:
        """The shadow state that enters block ``number``."""
        previous = self.plan.blocks[number - 1].rpartition(".")[2] if number else ""
        wanted = f"{_PREFIX}.layers.{previous}.update" if number else f"{_PREFIX}.seed"
        return self.edit.module_output(wanted)

    def _first_inside(self, path: str, hidden: torch.fx.Node) -> torch.fx.Node:
        """The first node of a block, which comes after what enters it."""
        order = {node: place for place, node in enumerate(self.edit.graph.nodes)}
        inside = [node for node in span(self.edit.graph, path) if order[node] > order[hidden]]
        if not inside:
            raise NotSupportedError("the block computes nothing", pass_name=self.edit.made_by, path=path)
        return min(inside, key=order.__getitem__)

    # The rest -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Auxiliary loss, frozen base, and the program's own list of adapters."""
        if self._has_loss() and self.plan.head is not None:
            add_auxiliary_loss(self.plan, self.edit, self.edit.module_output(f"{_PREFIX}.seed"))
        if self._is_training():
            self.edit.freeze_parameters()
        program = self.edit.program
        model = dataclasses.replace(program.model, uncached_because=self.plan.uncached_because)
        self.edit.change_program(shadow=self.plan.shadow, model=model)

    def _has_loss(self) -> bool:
        interface = self.edit.program[self.edit.name].interface
        return "labels" in interface.input_names and "loss" in interface.outputs

    def _is_training(self) -> bool:
        return self.edit.program.model.training

    def _input(self, name: str) -> torch.fx.Node:
        return self.edit.input_node(name)

    def _scope(self, path: str) -> dict[str, tuple[str, str]]:
        root = self.edit.program.model.cls.replace(":", ".")
        return {"L__self__": ("", root), path.replace(".", "_"): (path, f"layergraph.{path.rpartition('.')[2]}")}


__all__ = ["WeaveShadow"]
