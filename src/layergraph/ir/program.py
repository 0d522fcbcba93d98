"""Program: several ExportedPrograms over one state dict, with what is known about them. A value, never edited.

Passes make new programs through :class:`layergraph.ir.edit.Edit`; the one they started from stays as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from layergraph.errors import InputError, NotFoundError
from layergraph.ir import exported as torch_side
from layergraph.ir.adapter import Shadow, no_shadow
from layergraph.ir.cache_geometry import CacheGeometry
from layergraph.ir.fingerprint import graph_text
from layergraph.ir.interface import Interface
from layergraph.ir.layers import LayerIndex
from layergraph.ir.weights import WeightMap


@dataclass(frozen=True)
class Provenance:
    """Who made a node: the label of the pass, and the names of the nodes it was made from."""

    made_by: str
    made_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphUnit:
    """One named graph of a program. ``cache`` says what a cached graph keeps between calls."""

    exported: ExportedProgram
    interface: Interface
    layers: LayerIndex
    provenance: Mapping[str, Provenance] = field(default_factory=dict)
    cache: CacheGeometry | None = None

    @property
    def graph(self) -> torch.fx.Graph:
        return self.exported.graph

    @cached_property
    def nodes(self) -> Mapping[str, torch.fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def targets(self) -> Mapping[str, str]:
        """Placeholder name -> name in the state dict or constants, for everything that is not a user input."""
        specs = self.exported.graph_signature.input_specs
        return {spec.arg.name: spec.target for spec in specs if spec.target is not None}


@dataclass(frozen=True)
class Capture:
    """One line of a model's ``_can_record_outputs``, resolved to data (transformers' ``OutputRecorder``).

    Attributes:
        owner: path of the (sub)model whose table it stands in; it speaks for that model's own modules.
        key: ``hidden_states``, ``attentions``...
        target_class: class as ``module:qualname``, or None.
        class_name: path suffix, or None.
        index: which entry of the output.
        layer_name: dotted fragment of the path, or None.
        initial: whether the input of the first recorded module comes first (hidden_states only).
    """

    owner: str
    key: str
    target_class: str | None
    class_name: str | None
    index: int
    layer_name: str | None = None
    initial: bool = True

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class ModelInfo:
    """What is known of the model a program came from.

    Attributes:
        cls: class as ``module:qualname``.
        config: ``config.to_dict()`` of a Hugging Face model (JSON data), or None.
        generation_config: likewise, or None.
        config_class: class of the config as ``module:qualname``, or None.
        attributes: plain attributes of the module (numbers, strings), for code that stands around it.
        captures: its ``_can_record_outputs``, and those of the models inside it.
        collectors: paths of (sub)models whose forward collects what is recorded -> whether their last hidden state
            is replaced by ``last_hidden_state``.
        attention: the attention implementation it was traced with, or None.
        training: whether it was traced to be trained.
        uncached_because: why there is no cached graph, or None.
    """

    cls: str
    config: Mapping[str, Any] | None = None
    generation_config: Mapping[str, Any] | None = None
    config_class: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    captures: tuple[Capture, ...] = ()
    collectors: Mapping[str, bool] = field(default_factory=dict)
    attention: str | None = None
    training: bool = False
    uncached_because: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "captures": [capture.to_dict() for capture in self.captures]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelInfo:
        return cls(**{**data, "captures": tuple(Capture(**item) for item in data["captures"])})


@dataclass(frozen=True)
class PassRecord:
    """One pass that ran: what it was, what it found, what it did.

    Attributes:
        label: the pass's name, numbered when it ran more than once (``tap-outputs#2``).
        name: kebab-case name.
        options: plain data from which the pass can be made again.
        promise: ``exact``, ``additive`` or ``defined``.
        graphs: per graph: number of sites, nodes added and removed.
        sites: one line per site.
        notes: what the pass wants the report to say.
        refusals: ``(where, code, reason)`` for each target left alone.
        outputs: names of the outputs it added.
        errors: largest relative error per output, where the promise was checked.
        sizes: ``{"parameters": [before, after], "bytes": [before, after]}``.
    """

    label: str
    name: str
    options: Mapping[str, Any]
    promise: str
    graphs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sites: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refusals: tuple[tuple[str, str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        data = dict(self.__dict__)
        for key in ("sites", "notes", "outputs"):
            data[key] = list(data[key])
        data["refusals"] = [list(item) for item in self.refusals]
        data["sizes"] = {key: list(pair) for key, pair in self.sizes.items()}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PassRecord:
        values = dict(data)
        for key in ("sites", "notes", "outputs"):
            values[key] = tuple(data[key])
        values["refusals"] = tuple(tuple(item) for item in data["refusals"])
        values["sizes"] = {key: tuple(pair) for key, pair in data["sizes"].items()}
        return cls(**values)


@dataclass(frozen=True)
class Original:
    """The graphs a program had before any pass: without weights, which are taken back from the program itself.

    Attributes:
        load: given a state dict in the original layout, the graphs over it.
        parameters: every name a graph needs, with shape and dtype.
        aliases: see :class:`Program`.
        kept: weights that passes dropped and the caller asked to keep.
    """

    load: Callable[[dict[str, torch.Tensor]], Mapping[str, GraphUnit]]
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    aliases: Mapping[str, str]
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, *, keep_weights: bool = False) -> Original:
        """What to remember of ``program`` when the first pass runs on it."""
        units = program.graphs
        needed = {}
        for unit in units.values():
            for spec in unit.exported.graph_signature.input_specs:
                tensor = unit.exported.state_dict.get(spec.target) if spec.target else None
                if tensor is not None:
                    needed[str(spec.target)] = (tuple(tensor.shape), tensor.dtype)
        bare = {name: replace(unit, exported=torch_side.with_state(unit.exported, {})) for name, unit in units.items()}

        def load(state: dict[str, torch.Tensor]) -> Mapping[str, GraphUnit]:
            return {
                name: replace(unit, exported=torch_side.with_state(unit.exported, state)) for name, unit in bare.items()
            }

        return cls(load, needed, program.aliases, dict(program.state_dict) if keep_weights else {})

    def keeping(self, current: Program) -> Original:
        """The same, keeping from now on what ``current`` still holds of the weights."""
        held = current.weights.to_original(current.state_dict)
        return replace(self, kept={**held, **self.kept})

    def restore(self, current: Program, *, missing: str = "error") -> Program:
        """The original program over the weights that ``current`` holds, in their original layout.

        ``missing="meta"`` puts tensors without data where weights were dropped, to look at or save the graph.

        Raises:
            InputError: weights were dropped (and ``missing`` is ``error``).
        """
        state = {**self.kept, **current.weights.to_original(current.state_dict)}
        gone = [name for name in self.parameters if name not in state]
        if gone and missing == "error":
            raise InputError(
                "the original program cannot be restored: a pass dropped weights that it needs",
                path=gone[0],
                found=f"{len(gone)} weights gone",
                do="start again from the model, or optimize(..., verify=True), which keeps them",
                shell="start again from the model's folder",
            )
        for name in gone:
            shape, dtype = self.parameters[name]
            state[name] = torch.empty(shape, dtype=dtype, device="meta")
        state.update({alias: state[kept] for alias, kept in self.aliases.items() if kept in state})
        units = self.load(state)
        parameters = {
            str(spec.target)
            for unit in units.values()
            for spec in unit.exported.graph_signature.input_specs
            if spec.kind is InputKind.PARAMETER
        }
        for name in parameters:
            state[name] = torch_side.as_parameter(state[name])
        state.update({alias: state[kept] for alias, kept in self.aliases.items() if kept in state})
        # A pass that had to drop the cached graph said why.
        model = replace(current.model, uncached_because=None) if "step" in units else current.model
        return Program(units, WeightMap(), model, aliases=self.aliases)


@dataclass(frozen=True)
class Program:
    """Several graphs over one state.

    Attributes:
        graphs: by name; ``forward`` is always there.
        weights: how the state differs from the model's own state dict.
        model: where it came from.
        history: the passes that ran, in order.
        original: the graphs before any pass (None if these are they).
        aliases: names of the model's state dict that share a tensor with another: alias -> the name that is kept.
        shadow: the adapters, where a shadow network is woven in.
    """

    graphs: Mapping[str, GraphUnit]
    weights: WeightMap
    model: ModelInfo
    history: tuple[PassRecord, ...] = ()
    original: Original | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    shadow: Shadow | None = None

    def __getitem__(self, name: str) -> GraphUnit:
        try:
            return self.graphs[name]
        except KeyError:
            raise NotFoundError(
                f"no graph named {name!r} in this program",
                expected=", ".join(self.graphs),
                do="use one of these names",
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.graphs)

    @property
    def forward(self) -> GraphUnit:
        return self["forward"]

    @property
    def source(self) -> Program:
        """The program before any pass, over this one's weights in their original layout.

        Raises:
            InputError: a pass dropped weights that it needs.
        """
        return self if self.original is None else self.original.restore(self)

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor any graph holds: parameters, buffers and constants, by name."""
        state: dict[str, torch.Tensor] = {}
        for unit in self.graphs.values():
            state.update(unit.exported.state_dict)
            state.update(unit.exported.constants)
        return state

    @cached_property
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers, as ``nn.Module.state_dict`` would list them, in the graph's layout."""
        merged: dict[str, torch.Tensor] = {}
        for unit in self.graphs.values():
            merged.update(unit.exported.state_dict)
        return merged

    @cached_property
    def n_parameters(self) -> int:
        """Parameters that a graph uses, tied ones counted once."""
        return sum(tensor.numel() for tensor in self._parameters())

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._parameters())

    def _parameters(self) -> list[torch.Tensor]:
        used = {}
        for unit in self.graphs.values():
            for spec in unit.exported.graph_signature.input_specs:
                if spec.kind is InputKind.PARAMETER:
                    tensor = unit.exported.state_dict[spec.target]
                    used[id(tensor)] = tensor
        return list(used.values())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of graphs and signatures: stable across processes, blind to names of temporaries and to weights."""
        digest = hashlib.sha256()
        for name in sorted(self.graphs):
            digest.update(name.encode() + b"\0" + graph_text(self.graphs[name].exported).encode() + b"\0")
            digest.update(repr(self.graphs[name].interface.outputs).encode())
        return digest.hexdigest()[:32]

    def adapter_inputs(self, graph: str, name: str | None) -> dict[str, torch.Tensor]:
        """Values of the inputs of a graph that belong to an adapter; none where no shadow is woven in.

        Args:
            name: of the adapter, None for the base model.

        Raises:
            NotFoundError: no such adapter. NotSupportedError: one is named, and no shadow is woven in.
        """
        if self.shadow is None:
            if name is not None:
                raise no_shadow()
            return {}
        return self.shadow.inputs(name, self[graph].interface.input_names, self.state_dict)

    def evolve(self, **changes: Any) -> Program:
        return replace(self, **changes)


__all__ = ["Capture", "GraphUnit", "ModelInfo", "Original", "PassRecord", "Program", "Provenance"]
