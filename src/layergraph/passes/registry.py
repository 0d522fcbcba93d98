"""Passes by name, for strings in ``passes=[...]``, the command line, and programs that are loaded again."""

from __future__ import annotations

import difflib
import re
from typing import Any

from layergraph.errors import InputError, InputTypeError, NotFoundError
from layergraph.passes.base import Pass
from layergraph.passes.fuse_patch_embed import FusePatchEmbed
from layergraph.passes.tap_outputs import TapOutputs
from layergraph.passes.weave_shadow import WeaveShadow

_PASSES: dict[str, type[Pass]] = {}


def register_pass(cls: type[Pass]) -> type[Pass]:
    """Make a pass known by its name; usable as a class decorator.

    Raises:
        InputTypeError: it is no class of passes.
        InputError: it has no name, one that is not kebab-case, or another class has it; or it is no frozen dataclass.
    """
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise InputTypeError(
            "register_pass takes a class of passes", found=repr(cls)[:80], do="write class MyPass(layergraph.Pass)"
        )
    if not cls.pass_name:
        raise InputError(f"{cls.__name__} has no pass_name", do='give it one: pass_name: ClassVar[str] = "my-pass"')
    # Labels (name#2) and the command line (name:option=value) take names apart.
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cls.pass_name):
        raise InputError(
            f"{cls.__name__}.pass_name is {cls.pass_name!r}",
            expected="kebab-case: small letters and digits, with single hyphens between",
            do="rename it",
        )
    params = cls.__dict__.get("__dataclass_params__")  # its own: Pass has some to inherit
    if params is None or not params.frozen:
        raise InputError(
            f"{cls.__name__} is not a frozen dataclass", do="write @dataclass(frozen=True) under @register_pass"
        )
    other = _PASSES.get(cls.pass_name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InputError(f"a pass named {cls.pass_name!r} exists already", found=other.__qualname__, do="rename it")
    _PASSES[cls.pass_name] = cls
    return cls


def pass_names() -> tuple[str, ...]:
    """Names of all registered passes."""
    return tuple(_PASSES)


def find_pass(name: str) -> type[Pass]:
    """The pass of that name.

    Raises:
        NotFoundError: there is none; names the nearest. InputError: options stand behind the name.
    """
    head, has_options, _ = name.partition(":")
    if has_options and head in _PASSES:
        raise InputError(
            "the name of a pass holds options",
            found=repr(name)[:80],
            do=f"pass the object, with its options: {_PASSES[head].__name__}(...)",
        )
    if name not in _PASSES:
        near = difflib.get_close_matches(name, _PASSES, n=1)
        raise NotFoundError(
            f"no pass named {name!r}",
            expected=", ".join(_PASSES),
            found=f"did you mean {near[0]!r}?" if near else None,
            do="use one of these names, or pass the object",
        )
    return _PASSES[name]


def pass_that_ran(name: str) -> type[Pass]:
    """The pass of that name in a program's history, which may come from another process.

    Raises:
        NotFoundError: it is not registered here.
    """
    if name not in _PASSES:
        raise NotFoundError(
            f"the pass {name!r} ran on this program and is not known here",
            expected=", ".join(_PASSES),
            do="import the module that registers it",
            shell="name the module that registers it: --import MODULE",
        )
    return _PASSES[name]


def make_pass(name: str, options: dict[str, Any]) -> Pass:
    """A pass of a program's history, from its name and saved options.

    Raises:
        NotFoundError: it is not registered here.
    """
    return pass_that_ran(name).from_options(dict(options))


for _cls in (TapOutputs, FusePatchEmbed, WeaveShadow):
    register_pass(_cls)

__all__ = ["find_pass", "make_pass", "pass_names", "pass_that_ran", "register_pass"]
