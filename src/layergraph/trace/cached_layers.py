"""The cache that a model writes to while its cached graph is traced: given tensors, changed in place.

One trace serves prefill and decode. Keys and values go to slots that the caller names, and all slots come back; what
a query may see of them is the mask's business. Convolutional and recurrent states are always there (zeros are what a
model starts from), so a model takes the branch that goes on from a state, for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from layergraph.errors import NotSupportedError
from layergraph.ir.cache_geometry import CacheGeometry


class TracedLayer:
    """One layer of the cache during the trace."""

    is_sliding = False
    is_compileable = False
    is_initialized = True
    supports_early_init = False
    # Models with states then take the branch that concatenates what is held and what is new, for one token too.
    record_past = True

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.write: torch.Tensor | None = None
        self.conv_states: dict[int, torch.Tensor] = {}
        self.recurrent_states: dict[int, torch.Tensor] = {}

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return dict.fromkeys({*self.conv_states, *self.recurrent_states}, True)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[batch, heads, tokens, features]`` and return all slots."""
        if self.keys is None or self.values is None or self.write is None:
            raise NotSupportedError("a layer writes keys and values that the first run did not leave")
        rows = torch.arange(keys.shape[0], device=keys.device)
        index = (self.write.t(), rows[None, :])
        for held, new in ((self.keys, keys), (self.values, values)):
            held.index_put_(index, new.permute(2, 0, 1, 3))
        return self.keys.permute(1, 2, 0, 3), self.values.permute(1, 2, 0, 3)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Held and new columns ``[batch, channels, time]``; the last ones are held from then on."""
        held = self.conv_states[state_idx]
        full = torch.cat([held, conv_states], dim=-1)
        held.copy_(full[..., -held.shape[-1] :])
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        self.recurrent_states[state_idx].copy_(recurrent_states)
        return recurrent_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.keys.shape[0] if self.keys is not None else query_length), 0

    def get_max_length(self) -> int:
        return -1


def traced_cache(
    geometry: CacheGeometry, flat: Mapping[str, torch.Tensor], n_layers: int, base: type | None = None
) -> Any:
    """A ``transformers.Cache`` over the flat tensors of one trace."""
    layers = [TracedLayer() for _ in range(n_layers)]
    for tensor in geometry.tensors:
        setattr(layers[tensor.layer], tensor.role, flat[tensor.name])
        layers[tensor.layer].write = flat[geometry.group(tensor.group).write]
    for state in geometry.states:
        kind, number = state.role.split("_")
        getattr(layers[state.layer], f"{kind}_states")[int(number)] = flat[state.name]
    return _cache_class(base)(layers, flat.get("tokens_written"))


@cache
def _cache_class(own: type | None) -> type:
    """A subclass of the model's ``own`` class of cache, where it insists on one (importing transformers takes long)."""
    from transformers.cache_utils import Cache

    base: Any = own or Cache

    class TracedCache(base):
        """Dispatches to :class:`TracedLayer`; upstream's own dispatch asks for its own classes of layers."""

        def __init__(self, layers: list[TracedLayer], written: torch.Tensor | None) -> None:
            Cache.__init__(self, layers=layers)
            self.written = written

        def _state_layer(self, index: int) -> TracedLayer:
            layer = self.layers[index]
            if not (layer.conv_states or layer.recurrent_states):
                raise NotSupportedError(f"layer {index} asks for a state that the first run did not leave")
            return layer

        def get_seq_length(self, layer_idx: int = 0) -> Any:
            # Models are given their positions and do not count; the few that count columns have an input for it.
            return 0 if self.written is None else self.written[0]

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            return self.layers[layer_idx].get_mask_sizes(query_length)

        def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
            return True

        def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
            return self._state_layer(layer_idx).conv_states[state_idx]

        def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
            return self._state_layer(layer_idx).recurrent_states[state_idx]

        def update_conv_state(
            self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
        ) -> torch.Tensor:
            return self._state_layer(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)

        def update_recurrent_state(
            self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
        ) -> torch.Tensor:
            return self._state_layer(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)

        def get_linear_cache(self, layer_idx: int) -> torch.Tensor:
            return self._state_layer(layer_idx).recurrent_states[0]

        def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
            self._state_layer(layer_idx).update_recurrent_state(linear_cache)

        @property
        def is_linear(self) -> list[bool]:
            return [layer.keys is None and bool(layer.has_previous_state) for layer in self.layers]

    return TracedCache


__all__ = ["TracedLayer", "traced_cache"]
