"""peft's own ShadowPEFT as the oracle: tiny decoders, adapters with random weights, uncached logits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import ShadowConfig, get_peft_model
from torch import nn

import layergraph as lg
from layergraph.testing.zoo import build_model, tiny_config

# Sizes of a family that are tied together in ways that names do not tell.
FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "num_hidden_layers": 3,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
    },
}


def tiny_decoder(family: str, kind: str = "AutoModelForCausalLM", **config: Any) -> nn.Module:
    """A tiny causal model of ``family``, or of another kind."""
    return build_model(tiny_config(family, **{**FAMILY_CONFIG.get(family, {}), **config}), kind)


def weave(base: nn.Module, *passes: Any, **options: Any) -> lg.Program:
    """Trace and rewrite, without the cached graph: these tests compare uncached forwards."""
    program = lg.trace(base, options.pop("example_inputs", None), cached=False, **options)
    for item in passes:
        program = program.apply(item)
    return program


def block_paths(model: nn.Module) -> list[str]:
    """Every decoder block, which peft does not find by itself in all families."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and path.rpartition(".")[2] in ("layers", "h"):
            return [f"{path}.{index}" for index in range(len(module))]
    raise AssertionError("no blocks")


def with_adapter(model: nn.Module, *, name: str = "default", seed: int = 1, **config: Any) -> Any:
    """``model`` (changed in place) under an adapter with random non-zero weights, in eval mode."""
    options = {"task_type": "CAUSAL_LM", "shadow_alpha": 1.0, **config}
    peft_model = get_peft_model(model, ShadowConfig(**options), adapter_name=name).eval()
    randomise_adapter(peft_model, name, seed)
    return peft_model


@torch.no_grad()
def randomise_adapter(peft_model: Any, name: str = "default", seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for path, tensor in peft_model.named_parameters():
        if "shadow_" in path and f".{name}." in path:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise * (0.1 if tensor.dim() > 1 else 0.3))


def pair(family: str, **config: Any) -> tuple[nn.Module, Any]:
    """The base alone, and the same base under an adapter."""
    base = tiny_decoder(family)
    return base, with_adapter(copy.deepcopy(base), **config)


def padded_batch(seed: int = 0, vocabulary: int = 90, *, rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    """Ids of three rows, two of them padded on the left."""
    ids = torch.randint(5, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    if rows > 1:
        mask[1, :1] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def oracle(peft_model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """peft's uncached forward, which is exact; its cached one is not (transformers 5.24)."""
    return peft_model(**inputs, use_cache=False, **options)
