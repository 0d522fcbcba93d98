"""Example inputs of model classes whose arguments are nobody else's: parts of codecs, decoders of masks, resamplers.

What holds by argument name for any model is a recipe of :mod:`layergraph.trace.hf_inputs` instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layergraph.testing.coverage_inputs_audio import AUDIO_MAKERS, BATCH, LENGTH, Maker, text_beside
from layergraph.trace.hf_request import Request, image_shape, padded_mask, token_ids
from layergraph.trace.inputs import make_example_inputs


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Inputs for any model of the coverage run: from the table here, else from the recipes."""
    maker = _MAKERS.get(type(model).__name__)
    return make_example_inputs(model) if maker is None else maker(Request(model, {}, seed=0))


def is_special(model: nn.Module) -> bool:
    """Whether its inputs come from the table here, which makes them in one size only."""
    return type(model).__name__ in _MAKERS


# Images -----------------------------------------------------------------------------------------------------------


def _images(r: Request, name: str, *between: int) -> dict[str, Any]:
    """Images, with further axes between the batch and the channels."""
    return {name: r.normal(BATCH, *between, *image_shape(r.get("vision_config") or r.config, r))}


def _frames_in_rows(r: Request) -> dict[str, Any]:
    return {"pixel_values": r.normal(BATCH * r.config.num_frames, *image_shape(r.config, r))}


