"""The public Program: called like the model, rewritten by passes, printed, saved."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram

from layergraph.adapters import ACTIVE, AdapterMethods, chosen_adapter, preparer
from layergraph.errors import InputError, InputTypeError, NotSupportedError
from layergraph.ir import checkpoint, printing
from layergraph.ir import folder as folders
from layergraph.ir.execute import run_graph
from layergraph.ir.placement import copied
from layergraph.ir.program import Program as GraphProgram
from layergraph.ir.template import fill_template
from layergraph.passes import pipeline
from layergraph.passes.base import Pass
from layergraph.placement import place
from layergraph.program_module import ProgramModule
from layergraph.progress import Progress, progress_line
from layergraph.report import Report
from layergraph.trace.prologue import Prologue
from layergraph.verification import checker

if TYPE_CHECKING:
    from layergraph.runtime.cache import DualCache
    from layergraph.runtime.generate import ProgramForGeneration
    from layergraph.runtime.session import Session

# What callers of Hugging Face models pass that changes nothing in a graph traced without it.
_FLAGS = ("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits")


def _same(baked: Any, given: Any) -> bool:
    """Whether an argument says what was traced; what comes from a folder has lists for tuples and texts for keys."""
    if isinstance(baked, Mapping) and isinstance(given, Mapping):
        left, right = ({str(key): value for key, value in item.items()} for item in (baked, given))
        return left.keys() == right.keys() and all(_same(value, right[key]) for key, value in left.items())
    if isinstance(baked, (tuple, list)) and isinstance(given, (tuple, list)):
        return len(baked) == len(given) and all(map(_same, baked, given))
    is_plain = all(item is None or isinstance(item, (bool, int, float, str)) for item in (baked, given))
    return is_plain and bool(baked == given)


class Program(AdapterMethods):
    """A traced model. A value: :meth:`apply` and :meth:`remove` give new programs, this one stays valid.

    Made by :func:`layergraph.trace`, :func:`layergraph.optimize` or :func:`layergraph.load`. Safe to call from many
    threads at once.
    """

    def __init__(self, graphs: GraphProgram) -> None:
        self.ir = graphs

    # Copying ------------------------------------------------------------------------------------------------------

    def __copy__(self) -> Program:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        """The same graphs over weights and adapters of its own, to train or load into."""
        return Program(copied(self.ir, memo))

    def __reduce__(self) -> Any:
        raise NotSupportedError(
            "a program cannot be pickled",
            found="pickle, torch.save, or another process",
            do="save it with program.save(folder), and read that with layergraph.load(folder)",
        )

    # Running ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's forward returns for the same arguments: its own output class, taps in its fields.

        Where a shadow is woven in, ``adapter=`` names the adapter for this call; None is the base model.

        Raises:
            InputError, InputTypeError: an argument is unknown, missing, or of another rank, dtype or size than traced.
        """
        program = self.ir
        unit = program.forward
        return_dict = kwargs.pop("return_dict", None)
        is_named = "adapter" in kwargs and "adapter" not in unit.interface.arguments
        adapter = chosen_adapter(self, kwargs.pop("adapter") if is_named else ACTIVE)
        given = program.adapter_inputs("forward", adapter)
        tensors = unit.interface.check(self._prepare({**given, **self._bind(args, kwargs)}))
        with nullcontext() if program.model.training else torch.no_grad():
            outputs = run_graph(unit, tensors)
        result = fill_template(unit.interface.template, outputs)
        return result.to_tuple() if return_dict is False and hasattr(result, "to_tuple") else result

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = self.ir.forward.interface.arguments
        if len(args) > len(names):
            raise InputError(
                f"{len(args)} positional arguments given", expected=f"at most {len(names)}: {', '.join(names)}"
            )
        given = dict(zip(names, args, strict=False))
        twice = [name for name in kwargs if name in given]
        if twice:
            raise InputError(f"argument {twice[0]!r} is given twice", do="give it once")
        return {**given, **kwargs}

    def _prepare(self, given: dict[str, Any]) -> dict[str, Any]:
        """Drop what is part of the graph already, run the prologue, cast as the model would."""
        interface = self.ir.forward.interface
        names = set(interface.input_names)
        if interface.prologue is not None:
            prepared = Prologue.from_dict(interface.prologue)(given)
            # What the prologue adds beyond the graph's inputs is not needed; what it read is used up.
            given = {name: value for name, value in prepared.items() if name in names or name in given}
        kept: dict[str, Any] = {}
        for name, value in given.items():
            if name in interface.containers:
                kept.update(interface.unpack(name, value))
            elif name in names or not self._is_settled(name, value):
                kept[name] = value
        if self.ir.model.config is not None:
            wanted = {item.name: getattr(torch, item.dtype) for item in interface.inputs}
            for name, value in kept.items():
                # Hugging Face models cast pixels and embeddings to their own dtype; ids stay as they are.
                is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
                if is_float and name in wanted and wanted[name].is_floating_point:
                    kept[name] = value.to(wanted[name])
        return kept

    def _is_settled(self, name: str, value: Any) -> bool:
        """Whether an argument that is no input says only what the graph does anyway."""
        interface = self.ir.forward.interface
        if name in interface.baked and _same(interface.baked[name], value):
            return True
        if value is None and (name in _FLAGS or interface.baked.get(name) in (None, False)):
            return True
        if name == "use_cache" and name not in interface.arguments:
            return True  # passed down to a tower that has no cache
        if name in _FLAGS:
            key = name.removeprefix("output_")
            if not value or name == "return_dict" or any(out.split(".")[0] == key for out in interface.outputs):
                return True
            do = f'program.apply(layergraph.TapOutputs("{key}"))' if name.startswith("output_") else "leave it out"
            raise InputError(f"{name}={value!r} is not part of this graph", expected=f"{name}=False", do=do)
        if name in interface.baked:
            raise InputError(
                f"{name} was {interface.baked[name]!r} when the model was traced, and is part of the graph",
                found=f"{name}={value!r}",
                do=f"trace again with {name}={value!r} among the example inputs",
            )
        return False

    def generate(self, *args: Any, adapter: Any = ACTIVE, engine: str = "eager", **kwargs: Any) -> Any:
        """transformers' own ``generate`` with all of its options, over the cached graph.

        Greedy, sampling, beams, assisted decoding (``assistant_model=other.for_generation()``), streamers, stopping
        criteria. Give the cache that it returned to go on with a conversation.

        Args:
            adapter: the adapter of a woven shadow to use; the active one by default, None for the base model.
            engine: ``eager`` replays the graph op by op, ``inductor`` compiles it first (once for a program).

        Raises:
            NotSupportedError: the program has no cached graph; says why.
        """
        return self.for_generation(adapter=adapter, engine=engine).generate(*args, **kwargs)

    def for_generation(self, *, adapter: Any = ACTIVE, engine: str = "eager") -> ProgramForGeneration:
        """The program as the kind of model that transformers' generation drives: as target or as assistant."""
        from layergraph.runtime.generate import ProgramForGeneration

        return ProgramForGeneration(self.ir, chosen_adapter(self, adapter), engine)

    def session(
        self,
        *,
        engine: str = "eager",
        capacity: int | None = None,
        adapter: Any = ACTIVE,
        cache: DualCache | None = None,
    ) -> Session:
        """One conversation, stepped by hand: a cache and ``step(tokens)``, with one adapter from first to last."""
        from layergraph.runtime.session import Session

        name = chosen_adapter(self, adapter)
        return Session(self.ir, cache, capacity=capacity, adapter=name, engine=engine)

    # Rewriting ----------------------------------------------------------------------------------------------------

    def apply(
        self, item: Pass | str, *, verify: bool = False, strict: bool = False, progress: Progress = None
    ) -> Program:
        """A new program with one more pass run on it; see :func:`layergraph.optimize` for the options."""
        if isinstance(item, (list, tuple)):
            raise InputTypeError(
                "apply takes one pass",
                found=f"{type(item).__name__} of {len(item)}",
                do="call it once for each, or layergraph.optimize(program, passes=[...])",
            )
        with progress_line(progress) as say:
            after = pipeline.run(
                self.ir,
                pipeline.resolve([item]),
                check=checker(verify),
                strict=strict,
                keep_weights=verify,
                prepare=preparer(),
                progress=say,
            )
        return Program(after)

    def remove(self, item: Pass | str, *, progress: Progress = None) -> Program:
        """A new program without one of its passes: the object, its label in :meth:`report`, or its name.

        Raises:
            NotFoundError: no such pass ran. InputError: it needs weights that a pass dropped.
        """
        with progress_line(progress) as say:
            return Program(
                pipeline.remove(self.ir, item, check=checker(False), prepare=preparer(self.ir.shadow), progress=say)
            )

    # Looking ------------------------------------------------------------------------------------------------------

    @property
    def exported(self) -> ExportedProgram:
        """The graph named ``forward``: keyword tensors in, a dict of tensors out."""
        return self.ir.forward.exported

    @property
    def programs(self) -> Mapping[str, ExportedProgram]:
        """All graphs by name; one state dict serves them."""
        return {name: unit.exported for name, unit in self.ir.graphs.items()}

    @property
    def fingerprint(self) -> str:
        """A hash of graphs and signatures: the same in every process, blind to names of temporaries and to weights."""
        return self.ir.fingerprint

    def print(self, graph: str = "forward", *, file: IO[str] | None = None) -> None:
        """Print the graph by layer; layers that compute the same are printed once."""
        print(printing.listing(self.ir, graph), file=file)

    def diff(self, other: Program, graph: str = "forward") -> str:
        """What changed from this program to ``other``, by layer."""
        return printing.diff(self.ir, other.ir, graph)

    def explain(self, what: str, graph: str = "forward") -> str:
        """Which pass made a node and from what, or what a module (by path) is made of."""
        return printing.explain(self.ir, what, graph)

    def report(self) -> Report:
        """What each pass did, sizes before and after. Print it, or take ``as_dict()``."""
        return Report.of(self.ir)

    def __str__(self) -> str:
        return printing.listing(self.ir)

    def __repr__(self) -> str:
        passes = ", ".join(record.label for record in self.ir.history) or "no passes"
        return f"<layergraph.Program {self.ir.model.cls.rpartition(':')[2]}: {passes}, {self.fingerprint[:12]}>"

    # Weights ------------------------------------------------------------------------------------------------------

    def state_dict(self, layout: str = "original") -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers: named and shaped as the model's (``original``), or as the graph's.

        Raises:
            InputError: an unknown layout.
        """
        if layout not in folders.LAYOUTS:
            raise InputError(f"unknown layout {layout!r}", expected=" or ".join(folders.LAYOUTS))
        state = self.ir.state_dict
        return dict(state) if layout == "graph" else self.ir.weights.to_original(state)

    def load_weights(self, folder: str | Path, *, progress: Progress = None) -> Program:
        """The same program over a checkpoint's weights (safetensors, sharded or not, named as the model's own).

        They are mapped straight into the graph's layout, one tensor at a time: for a model traced on the meta device.

        Raises:
            MissingFileError, FormatError, InputError: no checkpoint there, a damaged one, or one of another model.
        """
        with progress_line(progress) as say:
            return Program(checkpoint.load_weights(self.ir, folder, progress=say))

    def to(
        self,
        *targets: torch.device | str | int | torch.dtype,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        progress: Progress = None,
    ) -> Program:
        """A new program on another device, in another dtype, or both: ``program.to("cuda", torch.bfloat16)``.

        A device: weights, constants in the graph, adapters and example inputs move. A dtype: transformers makes the
        model again from class and config, over the same weights, as ``from_pretrained(..., dtype=...)`` casts them;
        it is traced, and the passes run again.

        Raises:
            InputError: no such device here, no dtype that models compute in, or two of a kind; InputTypeError: neither.
            NotSupportedError: another dtype, and the model cannot be traced again from its config alone: a plain
                module, or one that was traced from example inputs.
        """
        with progress_line(progress) as say:
            return Program(place(self.ir, *targets, device=device, dtype=dtype, progress=say))

    def as_module(self) -> ProgramModule:
        """An ``nn.Module`` that can stand where the traced module stood."""
        return ProgramModule(self)

    def save(self, folder: str | Path, layout: str = "original", *, progress: Progress = None) -> Path:
        """Write graph, weights and manifest; an older program in that folder is replaced in one step.

        In the original layout the folder is a checkpoint of the model's own kind as well.

        Raises:
            StorageError: the folder is a file or the disk is full; what was there before is still there.
        """
        with progress_line(progress) as say:
            return folders.save(self.ir, folder, layout=layout, progress=say)


__all__ = ["Program"]
