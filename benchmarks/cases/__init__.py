"""Benchmark cases; importing this registers them all."""

from cases import patch_embed, rewriting, taps

__all__ = ["patch_embed", "rewriting", "taps"]
