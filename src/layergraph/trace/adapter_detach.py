"""The shadow alone: backbone, projection and head of an adapter as a Hugging Face model that generates.

``head(projection(backbone(x)))``: the updates after each block need the base's outputs and do not exist without it.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput

from layergraph.errors import FormatError, LayerGraphError, MissingFileError, NotSupportedError, StorageError
from layergraph.ir.adapter import Adapter
from layergraph.ir.paths import as_path
from layergraph.ir.program import Program
from layergraph.trace.adapter_backbone import build_backbone, describe_base
from layergraph.trace.adapter_config import read_config
from layergraph.trace.source import find_class

_BACKBONE = "base_model.shadow_backbone.default."
_PROJECTION = "base_model.shadow_projection.default.weight"
_HEAD = "base_model.shadow_head.default."
_WEIGHTS, _SHAPE = "model.safetensors", "shadow.json"


class DetachedShadow(PreTrainedModel, GenerationMixin):
    """A shadow network without its base. Called and generates like any causal model, or classifies.

    Its embeddings are part of it, so what is saved is complete: ``save_pretrained`` writes it, and
    ``DetachedShadow.from_pretrained`` reads it. Trace it for a small program of its own:
    ``layergraph.trace(detached)``.
    """

    main_input_name = "input_ids"
    base_model_prefix = "backbone"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(
        self, backbone: Any, projection: nn.Module | None, head: nn.Module | None, *, classifies: bool = False
    ) -> None:
        super().__init__(backbone.config)
        self.backbone = backbone
        self.projection = projection if projection is not None else nn.Identity()
        self.head = head
        self.classifies = classifies
        self.generation_config = GenerationConfig.from_model_config(self.config) if self.can_generate() else None
        self._cache_name = "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write ``config.json`` (of the backbone), ``model.safetensors`` and ``shadow.json``, every tensor in full.

        Raises:
            StorageError: the folder is a file, cannot be written, or the disk is full.
        """
        folder = as_path(save_directory)
        state = {name: tensor.detach().contiguous().clone() for name, tensor in self.state_dict().items()}
        shape = {"backbone": f"{type(self.backbone).__module__}:{type(self.backbone).__qualname__}"}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.config.save_pretrained(folder)
            if self.generation_config is not None:
                self.generation_config.save_pretrained(folder)
            save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})
            (folder / _SHAPE).write_text(json.dumps({**shape, "classifies": self.classifies}, indent=2) + "\n")
        except (OSError, SafetensorError) as error:
            raise StorageError(
                "saving failed", path=str(folder), found=str(error), do="free space or choose another folder"
            ) from error

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> DetachedShadow:
        """What :meth:`save_pretrained` wrote, in eval mode. Nothing is unpickled.

        Raises:
            MissingFileError, FormatError: a file is not there, or damaged.
        """
        from transformers import AutoConfig

        folder = as_path(pretrained_model_name_or_path)
        for name in ("config.json", _WEIGHTS, _SHAPE):
            if not (folder / name).is_file():
                raise MissingFileError("no detached shadow is saved there", path=str(folder / name))
        try:
            shape = json.loads((folder / _SHAPE).read_text())
            state = load_file(folder / _WEIGHTS)
            config = AutoConfig.from_pretrained(folder)
            # Not on the meta device: buffers that are not saved (rotary tables) are made here.
            with torch.random.fork_rng(devices=[]):
                backbone = find_class(shape["backbone"])(config)
        except LayerGraphError:
            raise
        except Exception as error:
            raise FormatError(
                "the saved shadow cannot be read", path=str(folder), found=f"{type(error).__name__}: {error}"[:200]
            ) from error
        parts: dict[str, dict[str, torch.Tensor]] = {"backbone": {}, "projection": {}, "head": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, {})[rest] = tensor
        lacking = backbone.load_state_dict(parts["backbone"], strict=False, assign=True).missing_keys
        if lacking:
            raise FormatError("the saved shadow lacks a tensor", path=str(folder), found=f"no {lacking[0]}")
        projection, head = (_linear(parts[name]) if parts[name] else None for name in ("projection", "head"))
        return cls(backbone, projection, head, classifies=bool(shape["classifies"])).eval()

    def can_generate(self) -> bool:
        # Called by the base class's __init__, before there is a head.
        return getattr(self, "head", None) is not None and not getattr(self, "classifies", False)

    def get_input_embeddings(self) -> Any:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return None if self.classifies else self.head

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As a causal model, or a classifier of sequences, of the base's family."""
        kwargs.pop("return_dict", None)
        given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
        given[self._cache_name] = cache if cache is not None else past_key_values
        given = {name: value for name, value in given.items() if value is not None}
        out = self.backbone(attention_mask=attention_mask, use_cache=use_cache, return_dict=True, **given, **kwargs)
        hidden = self.projection(out.last_hidden_state)
        if self.head is None:
            return out
        if self.classifies:
            return self._classified(hidden, attention_mask, labels)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(hidden[:, keep, :])
        loss = None
        if labels is not None:
            flat = logits[..., :-1, :].reshape(-1, logits.shape[-1])
            loss = nn.functional.cross_entropy(flat, labels[..., 1:].reshape(-1), ignore_index=-100)
        past = getattr(out, "past_key_values", None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)

    def _classified(self, hidden: torch.Tensor, mask: torch.Tensor | None, labels: torch.Tensor | None) -> Any:
        if labels is not None:
            raise NotSupportedError("a detached classifier gives no loss", do="compute it from the logits")
        pooled = hidden[:, -1]
        if mask is not None:
            places = torch.arange(mask.shape[-1], device=mask.device)
            last = (mask.ne(0) * places).argmax(dim=-1)
            pooled = hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
        head: Any = self.head
        return SequenceClassifierOutput(logits=head(pooled))


