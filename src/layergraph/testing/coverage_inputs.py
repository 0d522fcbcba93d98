"""Example inputs of model classes whose arguments are nobody else's: parts of codecs, decoders of masks, resamplers.

What holds by argument name for any model is a recipe of :mod:`layergraph.trace.hf_inputs` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layergraph.trace.hf_request import Request, image_shape, padded_mask, token_ids
from layergraph.trace.inputs import make_example_inputs

Maker = Callable[[Request], dict[str, Any]]
_BATCH, _LENGTH = 2, 7


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Inputs for any model of the coverage run: from the table here, else from the recipes."""
    maker = _MAKERS.get(type(model).__name__)
    return make_example_inputs(model) if maker is None else maker(Request(model, {}, seed=0))


def is_special(model: nn.Module) -> bool:
    """Whether its inputs come from the table here, which makes them in one size only."""
    return type(model).__name__ in _MAKERS


# Audio ------------------------------------------------------------------------------------------------------------


def _latents(r: Request) -> dict[str, Any]:
    return {"latents": r.normal(_BATCH, r.config.hidden_size, 6)}


def _mel_channels_first(r: Request) -> dict[str, Any]:
    return {"input_features": r.normal(_BATCH, r.config.num_mel_bins, 48)}


def _packed_clips(r: Request) -> dict[str, Any]:
    lengths = torch.tensor([150, 90])
    return {"input_features": r.normal(r.config.num_mel_bins, int(lengths.sum())), "feature_lens": lengths}


def _stacked_frames(r: Request) -> dict[str, Any]:
    # Four neighbouring frames side by side: so many are written into the model's code
    width = 4 * (r.get("num_mel_bins") or r.config.encoder_config.num_mel_bins)
    return {"input_features": r.normal(_BATCH, 48, width)}


def _wave_chunks(r: Request) -> dict[str, Any]:
    frames = 64
    lengths = torch.tensor([frames, frames - 16]) * r.config.hop_length
    return {
        "input_features": r.normal(_BATCH, r.config.feature_size, frames),
        "chunk_sample_lengths": lengths,
    }


def _speech_states(r: Request) -> dict[str, Any]:
    width = r.config.hidden_size
    return {"input_values": r.normal(_BATCH, 9, width), "decoder_input_values": r.normal(_BATCH, 5, width)}


def _wave_and_features(r: Request) -> dict[str, Any]:
    # One frame of features for 320 samples
    width = r.config.semantic_model_config.feature_projection_input_dim
    return {"input_values": r.normal(_BATCH, 1, 320 * 12), "input_features": r.normal(_BATCH, 12, width)}


def _codes(r: Request, name: str, channels: int) -> dict[str, Any]:
    return {name: token_ids(r, _BATCH, _LENGTH, channels)}


def _codes_in_rows(r: Request) -> dict[str, Any]:
    return {"input_ids": token_ids(r, _BATCH * r.config.num_codebooks, _LENGTH)}


def _text_then_codes(r: Request) -> dict[str, Any]:
    text, codes = token_ids(r, _BATCH, _LENGTH, 1), token_ids(r, _BATCH, _LENGTH, r.config.num_codebooks)
    return {"input_ids": torch.cat([text, codes], dim=-1)}


