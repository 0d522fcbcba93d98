"""Recipes for audio and other series: waves, spectrograms, frames of features, values over time."""

from __future__ import annotations

from typing import Any

import torch

from layergraph.trace.hf_request import Request, padded_mask, token_ids

# A whole number of frames for every codec: their frames are 80 to 3200 samples long.
_CODEC_SAMPLES = 19200
# Arguments by which codecs differ from encoders of speech; codecs take waves with an axis of channels.
_CODEC_ARGUMENTS = {"padding_mask", "audio_codes", "n_quantizers", "padding_cache"}


def audio(request: Request) -> dict[str, Any] | None:
    """Raw waves (batch, samples), spectrograms of one length, or frames of features; beside them a decoder's text."""
    made = _waves(request)
    if made is not None and "decoder_input_ids" in request.accepts:
        made["decoder_input_ids"] = token_ids(request, request.size("batch"), request.size("decoder_sequence"))
    return made


def wave(request: Request) -> torch.Tensor:
    """``input_values``: with channels for codecs, without for encoders of speech."""
    batch = request.size("batch")
    if request.accepts & _CODEC_ARGUMENTS:
        channels = request.get("audio_channels", "channels") or 1
        return request.normal(batch, channels, _CODEC_SAMPLES)
    return request.normal(batch, request.size("length", 3200))


def _waves(request: Request) -> dict[str, Any] | None:
    mels, length = request.get("num_mel_bins"), request.get("max_length")
    if "input_values" in request.accepts and "input_features" not in request.required():
        if mels and length:
            return {"input_values": request.normal(request.size("batch"), length, mels)}
        return {"input_values": wave(request)}
    if "spectrogram" in request.accepts and (width := request.get("model_in_dim")):
        return {"spectrogram": request.normal(request.size("batch"), request.size("length", 12), width)}
    if "input_features" in request.accepts:
        return _features(request, mels)
    return None


def _features(request: Request, mels: int | None) -> dict[str, Any] | None:
    batch = request.size("batch")
    if mels and (positions := request.get("max_source_positions")) is not None:
        length, made = 2 * positions, {"input_features": request.normal(batch, mels, 2 * positions)}
    elif mels and (window := request.get("n_window")) is not None:
        # Encoded in windows, here two of them
        length, made = 4 * window, {"input_features": request.normal(batch, mels, 4 * window)}
    elif width := _stacked_width(request) or mels or _feature_width(request):
        length = request.size("length", 48)
        made = {"input_features": request.normal(batch, length, width)}
    else:
        return None
    if "input_features_mask" in request.required() or _is_mask_needed(request):
        made["input_features_mask"] = padded_mask(request, batch, length)
    return made


def _is_mask_needed(request: Request) -> bool:
    """Encoders of Whisper's layout that take a mask read it, default or not."""
    return "input_features_mask" in request.accepts and request.get("max_source_positions") is not None


def _stacked_width(request: Request) -> int | None:
    """Features of several neighbouring frames side by side."""
    stacked, mels = request.get("num_stacked_frames"), request.get("num_mel_bins")
    return stacked * mels if stacked and mels else None


def _feature_width(request: Request) -> int | None:
    """Features of a frame where they are not plainly the config's mel bins."""
    width: int | None = request.get("feature_projection_input_dim", "input_feat_per_channel")
    encoder = request.get("encoder_config", "audio_config", "asr_config")
    return width or (request.get("num_mel_bins", config=encoder) if encoder is not None else None)


def series(request: Request) -> dict[str, Any] | None:
    """Forecasters: the past of a series in whole patches, of one channel or more."""
    patch = request.get("patch_length")
    if "past_values" not in request.accepts or patch is None:
        return None
    batch, channels = request.size("batch"), request.get("num_input_channels")
    if channels is not None:
        return {"past_values": request.normal(batch, request.get("context_length"), channels)}
    made = {"past_values": request.normal(batch, 4 * patch)}
    if "past_values_padding" in request.accepts:
        padding = torch.zeros(batch, 4 * patch, dtype=torch.long)
        padding[-1, : patch // 2] = 1
        made["past_values_padding"] = padding.to(request.device)
    if "freq" in request.accepts:
        made["freq"] = request.integers(range(request.get("freq_size") or 1), batch, 1)
    return made


__all__ = ["audio", "series", "wave"]
