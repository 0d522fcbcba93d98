"""Options of a tap, as given: made plain, checked, and written as data."""

from __future__ import annotations

import re
from typing import Any

import torch

from layergraph.errors import InputError, InputTypeError

_FLAGS = ((re.ASCII, "a"), (re.IGNORECASE, "i"), (re.MULTILINE, "m"), (re.DOTALL, "s"), (re.VERBOSE, "x"))
_REDUCTIONS = ("last", "mean", "norm")
_WHATS = "a key, path, glob, regex, class, op, node or predicate, or a list of these without keys and predicates"


def plain_what(what: Any) -> Any:
    """Lists as tuples, ``re:`` texts as patterns.

    Raises:
        InputError: no regular expression.
    """
    if isinstance(what, (list, tuple)):
        return tuple(plain_what(item) for item in what)
    if not (isinstance(what, str) and what.startswith("re:")):
        return what
    try:
        return re.compile(what[3:])
    except re.error as error:
        raise InputError(
            f"{what!r} is no regular expression", pass_name="tap-outputs", found=str(error), do="mend it"
        ) from error


def what_as_data(what: Any) -> Any:
    """What :func:`plain_what` and a tap read back as the same."""
    if isinstance(what, tuple):
        return [what_as_data(item) for item in what]
    if isinstance(what, re.Pattern):
        return f"re:{_with_flags(what)}"
    return f"{what.__module__}:{what.__qualname__}" if isinstance(what, type) else what


def _with_flags(pattern: re.Pattern[str]) -> str:
    """The text of a pattern with the flags that ``re.compile`` was given beside it written into it."""
    given = pattern.flags & ~re.compile(pattern.pattern).flags
    letters = "".join(letter for flag, letter in _FLAGS if given & flag)
    if not letters:
        return str(pattern.pattern)
    own = re.match(r"\(\?([aimsux]+)\)", pattern.pattern)  # only the very start of a pattern holds flags
    return f"(?{letters}{own[1]}){pattern.pattern[own.end() :]}" if own else f"(?{letters}){pattern.pattern}"


def is_of_nodes(what: Any) -> bool:
    """Whether nodes are asked for rather than what modules take and return."""
    if isinstance(what, str):
        return what.startswith("%") or "::" in what
    return callable(what) and not isinstance(what, type)


def check_options(options: Any) -> None:
    """Refuse options of a tap that mean nothing.

    Raises:
        InputError, InputTypeError: names the option.
    """

    def fail(text: str, expected: str, found: Any, kind: type[InputError] | type[InputTypeError] = InputError) -> None:
        raise kind(text, pass_name="tap-outputs", expected=expected, found=repr(found), do="change that option")

    what = options.what
    for item in what if isinstance(what, tuple) else (what,):
        if isinstance(item, re.Pattern) and not isinstance(item.pattern, str):
            fail("what is a pattern of bytes", "a pattern of text", item, InputTypeError)
        if isinstance(item, torch.nn.Module):
            fail("what is a module, not the name of one", _WHATS, type(item), InputTypeError)
        if isinstance(item, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            fail("what is an op, not the name of one", "a text such as '**::softmax'", item, InputTypeError)
        if not isinstance(item, (str, type, re.Pattern)) and (item is not what or not callable(item)):
            fail("what is not something to tap", _WHATS, item, InputTypeError)
    if what == ():
        fail("what lists nothing", f"at least one of: {_WHATS}", what)
    if options.index is not None and (not isinstance(options.index, int) or isinstance(options.index, bool)):
        fail("index is not a number", "an int", options.index, InputTypeError)
    if not isinstance(options.only, bool):
        fail("only is neither True nor False", "a bool", options.only, InputTypeError)
    if options.name is not None and not (isinstance(options.name, str) and options.name):
        fail("name is not a name", "a text that is not empty", options.name, InputTypeError)
    for name in ("entries", "layers"):
        value = getattr(options, name)
        items = value if isinstance(value, (tuple, set, frozenset)) else (value,)
        if not all(item is None or isinstance(item, int) for item in items):
            fail(f"{name} is not a selection", "a bool, an int, or a list, tuple or set of ints", value, InputTypeError)
        if isinstance(value, (tuple, set, frozenset)):
            if not value:
                fail(f"{name} selects nothing", "at least one index (None or True for all)", value)
            if any(isinstance(item, bool) for item in value):
                fail(f"{name} mixes bools into a list", "ints", value, InputTypeError)
    if options.entries is not None and options.layers is not None:
        fail("entries and layers are two ways to say the same", "one of them", (options.entries, options.layers))
    if options.at not in ("output", "input"):
        fail("at is neither end of a module", "'output' or 'input'", options.at)
    reduce = options.reduce
    is_topk = isinstance(reduce, tuple) and len(reduce) == 2 and reduce[0] == "topk" and type(reduce[1]) is int
    if is_topk and reduce[1] < 1:
        fail("topk takes nothing", "one or more", reduce)
    if reduce is not None and reduce not in _REDUCTIONS and not is_topk:
        fail("unknown reduction", ", ".join(map(repr, _REDUCTIONS)) + " or ('topk', k)", reduce)
    if options.dtype is not None and not isinstance(getattr(torch, str(options.dtype), None), torch.dtype):
        fail("unknown dtype", "a torch dtype such as torch.float16", options.dtype)


__all__ = ["check_options", "is_of_nodes", "plain_what", "what_as_data"]
