"""Recipes for example inputs: each looks at what a forward takes and makes it, or passes."""

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
# Grids (t, h, w) in merged patches: different sizes, a video among them where there are three
_GRIDS = ((1, 2, 3), (1, 4, 2), (2, 1, 3), (1, 3, 3))


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
            default = _DEFAULTS.get(label, 0) + (longest_chunk(_text(self)) if label == "sequence" else 0)
        value = self._sizes.get(label, default)
        if value < 1:
            raise InputError(f"{label} of {value} is no size")
        return value

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)

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
        if _needs_padding_token(self):
            fixed.add("batch")
        if self.get("max_source_positions") is not None and "input_features" in self.accepts:
            fixed.add("length")  # Whisper's encoder takes 30 seconds, no more and no less
        if "input_values" in self.accepts and self.get("num_mel_bins") and self.get("max_length"):
            fixed.add("length")
        return fixed


Recipe = Callable[[Request], "dict[str, Any] | None"]


def _needs_padding_token(request: Request) -> bool:
    """Heads that pool the last token find it by its padding token; without one they take a batch of one."""
    name = type(request.model).__name__
    return name.endswith("ForSequenceClassification") and request.get("pad_token_id", config=_text(request)) is None


def longest_chunk(config: Any) -> int:
    """Tokens that layers with states take at a time, 0 for all: a trace of one chunk would hold for one."""
    types = getattr(config, "layer_types", None)
    if not isinstance(types, (list, tuple)) or not _STATE_LAYERS.intersection(types):
        return 0
    sizes = [value for name, value in config.to_dict().items() if name.endswith("chunk_size")]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _text(request: Request) -> Any:
    getter = getattr(request.config, "get_text_config", None)
    return getter() if getter is not None else request.config


def _ids(request: Request, *shape: int) -> torch.Tensor:
    """Token ids that mean nothing special to the model."""
    vocab = request.get("vocab_size", config=_text(request))
    if vocab is None:
        raise TraceError(
            f"{type(request.model).__name__} has no vocab_size", do="pass example_inputs=", shell=NEEDS_PYTHON
        )
    special: set[int] = set()
    for config in (request.config, _text(request)):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(v for v in (value if isinstance(value, (list, tuple)) else [value]) if v is not None)
    return request.integers([i for i in range(min(vocab, 2000)) if i not in special], *shape)


def _padded(request: Request, batch: int, length: int) -> torch.Tensor:
    """A mask over tokens whose last row ends in padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if batch > 1 and length > 2:
        mask[-1, -2:] = 0
    return mask.to(request.device)


def _text_inputs(request: Request) -> dict[str, Any]:
    batch = request.size("batch", 1 if _needs_padding_token(request) else None)
    length = request.size("sequence")
    made = {"input_ids": _ids(request, batch, length)}
    if "attention_mask" in request.accepts:
        made["attention_mask"] = _padded(request, batch, length)
    if "token_type_ids" in request.accepts and (types := request.get("type_vocab_size")) and types > 1:
        made["token_type_ids"] = request.integers(range(2), batch, length)
    if "decoder_input_ids" in request.accepts:
        made["decoder_input_ids"] = _ids(request, batch, request.size("decoder_sequence"))
    return made


def _image_shape(config: Any, request: Request) -> tuple[int, int, int]:
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


# ---- recipes, in the order in which they are asked ----


def packed_patches(request: Request) -> dict[str, Any] | None:
    """Towers that take flat patches of images of any size: ``hidden_states`` or ``pixel_values`` and ``grid_thw``."""
    if "grid_thw" not in request.accepts:
        return None
    name = next((n for n in ("hidden_states", "pixel_values") if n in request.accepts), None)
    if name is None:
        return None
    grids = _grids(request, request.config)
    n_patches = int(grids.prod(dim=1).sum())
    return {
        name: request.normal(n_patches, _patch_features(request, request.config)),
        "grid_thw": _placed(request, grids),
    }


def images_in_text(request: Request) -> dict[str, Any] | None:
    """Vision-language models that take flat patches: text with one run of image tokens a row, and padding."""
    if not {"input_ids", "pixel_values", "image_grid_thw"} <= request.accepts:
        return None
    vision = request.config.vision_config
    batch = request.size("batch", request.size("images"))
    if request.size("images", batch) != batch:
        raise InputError("images and batch differ", do="ask for as many images as rows: each row holds one")
    grids = _grids(request, vision, batch)
    n_tokens = [int(grid.prod()) // _merge(request, vision) ** 2 for grid in grids]
    length = request.size("sequence", max(n_tokens) + 6)
    if length < max(n_tokens) + 4:
        raise InputError(f"sequence of {length} is too short for the images", expected=f"{max(n_tokens) + 4} or more")
    image = request.get("image_token_id", "image_token_index")
    start = request.get("vision_start_token_id", "image_start_token_id")
    end = request.get("vision_end_token_id", "image_end_token_id")
    ids, types = _ids(request, batch, length).cpu(), torch.zeros(batch, length, dtype=torch.int32)
    for row, n in enumerate(n_tokens):
        ids[row, 2 : 2 + n] = image
        types[row, 2 : 2 + n] = 1
        for place, token in ((1, start), (2 + n, end)):
            if isinstance(token, int):
                ids[row, place] = token
    made = {"input_ids": ids.to(request.device), "attention_mask": torch.ones_like(ids).to(request.device)}
    if "mm_token_type_ids" in request.accepts:
        made["mm_token_type_ids"] = types.to(request.device)
    made["pixel_values"] = request.normal(int(grids.prod(dim=1).sum()), _patch_features(request, vision))
    made["image_grid_thw"] = _placed(request, grids)
    return made


def text_and_image(request: Request) -> dict[str, Any] | None:
    """Dual encoders: text beside images of one size."""
    if not {"input_ids", "pixel_values"} <= request.accepts or request.get("image_token_id", "image_token_index"):
        return None
    vision = request.get("vision_config")
    if vision is None:
        return None
    made = _text_inputs(request)
    return made | {"pixel_values": request.normal(request.size("batch"), *_image_shape(vision, request))}


def text(request: Request) -> dict[str, Any] | None:
    """Decoders, text encoders, encoder-decoders."""
    if "input_ids" not in request.accepts or getattr(request.model, "main_input_name", "input_ids") != "input_ids":
        return None
    return _text_inputs(request)


def video(request: Request) -> dict[str, Any] | None:
    """Clips of one size: (batch, frames, channels, height, width)."""
    frames = request.get("num_frames", "frames_per_clip")
    name = next((n for n in ("pixel_values_videos", "pixel_values") if n in request.accepts), None)
    if frames is None or name is None:
        return None
    return {name: request.normal(request.size("batch"), frames, *_image_shape(request.config, request))}


def image(request: Request) -> dict[str, Any] | None:
    """Images of one size: (batch, channels, height, width)."""
    if "pixel_values" not in request.accepts:
        return None
    return {"pixel_values": request.normal(request.size("batch"), *_image_shape(request.config, request))}


def audio(request: Request) -> dict[str, Any] | None:
    """Raw waves (batch, samples), spectrograms of one length, or frames of features; beside them a decoder's text."""
    made = _waves(request)
    if made is not None and "decoder_input_ids" in request.accepts:
        made["decoder_input_ids"] = _ids(request, request.size("batch"), request.size("decoder_sequence"))
    return made


