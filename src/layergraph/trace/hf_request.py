"""What recipes for example inputs work with: a model, its config, the sizes asked for, values of the usual kinds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from layergraph.errors import InputError, TraceError

# The remedy on the command line, which has no way to say example inputs.
NEEDS_PYTHON = "trace it in Python, with example inputs, and save that; or take another part: --submodule PATH"

# Layers that keep a summary of the past.
_STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "hybrid", "hybrid_sliding"}
_DEFAULTS = {"batch": 2, "sequence": 7, "decoder_sequence": 5, "images": 2}


class Request:
    """What to make: a model, the sizes asked for, and a seed.

    Attributes:
        model, config: the model and its config.
        accepts: names of the forward's arguments.
        used: size labels that the recipe at work looked at.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int], seed: int) -> None:
        self.model = model
        self.config: Any = getattr(model, "config", None)
        parameters = inspect.signature(model.forward).parameters.values()
        self.accepts = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        self._required = [p.name for p in parameters if p.default is p.empty and p.name in self.accepts]
        self._sizes = dict(sizes)
        self.used: set[str] = set()
        self._generator = torch.Generator().manual_seed(seed)
        tensor = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), None)
        self.device = tensor.device if tensor is not None else torch.device("cpu")
        self.dtype = tensor.dtype if tensor is not None else torch.float32

    def required(self) -> list[str]:
        return self._required

    def asked(self, label: str) -> bool:
        return label in self._sizes

    def size(self, label: str, default: int | None = None) -> int:
        self.used.add(label)
        if default is None:
            default = _DEFAULTS.get(label, 0) + (longest_chunk(text_config(self)) if label == "sequence" else 0)
        value = self._sizes.get(label, default)
        if value < 1:
            raise InputError(f"{label} of {value} is no size")
        return value

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator).to(self.device, self.dtype)

    def integers(self, choices: list[int] | range, *shape: int) -> torch.Tensor:
        index = torch.randint(len(choices), shape, generator=self._generator)
        return torch.tensor(choices)[index].to(self.device)

    def get(self, *names: str, config: Any = None) -> Any:
        """First config field of ``names`` that is set."""
        config = config if config is not None else self.config
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    def fixed_labels(self) -> set[str]:
        """Labels that this model keeps fixed, although inputs of that name vary elsewhere."""
        fixed = set()
        if needs_padding_token(self):
            fixed.add("batch")
        if self.get("max_source_positions") is not None and "input_features" in self.accepts:
            fixed.add("length")  # Whisper's encoder takes 30 seconds, no more and no less
        if self.get("n_window") is not None:
            fixed.add("length")  # Whole windows
        if "input_values" in self.accepts and self.get("num_mel_bins") and self.get("max_length"):
            fixed.add("length")
        return fixed


Recipe = Callable[[Request], "dict[str, Any] | None"]


def needs_padding_token(request: Request) -> bool:
    """Heads that pool the last token find it by its padding token; without one they take a batch of one."""
    name = type(request.model).__name__
    return (
        name.endswith("ForSequenceClassification") and request.get("pad_token_id", config=text_config(request)) is None
    )


def longest_chunk(config: Any) -> int:
    """Tokens that layers with states take at a time, 0 for all: a trace of one chunk would hold for one."""
    types = getattr(config, "layer_types", None)
    if not isinstance(types, (list, tuple)) or not _STATE_LAYERS.intersection(types):
        return 0
    sizes = [value for name, value in config.to_dict().items() if name.endswith("chunk_size")]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def text_config(request: Request) -> Any:
    config = request.get("model_config") or request.config
    getter = getattr(config, "get_text_config", None)
    return getter() if getter is not None else config


def token_ids(request: Request, *shape: int) -> torch.Tensor:
    """Token ids that mean nothing special to the model."""
    vocab = request.get("vocab_size", config=text_config(request))
    if vocab is None and request.get("num_hash_buckets"):
        vocab = 1000  # Code points: it hashes them
    if vocab is None:
        raise TraceError(
            f"{type(request.model).__name__} has no vocab_size", do="pass example_inputs=", shell=NEEDS_PYTHON
        )
    special: set[int] = set()
    for config in (request.config, text_config(request)):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(v for v in (value if isinstance(value, (list, tuple)) else [value]) if v is not None)
    return request.integers([i for i in range(min(vocab, 2000)) if i not in special], *shape)


def padded_mask(request: Request, batch: int, length: int) -> torch.Tensor:
    """A mask over tokens whose last row ends in padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if batch > 1 and length > 2:
        mask[-1, -2:] = 0
    return mask.to(request.device)


def image_shape(config: Any, request: Request) -> tuple[int, int, int]:
    """Channels, height, width."""
    image = request.get("image_size", "crop_size", "img_size", "resolution", config=config)
    if image is None:
        image = 32
    if isinstance(image, Mapping):
        height, width = image["height"], image["width"]
    else:
        height, width = (image, image) if isinstance(image, int) else (image[0], image[-1])
    channels = request.get("num_channels", "in_channels", "in_chans", config=config)
    return channels or 3, height, width


__all__ = [
    "NEEDS_PYTHON",
    "Recipe",
    "Request",
    "image_shape",
    "longest_chunk",
    "needs_padding_token",
    "padded_mask",
    "text_config",
    "token_ids",
]
