"""Values of a pass's options against the types of its fields: ``limit: float`` takes no ``"abc"``.

Only what a command line or a manifest can hold is told apart: numbers, texts, flags, and lists and mappings of these. A
field of any other type takes anything, and is for the pass to check.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN = (bool, str, bytes)
# What counts as one. A text is no list of letters here, and a list becomes the tuple that can be compared and hashed.
_CONTAINERS: dict[Any, tuple[type, ...]] = {kind: (kind,) for kind in (tuple, list, set, frozenset, dict)} | {
    Mapping: (dict,),
    Sequence: (tuple,),
    AbstractSet: (set, frozenset),
    Collection: (tuple, set, frozenset),
    Iterable: (tuple, set, frozenset),
}


@cache
def option_types(cls: type) -> Mapping[str, Any]:
    """The types that a pass's fields are annotated with; none where an annotation names what is not there."""
    try:
        return get_type_hints(cls)
    except Exception:  # a name imported for type checkers only, or defined in a function
        return {}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; True for types that plain data does not tell apart."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if kind is None or kind is types.NoneType:
        return value is None
    if kind is float:
        return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind in _PLAIN:
        return isinstance(value, kind)
    container = origin or kind
    return container not in _CONTAINERS or _fits_container(value, container, parts)


def _fits_container(value: Any, kind: Any, parts: tuple[Any, ...]) -> bool:
    is_one: bool = isinstance(value, _CONTAINERS[kind])
    if not is_one or not parts:
        return is_one
    if isinstance(value, dict):
        return all(fits(key, parts[0]) and fits(item, parts[1]) for key, item in value.items())
    items: list[Any] = [*value]
    if kind is tuple and parts[-1:] != (...,):
        return len(items) == len(parts) and all(map(fits, items, parts))
    return all(fits(item, parts[0]) for item in items)


def fitted(value: Any, kind: Any) -> Any:
    """Plain data as the type wants it: lists, which JSON and a command line give, as tuples or sets; 1 as 1.0."""
    if type(value) is int and not _takes(kind, int) and _takes(kind, float):
        with suppress(OverflowError):
            return float(value)
    if isinstance(value, list) and not fits(value, kind):
        for container in (tuple, frozenset, set):
            with suppress(TypeError):  # mappings go into no set
                made = container(map(_hashable, value))
                if fits(made, kind):
                    return made
    return value


def _takes(kind: Any, plain: type) -> bool:
    """Whether a type is this one, or a union with it."""
    return kind is plain or (get_origin(kind) in (Union, types.UnionType) and plain in get_args(kind))


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def from_text(pieces: Sequence[tuple[str, Any]], kind: Any) -> Any:
    """What a command line says, as the type wants it.

    Args:
        pieces: each piece between commas: its text, and what it looks like (a number, a flag, the text itself).
        kind: the type of the field. A text that looks like a number stays a text where only texts are taken, and one
            piece is a list of one where only lists are.

    Returns:
        The first reading that fits, else the plainest one. Nothing at all is an empty list where texts are not taken.
    """
    texts, values = [text for text, _ in pieces], [value for _, value in pieces]
    readings: list[Any] = [values, texts] if len(pieces) > 1 else [values[0], texts[0], values, texts]
    if texts == [""]:
        readings.insert(2, [])
    for reading in readings:
        made = fitted(reading, kind)
        if fits(made, kind):
            return made
    return readings[0]


def spelled(kind: Any) -> str:
    """A type as it is written."""
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


__all__ = ["fits", "fitted", "from_text", "option_types", "spelled"]
