"""Whose a cache is: the program that can go on with it, and the adapter that wrote what it holds."""

from __future__ import annotations

from layergraph.errors import InputError
from layergraph.ir.adapter import Adapter
from layergraph.ir.cache_geometry import CacheGeometry
from layergraph.runtime.cache import DualCache


def check_geometry(cache: DualCache, geometry: CacheGeometry | None) -> None:
    """Refuse a cache of another program: halves that are missing or shaped otherwise.

    Raises:
        InputError: says which half.
    """
    if geometry is None or geometry == cache.geometry:
        return
    if geometry.half("base") != cache.geometry.half("base"):
        raise InputError("the cache was made for another model", do="make one with DualCache(program)")
    has, needs = (bool(item.half("shadow").names) for item in (cache.geometry, geometry))
    raise InputError(
        "the cache has no half for the shadow, which would go on without its history"
        if needs and not has
        else "the cache has a half for a shadow, and the program has none"
        if has and not needs
        else "the cache was made for another shadow",
        do="make one with DualCache(program) and prefill again",
    )


def check_writer(cache: DualCache, adapter: Adapter | None) -> None:
    """Refuse to go on with tokens that another adapter wrote: what is held depends on it.

    Raises:
        InputError: names both.
    """
    held = cache.writer
    if not cache.length or held is adapter:
        return
    if held is None or adapter is None or not held.is_same(adapter):
        raise InputError(
            "the cache holds what another adapter computed",
            expected=f"adapter {held.name!r}" if held is not None else "the base model",
            found=f"adapter {adapter.name!r}" if adapter is not None else "the base model",
            do="reset() it and prefill again, or keep a cache for each adapter",
        )


__all__ = ["check_geometry", "check_writer"]
