"""The base model inside a PeftModel: with its adapters in place, or as it was before peft wrapped its blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from layergraph.errors import NotSupportedError
from layergraph.trace.isolate import isolate


def is_peft_model(model: Any) -> bool:
    """Whether ``model`` is a PeftModel; peft is not imported for that."""
    return any(base.__module__.startswith("peft.") and base.__name__ == "PeftModel" for base in type(model).__mro__)


def unwrap_adapters(model: Any) -> nn.Module:
    """The base model of a PeftModel with its adapters in place (LoRA, IA3 and the like): traced as it computes now.

    Raises:
        NotSupportedError: an adapter that is no part of the base's modules: a shadow, or learnt prompts.
    """
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind == "SHADOW":
            raise NotSupportedError(
                "a shadow adapter is woven in by its pass, not traced",
                found=f"{name}: {kind}",
                do="layergraph.optimize(model, passes=[layergraph.WeaveShadow()])",
            )
        if getattr(config, "is_prompt_learning", False):
            raise NotSupportedError(
                "learnt prompts live outside of the model's modules and cannot be traced with it",
                found=f"{name}: {kind}",
                do="trace the base model, and give it the prompts as inputs_embeds",
            )
    base: nn.Module = model.get_base_model()
    return base


def unwrap_shadow(model: Any) -> nn.Module:
    """A private copy of the base under a shadow adapter, around the same weights. ``model`` is not changed.

    Raises:
        NotSupportedError: the adapter is of another kind: it is part of the weights, not of the graph.
    """
    kinds = {
        name: str(getattr(config.peft_type, "value", config.peft_type)) for name, config in model.peft_config.items()
    }
    if other := [name for name, kind in kinds.items() if kind != "SHADOW"]:
        raise NotSupportedError(
            "only shadow adapters are woven in",
            found=f"{other[0]}: {kinds[other[0]]}",
            do="merge it into the model first: model.merge_and_unload()",
        )
    twin: Any = isolate(model)
    base: nn.Module = twin.base_model.model
    for module in base.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in list(hooks.items()):
                # The hooks that seed and carry the shadow state, bound to the copied tuner.
                if getattr(hook, "__self__", None) is twin.base_model:
                    del hooks[number]
                    module._forward_pre_hooks_with_kwargs.pop(number, None)
                    module._forward_hooks_with_kwargs.pop(number, None)
    for parent in list(base.modules()):
        for name, child in list(parent.named_children()):
            inner = getattr(child, "base_layer", None) if type(child).__name__ == "ShadowLayer" else None
            if type(child).__name__ == "ModulesToSaveWrapper":
                inner = child.original_module
            if inner is not None:
                setattr(parent, name, inner)
    training = bool(model.training)
    return base.train(training)


__all__ = ["is_peft_model", "unwrap_adapters", "unwrap_shadow"]