def detach(program: Program, name: str, *, copy: bool) -> DetachedShadow:
    """The shadow of one adapter as a model of its own, in eval mode.

    Args:
        copy: its own tensors; False shares them with the program.
    """
    assert program.shadow is not None
    adapter = program.shadow[name]
    settings = read_config(adapter.config)
    base = describe_base(program)
    original = program.weights.to_original(program.state_dict)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if copy else tensor.detach()

    with torch.random.fork_rng(devices=[]):
        backbone = build_backbone(base, settings, has_weights=True, keeps_embeddings=True)
    state = {key.removeprefix(_BACKBONE): own(t) for key, t in adapter.tensors.items() if key.startswith(_BACKBONE)}
    backbone.module.load_state_dict(state, strict=False, assign=True)
    if backbone.shares and base.embeddings is not None:
        table = _saved(adapter, f"{base.embeddings}.weight", original)
        backbone.module.get_input_embeddings().load_state_dict({"weight": own(table)}, assign=True)
    projection = _linear({"weight": own(adapter.tensors[_PROJECTION])}) if _PROJECTION in adapter.tensors else None
    classifies = settings.task_type == "SEQ_CLS"
    head = None
    if classifies:
        found = {key.removeprefix(_HEAD): own(t) for key, t in adapter.tensors.items() if key.startswith(_HEAD)}
        head = _linear(found)
    elif base.head is not None:
        names = [name for name, _ in base.skeleton.get_submodule(base.head).named_parameters()]
        head = _linear({name: own(_saved(adapter, f"{base.head}.{name}", original)) for name in names})
    return DetachedShadow(backbone.module, projection, head, classifies=classifies).eval()


def _saved(adapter: Adapter, name: str, original: dict[str, torch.Tensor]) -> torch.Tensor:
    """A weight of the base, or the adapter's own copy of it."""
    return adapter.tensors.get(f"base_model.model.{name}", original[name])


def _linear(state: dict[str, torch.Tensor]) -> nn.Linear:
    weight = state["weight"]
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in state, device="meta")
    linear.load_state_dict(state, assign=True)
    return linear


__all__ = ["DetachedShadow", "detach"]