def _diffusion_of_mels(r: Request) -> dict[str, Any]:
    c, frames = r.config, 12
    return {
        "hidden_states": r.normal(_BATCH, frames, c.mel_dim),
        "condition_vector": r.normal(_BATCH, 20, c.mel_dim),
        "speaker_embedding": r.normal(_BATCH, frames, c.enc_emb_dim),
        "quantized_code": r.integers(range(c.num_embeds - 1), _BATCH, frames // c.repeats),
        "time_step": r.uniform(1)[0],
    }


def _mel_and_padding(r: Request, name: str, mask: str) -> dict[str, Any]:
    # Masks called audio_mel_mask are true where there is padding, others where there is sound
    valid = padded_mask(r, _BATCH, 48).bool()
    width = r.get("input_feat_size", "input_size") or 128
    return {name: r.normal(_BATCH, 48, width), mask: ~valid if mask == "audio_mel_mask" else valid}


def _text_and_spectrogram(r: Request) -> dict[str, Any]:
    return {**_text(r), "input_features": r.normal(_BATCH, 80, 40)}


def _clap(r: Request) -> dict[str, Any]:
    audio = r.get("audio_config") or r.config
    made = {"input_features": r.normal(_BATCH, 1, audio.spec_size, audio.num_mel_bins)}
    return (_text(r) if "input_ids" in r.accepts else {}) | made


# Images -----------------------------------------------------------------------------------------------------------


def _images(r: Request, name: str, *between: int) -> dict[str, Any]:
    """Images, with further axes between the batch and the channels."""
    return {name: r.normal(_BATCH, *between, *image_shape(r.get("vision_config") or r.config, r))}


def _frames_in_rows(r: Request) -> dict[str, Any]:
    return {"pixel_values": r.normal(_BATCH * r.config.num_frames, *image_shape(r.config, r))}


def _tiles(r: Request) -> dict[str, Any]:
    tiles = r.config.max_num_tiles
    mask = torch.ones(_BATCH, 1, tiles, dtype=torch.long)
    mask[-1, :, 1:] = 0  # the second image is one tile
    return _images(r, "pixel_values", 1, tiles) | {
        "aspect_ratio_ids": torch.tensor([[tiles], [1]]),
        "aspect_ratio_mask": mask,
    }


def _patches_as_images(r: Request) -> dict[str, Any]:
    made = make_example_inputs(r.model)
    vision = r.get("vision_config") or r.config
    made["pixel_values"] = made["pixel_values"].unflatten(-1, (3, vision.patch_size, vision.patch_size))
    return made


def _patches_as_one_row(r: Request) -> dict[str, Any]:
    made = _patches_as_images(r)
    return made | {"pixel_values": made["pixel_values"][None]}


def _patches_side_by_side(r: Request) -> dict[str, Any]:
    sizes, patch = torch.tensor([[4, 4], [4, 8]], dtype=torch.int32), r.config.patch_size
    return {"pixel_values": r.normal(1, 3, patch, patch * int(sizes.prod(-1).sum())), "target_sizes": sizes}


def _merged_patches(r: Request) -> dict[str, Any]:
    side = r.config.spatial_merge_size * r.config.patch_size
    grids = torch.tensor([[1, 2, 3], [1, 4, 2]])  # in merged patches
    n_patches = int(grids.prod(-1).sum())
    return {"pixel_values": r.normal(n_patches, side, side, r.config.num_channels), "image_grid_thw": grids}


def _placed_patches(r: Request) -> dict[str, Any]:
    side = 2 * r.config.pooling_kernel_size
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1).expand(_BATCH, -1, -1).clone()
    places[-1, side * side // 2 :] = -1  # padding: the second image is half as high
    pixels = r.uniform(_BATCH, side * side, 3 * r.config.patch_size**2)
    return {"pixel_values": pixels * (places[..., :1] >= 0), "pixel_position_ids": places}


def _prompted_images(r: Request) -> dict[str, Any]:
    made = _images(r, "pixel_values") | _images(r, "prompt_pixel_values")
    return made | _images(r, "prompt_masks")


def _embedded_patches(r: Request) -> dict[str, Any]:
    side = r.config.image_size // r.config.patch_size
    return {"patch_embeds": r.normal(_BATCH, r.config.hidden_size, side, side)}


def _pooled_patches(r: Request) -> dict[str, Any]:
    chosen = torch.tensor([[0, 1, 4, 5], [2, 3, 6, -1], [9, 12, -1, -1]])  # -1 is padding
    return {
        "image_features": r.normal(_BATCH, 9, r.config.hidden_size * len(r.config.vision_feature_layer)),
        "pooled_patches_idx": chosen,
    }


# States of other models -------------------------------------------------------------------------------------------


def _queries(r: Request) -> dict[str, Any]:
    return {
        "query_embeds": r.normal(_BATCH, 4, r.config.hidden_size),
        "encoder_hidden_states": r.normal(_BATCH, 5, r.config.encoder_hidden_size),
    }


def _context(r: Request) -> dict[str, Any]:
    return {"context": r.normal(_BATCH, 6, r.config.hidden_size), "attention_mask": padded_mask(r, _BATCH, 6)}


def _noise(r: Request) -> dict[str, Any]:
    width, layers = r.config.hidden_size, len(r.config.target_layer_ids)
    return {
        "noise_embeds": r.normal(_BATCH, 4, width),
        "context_hidden_states": r.normal(_BATCH, 6, width * layers),
    }


def _detr_encoder(r: Request) -> dict[str, Any]:
    width = r.config.hidden_size
    return {
        "vision_features": [r.normal(_BATCH, width, 4, 4)],
        "vision_pos_embeds": [r.normal(_BATCH, width, 4, 4)],
        "text_features": r.normal(_BATCH, 5, width),
        "text_mask": padded_mask(r, _BATCH, 5).bool(),
    }


def _detr_decoder(r: Request) -> dict[str, Any]:
    width = r.config.hidden_size
    return {
        "vision_features": r.normal(_BATCH, 16, width),
        "vision_pos_encoding": r.normal(_BATCH, 16, width),
        "text_features": r.normal(_BATCH, 5, width),
        "text_mask": padded_mask(r, _BATCH, 5).bool(),
    }


def _mask_decoder(r: Request) -> dict[str, Any]:
    width = r.config.hidden_size
    return {
        "decoder_queries": r.normal(_BATCH, 10, width),
        "backbone_features": [r.normal(_BATCH, width, side, side) for side in (16, 8, 4)],
        "encoder_hidden_states": r.normal(_BATCH, 16, width),
        "prompt_features": r.normal(_BATCH, 5, width),
        "prompt_mask": padded_mask(r, _BATCH, 5).bool(),
    }


def _trajectories(r: Request) -> dict[str, Any]:
    return {
        "states": r.normal(_BATCH, _LENGTH, r.config.state_dim),
        "actions": r.normal(_BATCH, _LENGTH, r.config.act_dim),
        "returns_to_go": r.normal(_BATCH, _LENGTH, 1),
        "timesteps": torch.arange(_LENGTH).expand(_BATCH, -1).clone(),
        "attention_mask": padded_mask(r, _BATCH, _LENGTH),
    }


# Text with something beside it ------------------------------------------------------------------------------------


def _text(r: Request) -> dict[str, Any]:
    return {"input_ids": token_ids(r, _BATCH, _LENGTH), "attention_mask": padded_mask(r, _BATCH, _LENGTH)}


def _dialogue(r: Request) -> dict[str, Any]:
    return _text(r) | _codes(r, "decoder_input_ids", r.config.decoder_config.num_channels)


def _cross_attended_codes(r: Request) -> dict[str, Any]:
    return _codes(r, "input_ids", r.config.num_channels) | {
        "encoder_hidden_states": r.normal(_BATCH, 5, r.config.cross_hidden_size)
    }


def _depth_codes(r: Request) -> dict[str, Any]:
    ids = token_ids(r, _BATCH, r.config.num_codebooks)
    return {"input_ids": ids, "last_hidden_state": r.normal(_BATCH, 1, r.config.input_size)}


def _images_between_layers(r: Request) -> dict[str, Any]:
    mask = torch.ones(_BATCH, _LENGTH, 1, dtype=torch.long)
    mask[:, 0] = 0  # the first token comes before the image
    return _text(r) | _images(r, "pixel_values", 1) | {"image_attention_mask": mask}


def _images_in_place(r: Request) -> dict[str, Any]:
    n_images = r.config.latent_query_num
    mask = torch.zeros(_BATCH, n_images + _LENGTH, dtype=torch.bool)
    mask[:, 1 : 1 + n_images] = True
    ids = token_ids(r, *mask.shape)
    made = {"input_ids": ids, "attention_mask": padded_mask(r, *mask.shape), "image_embeds_position_mask": mask}
    return made | _images(r, "pixel_values")


def _retrieved(r: Request) -> dict[str, Any]:
    documents = r.config.n_docs
    vocab = range(10, 1000)
    return {
        "input_ids": r.integers(vocab, _BATCH, _LENGTH),
        "context_input_ids": r.integers(vocab, _BATCH * documents, 9),
        "context_attention_mask": padded_mask(r, _BATCH * documents, 9),
        "doc_scores": r.normal(_BATCH, documents),
        "decoder_input_ids": r.integers(vocab, _BATCH * documents, 5),
    }


_MAKERS: dict[str, Maker] = {
    "BridgeTowerVisionModel": lambda r: _images(r, "image"),
    "Blip2QFormerModel": _queries,
    "ClapAudioModel": _clap,
    "ClapModel": _clap,
    "ClvpModelForConditionalGeneration": _text_and_spectrogram,
    "DecisionTransformerModel": _trajectories,
    "DeepseekOcr2VisionEncoder": lambda r: {
        "inputs_embeds": r.normal(_BATCH, 8, r.config.hidden_size),
        "num_patches": 4,
    },
    "DiaDecoder": _cross_attended_codes,
    "DiaModel": _dialogue,
    "Dots3NoteAudioModel": _wave_chunks,
    "Florence2VisionBackbone": lambda r: _images(r, "hidden_states"),
    "Gemma3nAudioEncoder": lambda r: _mel_and_padding(r, "audio_mel", "audio_mel_mask"),
    "Gemma4AudioModel": lambda r: _mel_and_padding(r, "input_features", "attention_mask"),
    "Gemma4VisionModel": _placed_patches,
    "GlmAsrEncoder": _mel_channels_first,
    "GraniteSpeech5Encoder": _stacked_frames,
    "GraniteSpeech5ForCTC": _stacked_frames,
    "Idefics2PerceiverResampler": _context,
    "IdeficsModel": _images_between_layers,
    "Inkling2VisionModel": _merged_patches,
    "InklingAudioModel": lambda r: {
        "audio_input_ids": r.integers(range(r.config.codebook_size), 9, r.config.num_codebooks)
    },
    "Kimi_K25Model": _patches_as_images,
    "Kimi_K25VisionModel": _patches_as_images,
    "Kosmos2Model": _images_in_place,
    "KyutaiSpeechToTextModel": _text_then_codes,
    "LightGlueForKeypointMatching": lambda r: _images(r, "pixel_values", 2),
    "MimiDecoderModel": _latents,
    "MiniCPMOcrVisionModel": _patches_side_by_side,
    "MiniCPMV4_6VisionModel": _patches_side_by_side,
    "MiniCPMV4_7VisionModel": _patches_side_by_side,
    "MllamaVisionModel": _tiles,
    "Molmo2Adapter": _pooled_patches,
    "MoshiDepthDecoder": _depth_codes,
    "MuseGlimmerAssistantModel": _noise,
    "MusicgenMelodyModel": _codes_in_rows,
    "MusicgenModel": _codes_in_rows,
    "NeuCodecModel": _wave_and_features,
    "PaddleOCRVLModel": _patches_as_images,
    "PaddleOCRVisionModel": _patches_as_one_row,
    "Phi4MultimodalAudioModel": lambda r: _mel_and_padding(r, "hidden_states", "mask"),
    "PocketTTSAudioTokenizerDecoderModel": _latents,
    "Qwen2_5OmniAudioEncoder": _packed_clips,
    "Qwen2_5OmniToken2WavBigVGANModel": lambda r: {"mel_spectrogram": r.normal(_BATCH, r.config.mel_dim, 12)},
    "Qwen2_5OmniToken2WavDiTModel": _diffusion_of_mels,
    "Qwen3OmniMoeAudioEncoder": _packed_clips,
    "Qwen3OmniMoeTalkerCodePredictorModel": lambda r: {
        "inputs_embeds": r.normal(_BATCH, _LENGTH, r.config.hidden_size)
    },
    "RagModel": _retrieved,
    "Sam3DetrDecoder": _detr_decoder,
    "Sam3DetrEncoder": _detr_encoder,
    "Sam3LiteTextDetrDecoder": _detr_decoder,
    "Sam3LiteTextDetrEncoder": _detr_encoder,
    "Sam3LiteTextMaskDecoder": _mask_decoder,
    "Sam3MaskDecoder": _mask_decoder,
    "SegGptModel": _prompted_images,
    "SpeechT5Model": _speech_states,
    "SuperGlueForKeypointMatching": lambda r: _images(r, "pixel_values", 2),
    "TvpModel": lambda r: _text(r) | _images(r, "pixel_values", r.config.num_frames),
    "UnlimitedOcrVisionEncoder": _embedded_patches,
    "VibeVoiceAcousticTokenizerDecoderModel": lambda r: {"hidden_states": r.normal(_BATCH, r.config.hidden_size, 6)},
    "VibeVoiceAcousticTokenizerEncoderModel": lambda r: {"hidden_states": r.normal(_BATCH, r.config.channels, 19200)},
    "VoxtralRealtimeEncoder": _mel_channels_first,
    "Xcodec2Model": _wave_and_features,
    "XCLIPVisionModel": _frames_in_rows,
}


__all__ = ["example_inputs", "is_special"]
