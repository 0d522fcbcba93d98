"""Recipes for example inputs: each looks at what a forward takes and makes it, or passes."""

from __future__ import annotations

from typing import Any

from layergraph.trace.hf_inputs_audio import audio, series
from layergraph.trace.hf_inputs_patches import flattened_patches, images_in_text, packed_patches, padded_patches
from layergraph.trace.hf_inputs_text import text, text_and_image
from layergraph.trace.hf_request import Recipe, Request, image_shape, token_ids


def video(request: Request) -> dict[str, Any] | None:
    """Clips of one size: (batch, frames, channels, height, width)."""
    frames = request.get("num_frames", "frames_per_clip")
    name = next((n for n in ("pixel_values_videos", "pixel_values") if n in request.accepts), None)
    if frames is None or name is None:
        return None
    return {name: request.normal(request.size("batch"), frames, *image_shape(request.config, request))}


def image(request: Request) -> dict[str, Any] | None:
    """Images of one size: (batch, channels, height, width)."""
    if "pixel_values" not in request.accepts:
        return None
    vision = request.get("encoder") if "decoder_input_ids" in request.accepts else None
    made = {"pixel_values": request.normal(request.size("batch"), *image_shape(vision or request.config, request))}
    if "decoder_input_ids" in request.accepts:
        made["decoder_input_ids"] = token_ids(request, request.size("batch"), request.size("decoder_sequence"))
    return made


def embeddings(request: Request) -> dict[str, Any] | None:
    """Parts of models that take states of the model's width where others take token ids."""
    name = next((n for n in ("inputs_embeds", "hidden_states", "inputs") if request.required() == [n]), None)
    width = request.get("input_dim", "d_model" if name == "inputs" else "hidden_size", "d_model")
    if name is None or not isinstance(width, int):
        return None
    return {name: request.normal(request.size("batch"), request.size("sequence"), width)}


RECIPES: tuple[Recipe, ...] = (
    packed_patches,
    images_in_text,
    padded_patches,
    flattened_patches,
    text_and_image,
    text,
    video,
    image,
    audio,
    series,
    embeddings,
)


__all__ = ["RECIPES", "embeddings", "image", "video"]