def _waves(request: Request) -> dict[str, Any] | None:
    mels, length = request.get("num_mel_bins"), request.get("max_length")
    if "input_values" in request.accepts:
        if mels and length:
            return {"input_values": request.normal(request.size("batch"), length, mels)}
        if request.get("conv_stride") or "decoder_input_ids" in request.accepts:
            return {"input_values": request.normal(request.size("batch"), request.size("length", 3200))}
    if "input_features" in request.accepts:
        if mels and (positions := request.get("max_source_positions")) is not None:
            return {"input_features": request.normal(request.size("batch"), mels, 2 * positions)}
        if width := mels or _feature_width(request):
            return {"input_features": request.normal(request.size("batch"), request.size("length", 48), width)}
    return None


def _feature_width(request: Request) -> int | None:
    """Features of a frame where they are not plainly the config's mel bins."""
    width: int | None = request.get("feature_projection_input_dim", "input_feat_per_channel")
    encoder = request.get("encoder_config", "audio_config")
    return width or (request.get("num_mel_bins", config=encoder) if encoder is not None else None)


def embeddings(request: Request) -> dict[str, Any] | None:
    """Parts of models that take states of the model's width where others take token ids."""
    width = request.get("hidden_size", "d_model")
    if request.required() != ["inputs_embeds"] or width is None:
        return None
    return {"inputs_embeds": request.normal(request.size("batch"), request.size("sequence"), width)}


RECIPES: tuple[Recipe, ...] = (
    packed_patches,
    images_in_text,
    text_and_image,
    text,
    video,
    image,
    audio,
    embeddings,
)


# ---- packed patches ----


def _merge(request: Request, config: Any) -> int:
    return request.get("spatial_merge_size", config=config) or 1


def _patch_features(request: Request, config: Any) -> int:
    """Channels x frames x height x width of one patch."""
    channels = request.get("in_channels", "num_channels", "in_chans", config=config) or 3
    patch, frames = (request.get(n, config=config) or 1 for n in ("patch_size", "temporal_patch_size"))
    side = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    return channels * (frames[0] if isinstance(frames, (list, tuple)) else frames) * side[0] * side[1]


def _grids(request: Request, config: Any, n_images: int | None = None) -> torch.Tensor:
    """(images, 3) of t, h, w in patches, of different sizes unless ``patches`` leaves no choice."""
    merge = _merge(request, config)
    n_images = n_images if n_images is not None else request.size("images")
    grids = torch.tensor([_GRIDS[i % len(_GRIDS)] for i in range(n_images)])
    grids[:, 0] = 1 if not _takes_videos(request) else grids[:, 0]
    if request.asked("patches"):
        # One merged patch for each image but the last, which takes the rest in one row
        n_merged, rest = divmod(request.size("patches"), merge**2)
        if rest or n_merged < n_images:
            raise InputError(
                f"{request.size('patches')} patches are no {n_images} images",
                expected=f"a multiple of {merge**2}, at least {n_images * merge**2}",
            )
        grids = torch.ones(n_images, 3, dtype=torch.long)
        grids[-1, 2] = n_merged - n_images + 1
    request.used.add("patches")
    return grids * torch.tensor([1, merge, merge])


def _takes_videos(request: Request) -> bool:
    """Towers that look a grid up by segment take images only, one frame each (glm4v)."""
    return not any(hasattr(m, "interpolated_method") for m in request.model.modules())


def _placed(request: Request, grids: torch.Tensor) -> torch.Tensor:
    # Its values are read on the host, so it never goes to the meta device
    return grids if request.device.type == "meta" else grids.to(request.device)


__all__ = [
    "NEEDS_PYTHON",
    "RECIPES",
    "Recipe",
    "Request",
    "audio",
    "embeddings",
    "image",
    "images_in_text",
    "longest_chunk",
    "packed_patches",
    "text",
    "text_and_image",
    "video",
]
