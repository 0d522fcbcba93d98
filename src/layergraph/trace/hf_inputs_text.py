"""Recipes for text, and for what comes beside text in one argument each: boxes, regions, images of one size."""

from __future__ import annotations

from typing import Any

import torch

from layergraph.trace.hf_inputs_audio import wave
from layergraph.trace.hf_request import Request, image_shape, needs_padding_token, padded_mask, token_ids


def text_inputs(request: Request) -> dict[str, Any]:
    """Token ids and what a text model takes with them."""
    batch = request.size("batch", 1 if needs_padding_token(request) else None)
    length = request.size("sequence")
    made = {"input_ids": token_ids(request, batch, length)}
    if "attention_mask" in request.accepts:
        made["attention_mask"] = padded_mask(request, batch, length)
    if "token_type_ids" in request.accepts and (types := request.get("type_vocab_size")) and types > 1:
        made["token_type_ids"] = request.integers(range(2), batch, length)
    made |= _beside_text(request, batch, length)
    if "decoder_input_ids" in request.accepts:
        made["decoder_input_ids"] = token_ids(request, batch, request.size("decoder_sequence"))
    return made


def _beside_text(request: Request, batch: int, length: int) -> dict[str, Any]:
    """What some models cannot do without: the boxes of words, regions of an image, a wave."""
    made: dict[str, Any] = {}
    if "bbox" in request.accepts and request.get("dim_bbox", "relative_bias_args"):
        corners = request.uniform(batch, length, 2) / 2
        made["bbox"] = torch.cat([corners, corners + request.uniform(batch, length, 2) / 2], dim=-1)
    if "visual_feats" in request.accepts and (width := request.get("visual_feat_dim")):
        made["visual_feats"] = request.normal(batch, 6, width)
        made["visual_pos"] = request.uniform(batch, 6, request.get("visual_pos_dim"))
    if "input_values" in request.required():
        made["input_values"] = wave(request)
    return made


def text_and_image(request: Request) -> dict[str, Any] | None:
    """Dual encoders: text beside images, or clips, of one size."""
    if not {"input_ids", "pixel_values"} <= request.accepts or request.get("image_token_id", "image_token_index"):
        return None
    vision = request.get("vision_config")
    if vision is None and ({"pixel_mask"} & request.accepts or "input_ids" in request.required()):
        vision = request.config
    if vision is None:
        return None
    made = text_inputs(request)
    frames = request.get("num_frames", config=vision)
    shape = (*((frames,) if frames else ()), *image_shape(vision, request))
    return made | {"pixel_values": request.normal(request.size("batch"), *shape)}


def text(request: Request) -> dict[str, Any] | None:
    """Decoders, text encoders, encoder-decoders."""
    main = getattr(request.model, "main_input_name", "input_ids")
    # Text models inside others inherit the name of an input that they do not take
    if "input_ids" not in request.accepts or (main != "input_ids" and main in request.accepts):
        return None
    return text_inputs(request)


__all__ = ["text", "text_and_image", "text_inputs"]
