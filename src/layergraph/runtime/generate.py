"""transformers' own ``generate`` over a program: every option of it, our graph and our cache underneath."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from layergraph.compat import generation_cache_argument
from layergraph.errors import InputError, NotSupportedError
from layergraph.ir.execute import run_graph
from layergraph.ir.program import Program
from layergraph.ir.template import fill_template
from layergraph.runtime.cache import DualCache
from layergraph.runtime.session import Session
from layergraph.runtime.uncached import no_cached_graph, writes_text

CACHE_NAME = generation_cache_argument()


class ProgramForGeneration(PreTrainedModel, GenerationMixin):
    """A program where transformers expects a model that generates: target or assistant of ``generate``.

    Holds no parameters of its own. Safe for many threads: a call's state is in its cache.
    """

    main_input_name = "input_ids"
    base_model_prefix = ""
    _supports_sdpa = True
    _is_stateful = False

    def __init__(self, program: Program, adapter: str | None = None, engine: str = "eager") -> None:
        config = _config_of(program)
        config._attn_implementation = "eager"  # says nothing about the graph; keeps transformers from choosing
        super().__init__(config)
        self._program = program
        self._adapter = adapter
        self._engine = engine
        if program.shadow is not None and adapter is not None:
            program.shadow[adapter]  # raises if there is none
        generation = program.model.generation_config
        if generation is not None:
            self.generation_config = GenerationConfig.from_dict(dict(generation))

    @property
    def device(self) -> torch.device:
        return next(iter(self._program.state.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(tensor.dtype for tensor in self._program.state.values() if tensor.is_floating_point())

    def can_generate(self) -> bool:
        return True

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own; the cache goes by its current name and by the older one.

        Raises:
            NotSupportedError: there is no graph for it. Said before transformers is asked for anything.
        """
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or self.generation_config
        uses_cache = kwargs["use_cache"] if kwargs.get("use_cache") is not None else config.use_cache
        is_able = writes_text(self._program) if uses_cache is False else "step" in self._program.graphs
        if not is_able:
            raise no_cached_graph(self._program)
        for name in ("cache", "past_key_values"):
            if name != CACHE_NAME and name in kwargs:
                kwargs[CACHE_NAME] = kwargs.pop(name)
        return super().generate(*args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Ours instead of a DynamicCache; a cache that the caller gives must be ours too."""
        given = model_kwargs.get(CACHE_NAME)
        if given is not None and not isinstance(given, DualCache):
            raise InputError(
                "a program goes on only with a cache of its own kind",
                expected="layergraph.DualCache",
                found=type(given).__name__,
                do="pass the cache that generate() returned, or none",
            )
        if given is None and generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = DualCache(self._program, device=self.device)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        held = cache if cache is not None else past_key_values
        if held is None:
            if input_ids is None or inputs_embeds is not None:
                raise NotSupportedError("the uncached graph takes token ids, not embeddings", do="use_cache=True")
            self._refuse_missing("forward", kwargs)
            return self._uncached(input_ids, attention_mask, position_ids, logits_to_keep)
        if not isinstance(held, DualCache):
            raise InputError("not a cache of a program", expected="layergraph.DualCache", found=type(held).__name__)
        self._refuse_missing("step", kwargs)
        session = Session(self._program, held, adapter=self._adapter, engine=self._engine)
        outputs = session.step(input_ids, attention_mask, position_ids, logits_to_keep, inputs_embeds=inputs_embeds)
        result = fill_template(session.unit.interface.template, outputs)
        result[CACHE_NAME] = held
        return result

    def _refuse_missing(self, graph: str, flags: dict[str, Any]) -> None:
        """Asking for hidden states and the like where no tap returns them is an error, not an empty field."""
        outputs = self._program[graph].interface.outputs
        for flag, value in flags.items():
            key = flag.removeprefix("output_")
            if flag != key and value and not any(name.partition(".")[0] == key for name in outputs):
                raise InputError(
                    f"{flag}=True, and the {graph} graph returns no {key}",
                    expected=f"{flag}=False",
                    do=f'program.apply(layergraph.TapOutputs("{key}")) before generate()',
                    shell=f"layergraph optimize FOLDER --tap {key} -o OUT, and generate from OUT; "
                    f"or take {flag} out of generation_config.json",
                )

    def _uncached(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
    ) -> Any:
        unit = self._program.forward
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        names = unit.interface.input_names
        given |= self._program.adapter_inputs("forward", self._adapter)
        tensors = unit.interface.check({name: value for name, value in given.items() if name in names})
        with torch.no_grad():
            outputs = run_graph(unit, tensors)
        if isinstance(logits_to_keep, int) and logits_to_keep:
            outputs["logits"] = outputs["logits"][:, -logits_to_keep:]
        return fill_template(unit.interface.template, outputs)


def _config_of(program: Program) -> Any:
    if program.model.config is None or program.model.config_class is None:
        raise NotSupportedError(
            "only programs of Hugging Face models generate", found=program.model.cls, do="step the program yourself"
        )
    module, _, name = program.model.config_class.partition(":")
    if module.partition(".")[0] != "transformers":
        raise NotSupportedError("the model's config is not part of transformers", found=module)
    return getattr(importlib.import_module(module), name).from_dict(dict(program.model.config))


__all__ = ["CACHE_NAME", "ProgramForGeneration"]
