"""Replay of cached graphs: what is kept between calls, one step at a time, generation."""

from layergraph.runtime.cache import DualCache
from layergraph.runtime.generate import ProgramForGeneration
from layergraph.runtime.session import Session

__all__ = ["DualCache", "ProgramForGeneration", "Session"]