def _tiles(r: Request) -> dict[str, Any]:
    tiles = r.config.max_num_tiles
    mask = torch.ones(BATCH, 1, tiles, dtype=torch.long)
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
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1).expand(BATCH, -1, -1).clone()
    places[-1, side * side // 2 :] = -1  # padding: the second image is half as high
    pixels = r.uniform(BATCH, side * side, 3 * r.config.patch_size**2)
    return {"pixel_values": pixels * (places[..., :1] >= 0), "pixel_position_ids": places}


def _prompted_images(r: Request) -> dict[str, Any]:
    # The model sets a prompt above the image: its image_size is that of both
    channels, height, width = image_shape(r.config, r)
    shape = (BATCH, channels, height // 2, width)
    return {name: r.normal(*shape) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")}


def _embedded_patches(r: Request) -> dict[str, Any]:
    side = r.config.image_size // r.config.patch_size
    return {"patch_embeds": r.normal(BATCH, r.config.hidden_size, side, side)}


def _pooled_patches(r: Request) -> dict[str, Any]:
    chosen = torch.tensor([[0, 1, 4, 5], [2, 3, 6, -1], [9, 12, -1, -1]])  # -1 is padding
    return {
        "image_features": r.normal(BATCH, 9, r.config.hidden_size * len(r.config.vision_feature_layer)),
        "pooled_patches_idx": chosen,
    }


# States of other models -------------------------------------------------------------------------------------------


def _queries(r: Request) -> dict[str, Any]:
    return {
        "query_embeds": r.normal(BATCH, 4, r.config.hidden_size),
        "encoder_hidden_states": r.normal(BATCH, 5, r.config.encoder_hidden_size),
    }


def _context(r: Request) -> dict[str, Any]:
    return {"context": r.normal(BATCH, 6, r.config.hidden_size), "attention_mask": padded_mask(r, BATCH, 6)}


def _noise(r: Request) -> dict[str, Any]:
    width, layers = r.config.hidden_size, len(r.config.target_layer_ids)
    return {
        "noise_embeds": r.normal(BATCH, 4, width),
        "context_hidden_states": r.normal(BATCH, 6, width * layers),
        # Everything sees everything; without a cache the masks that it makes leave the context out
        "attention_mask": {"full_attention": None, "sliding_attention": None},
    }


def _detr_encoder(r: Request) -> dict[str, Any]:
    width = r.config.hidden_size
    return {
        "vision_features": [r.normal(BATCH, width, 4, 4)],
        "vision_pos_embeds": [r.normal(BATCH, width, 4, 4)],
        "text_features": r.normal(BATCH, 5, width),
        "text_mask": padded_mask(r, BATCH, 5).bool(),
    }


def _detr_decoder(r: Request) -> dict[str, Any]:
    width = r.config.hidden_size
    return {
        "vision_features": r.normal(BATCH, 16, width),
        "vision_pos_encoding": r.normal(BATCH, 16, width),
        "text_features": r.normal(BATCH, 5, width),
        "text_mask": padded_mask(r, BATCH, 5).bool(),
    }


def _mask_decoder(r: Request) -> dict[str, Any]:
    width = r.config.hidden_size
    return {
        "decoder_queries": r.normal(BATCH, 10, width),
        "backbone_features": [r.normal(BATCH, width, side, side) for side in (16, 8, 4)],
        "encoder_hidden_states": r.normal(BATCH, 16, width),
        "prompt_features": r.normal(BATCH, 5, width),
        "prompt_mask": padded_mask(r, BATCH, 5).bool(),
    }


def _trajectories(r: Request) -> dict[str, Any]:
    return {
        "states": r.normal(BATCH, LENGTH, r.config.state_dim),
        "actions": r.normal(BATCH, LENGTH, r.config.act_dim),
        "returns_to_go": r.normal(BATCH, LENGTH, 1),
        "timesteps": torch.arange(LENGTH).expand(BATCH, -1).clone(),
        "attention_mask": padded_mask(r, BATCH, LENGTH),
    }


# Text with something beside it ------------------------------------------------------------------------------------


def _images_between_layers(r: Request) -> dict[str, Any]:
    mask = torch.ones(BATCH, LENGTH, 1, dtype=torch.long)
    mask[:, 0] = 0  # the first token comes before the image
    return text_beside(r) | _images(r, "pixel_values", 1) | {"image_attention_mask": mask}


def _images_in_place(r: Request) -> dict[str, Any]:
    n_images = r.config.latent_query_num
    mask = torch.zeros(BATCH, n_images + LENGTH, dtype=torch.bool)
    mask[:, 1 : 1 + n_images] = True
    ids = token_ids(r, *mask.shape)
    made = {"input_ids": ids, "attention_mask": padded_mask(r, *mask.shape), "image_embeds_position_mask": mask}
    return made | _images(r, "pixel_values")


def _image_with_row_ends(r: Request, ends: int) -> dict[str, Any]:
    """Images whose rows of merged patches each end in a token more, and ``ends`` more for the whole."""
    made = make_example_inputs(r.model)
    _, rows, columns = (made["image_grid_thw"] // torch.tensor([1, 2, 2])).unbind(-1)
    counts = rows * (columns + 1) + ends
    ids = token_ids(r, BATCH, int(counts.max()) + 4)
    place = torch.arange(ids.shape[1]) - 1
    is_image = (place >= 0) & (place < counts[:, None])
    made["input_ids"] = ids.masked_fill(is_image, r.config.image_token_id)
    made["attention_mask"] = torch.ones_like(ids)
    if "mm_token_type_ids" in made:
        made["mm_token_type_ids"] = is_image.to(torch.int32)
    return made


def _questions(r: Request) -> dict[str, Any]:
    return {
        "input_ids": token_ids(r, 1, 12),
        "marks": torch.tensor([[4, 7, 10]]),
        "num_options": torch.tensor([[2, 6, 4]]),
        "question_type_ids": torch.tensor([[0, 1, 2]]),
    }


def _task(r: Request) -> dict[str, Any]:
    tokens = r.integers(range(1, r.config.text_encoder_vocab_size), BATCH, r.config.task_seq_len)
    images = r.normal(BATCH, *image_shape(r.config.backbone_config, r))
    return {"pixel_values": images, "task_inputs": tokens}


def _retrieved(r: Request) -> dict[str, Any]:
    documents = r.config.n_docs
    vocab = range(10, 1000)
    return {
        "input_ids": r.integers(vocab, BATCH, LENGTH),
        "context_input_ids": r.integers(vocab, BATCH * documents, 9),
        "context_attention_mask": padded_mask(r, BATCH * documents, 9),
        "doc_scores": r.normal(BATCH, documents),
        "decoder_input_ids": r.integers(vocab, BATCH, 5),
    }


_MAKERS: dict[str, Maker] = {
    **AUDIO_MAKERS,
    "Blip2QFormerModel": _queries,
    "BridgeTowerVisionModel": lambda r: _images(r, "image"),
    "DecisionTransformerModel": _trajectories,
    "DeepseekOcr2VisionEncoder": lambda r: {
        "inputs_embeds": r.normal(BATCH, 8, r.config.hidden_size),
        "num_patches": 4,
    },
    "Florence2VisionBackbone": lambda r: _images(r, "hidden_states"),
    "Gemma4VisionModel": _placed_patches,
    "HunYuanVLModel": lambda r: _image_with_row_ends(r, 2),
    "HYV4VLModel": lambda r: _image_with_row_ends(r, 0),
    "Idefics2PerceiverResampler": _context,
    "IdeficsModel": _images_between_layers,
    "Inkling2VisionModel": _merged_patches,
    "JevForDecision": _questions,
    "Kimi_K25Model": _patches_as_images,
    "Kimi_K25VisionModel": _patches_as_images,
    "Kosmos2Model": _images_in_place,
    "LightGlueForKeypointMatching": lambda r: _images(r, "pixel_values", 2),
    "MiniCPMOcrVisionModel": _patches_side_by_side,
    "MiniCPMV4_6VisionModel": _patches_side_by_side,
    "MiniCPMV4_7VisionModel": _patches_side_by_side,
    "MllamaVisionModel": _tiles,
    "Molmo2Adapter": _pooled_patches,
    "MuseGlimmerAssistantModel": _noise,
    "OneFormerModel": _task,
    "PaddleOCRVisionModel": _patches_as_one_row,
    "PaddleOCRVLModel": _patches_as_images,
    "RagModel": _retrieved,
    "Sam3DetrDecoder": _detr_decoder,
    "Sam3DetrEncoder": _detr_encoder,
    "Sam3LiteTextDetrDecoder": _detr_decoder,
    "Sam3LiteTextDetrEncoder": _detr_encoder,
    "Sam3LiteTextMaskDecoder": _mask_decoder,
    "Sam3MaskDecoder": _mask_decoder,
    "SegGptModel": _prompted_images,
    "SuperGlueForKeypointMatching": lambda r: _images(r, "pixel_values", 2),
    "TvpModel": lambda r: text_beside(r) | _images(r, "pixel_values", r.config.num_frames),
    "UnlimitedOcrVisionEncoder": _embedded_patches,
    "XCLIPVisionModel": _frames_in_rows,
}


__all__ = ["example_inputs", "is_special"]
