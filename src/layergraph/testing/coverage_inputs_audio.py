"""Example inputs of audio models with arguments of their own: parts of codecs, vocoders, decoders of codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layergraph.trace.hf_request import Request, padded_mask, token_ids

Maker = Callable[[Request], dict[str, Any]]
BATCH, LENGTH = 2, 7


def text_beside(r: Request) -> dict[str, Any]:
    """Text, where something else comes beside it."""
    return {"input_ids": token_ids(r, BATCH, LENGTH), "attention_mask": padded_mask(r, BATCH, LENGTH)}


def _latents(r: Request) -> dict[str, Any]:
    return {"latents": r.normal(BATCH, r.config.hidden_size, 6)}


def _mel_channels_first(r: Request) -> dict[str, Any]:
    return {"input_features": r.normal(BATCH, r.config.num_mel_bins, 48)}


def _packed_clips(r: Request) -> dict[str, Any]:
    lengths = torch.tensor([150, 90])
    return {"input_features": r.normal(r.config.num_mel_bins, int(lengths.sum())), "feature_lens": lengths}


def _stacked_frames(r: Request) -> dict[str, Any]:
    # Four neighbouring frames side by side: so many are written into the model's code
    width = 4 * (r.get("num_mel_bins") or r.config.encoder_config.num_mel_bins)
    return {"input_features": r.normal(BATCH, 48, width)}


def _wave_chunks(r: Request) -> dict[str, Any]:
    frames = 64
    lengths = torch.tensor([frames, frames - 16]) * r.config.hop_length
    return {
        "input_features": r.normal(BATCH, r.config.feature_size, frames),
        "chunk_sample_lengths": lengths,
    }


def _speech_states(r: Request) -> dict[str, Any]:
    width = r.config.hidden_size
    return {"input_values": r.normal(BATCH, 9, width), "decoder_input_values": r.normal(BATCH, 5, width)}


def _wave_and_features(r: Request) -> dict[str, Any]:
    # One frame of features for 320 samples
    width = r.config.semantic_model_config.feature_projection_input_dim
    return {"input_values": r.normal(BATCH, 1, 320 * 12), "input_features": r.normal(BATCH, 12, width)}


def _codes(r: Request, name: str, channels: int) -> dict[str, Any]:
    return {name: token_ids(r, BATCH, LENGTH, channels)}


def _codes_in_rows(r: Request) -> dict[str, Any]:
    return {"input_ids": token_ids(r, BATCH * r.config.num_codebooks, LENGTH)}


def _text_then_codes(r: Request) -> dict[str, Any]:
    text, codes = token_ids(r, BATCH, LENGTH, 1), token_ids(r, BATCH, LENGTH, r.config.num_codebooks)
    return {"input_ids": torch.cat([text, codes], dim=-1)}


def _diffusion_of_mels(r: Request) -> dict[str, Any]:
    c, frames = r.config, 12
    return {
        "hidden_states": r.normal(BATCH, frames, c.mel_dim),
        "condition_vector": r.normal(BATCH, 20, c.mel_dim),
        "speaker_embedding": r.normal(BATCH, frames, c.enc_emb_dim),
        "quantized_code": r.integers(range(c.num_embeds - 1), BATCH, frames // c.repeats),
        "time_step": r.uniform(1)[0],
    }


def _mel_and_padding(r: Request, name: str, mask: str) -> dict[str, Any]:
    # Masks called audio_mel_mask are true where there is padding, others where there is sound
    valid = padded_mask(r, BATCH, 48).bool()
    width = r.get("input_feat_size", "input_size") or 128
    return {name: r.normal(BATCH, 48, width), mask: ~valid if mask == "audio_mel_mask" else valid}


def _text_and_spectrogram(r: Request) -> dict[str, Any]:
    return {**text_beside(r), "input_features": r.normal(BATCH, 80, 40)}


def _clap(r: Request) -> dict[str, Any]:
    audio = r.get("audio_config") or r.config
    made = {"input_features": r.normal(BATCH, 1, audio.spec_size, audio.num_mel_bins)}
    return (text_beside(r) if "input_ids" in r.accepts else {}) | made


def _dialogue(r: Request) -> dict[str, Any]:
    return text_beside(r) | _codes(r, "decoder_input_ids", r.config.decoder_config.num_channels)


def _cross_attended_codes(r: Request) -> dict[str, Any]:
    return _codes(r, "input_ids", r.config.num_channels) | {
        "encoder_hidden_states": r.normal(BATCH, 5, r.config.cross_hidden_size)
    }


def _depth_codes(r: Request) -> dict[str, Any]:
    ids = token_ids(r, BATCH, r.config.num_codebooks)
    return {"input_ids": ids, "last_hidden_state": r.normal(BATCH, 1, r.config.input_size)}


def _audio_on_text(r: Request) -> dict[str, Any]:
    # Every token has the sound of its time added
    frames = LENGTH * r.config.audio_length_per_tok
    return text_beside(r) | {"input_features": r.normal(BATCH, r.config.audio_config.num_mel_bins, frames)}


AUDIO_MAKERS: dict[str, Maker] = {
    "ClapAudioModel": _clap,
    "ClapModel": _clap,
    "ClvpModelForConditionalGeneration": _text_and_spectrogram,
    "DiaDecoder": _cross_attended_codes,
    "DiaModel": _dialogue,
    "Dots3NoteAudioModel": _wave_chunks,
    "Gemma3nAudioEncoder": lambda r: _mel_and_padding(r, "audio_mel", "audio_mel_mask"),
    "Gemma4AudioModel": lambda r: _mel_and_padding(r, "input_features", "attention_mask"),
    "GlmAsrEncoder": _mel_channels_first,
    "GraniteSpeech5Encoder": _stacked_frames,
    "GraniteSpeech5ForCTC": _stacked_frames,
    "InklingAudioModel": lambda r: {
        "audio_input_ids": r.integers(range(r.config.codebook_size), 9, r.config.num_codebooks)
    },
    "KyutaiSpeechToTextModel": _text_then_codes,
    "MimiDecoderModel": _latents,
    "MoshiDepthDecoder": _depth_codes,
    "MusicgenMelodyModel": _codes_in_rows,
    "MusicgenModel": _codes_in_rows,
    "NeuCodecModel": _wave_and_features,
    "Phi4MultimodalAudioModel": lambda r: _mel_and_padding(r, "hidden_states", "mask"),
    "PocketTTSAudioTokenizerDecoderModel": _latents,
    "Qwen2_5OmniAudioEncoder": _packed_clips,
    "Qwen2_5OmniToken2WavBigVGANModel": lambda r: {"mel_spectrogram": r.normal(BATCH, r.config.mel_dim, 12)},
    "Qwen2_5OmniToken2WavDiTModel": _diffusion_of_mels,
    "Qwen3OmniMoeAudioEncoder": _packed_clips,
    "Qwen3OmniMoeTalkerCodePredictorModel": lambda r: {"inputs_embeds": r.normal(BATCH, LENGTH, r.config.hidden_size)},
    "SpeechT5Model": _speech_states,
    "VibeVoiceAcousticTokenizerDecoderModel": lambda r: {"hidden_states": r.normal(BATCH, r.config.hidden_size, 6)},
    "VibeVoiceAcousticTokenizerEncoderModel": lambda r: {"hidden_states": r.normal(BATCH, r.config.channels, 19200)},
    "VoxtralRealtimeEncoder": _mel_channels_first,
    "VoxtralRealtimeModel": _audio_on_text,
    "Xcodec2Model": _wave_and_features,
}


__all__ = ["AUDIO_MAKERS", "BATCH", "LENGTH", "Maker", "text_beside"]
