"""``NAME:key=value,...`` on the command line -> a pass. Checked before anything is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from layergraph.passes import Pass

# The last colon before ``key=``: what is tapped may hold colons itself (``model.layers.0::softmax#0``, ``re:.*mlp``).
_SPEC = re.compile(r"(?s)(?P<head>.*?)(?::(?P<options>[a-z_][a-z0-9_]*=.*))?")
_WORDS = {"true": True, "false": False, "none": None}


def parse_options(text: str) -> dict[str, list[str]]:
    """``entries=2,14,-3,dtype=float16`` -> ``{"entries": ["2", "14", "-3"], "dtype": ["float16"]}``.

    A piece without ``=`` continues the value before it.
    """
    options: dict[str, list[str]] = {}
    key = ""
    for piece in text.split(","):
        name, has_value, value = piece.partition("=")
        if has_value and re.fullmatch(r"[a-z_][a-z0-9_]*", name.strip()):
            key = name.strip()
            if key in options:
                raise click.BadParameter(f"{key} is given twice")
            options[key] = [value.strip()]
        else:
            options[key].append(piece.strip())
    return options


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_pass(text: str) -> Pass:
    """The pass that ``NAME[:key=value,...]`` names.

    Raises:
        click.BadParameter: no such pass or option, or a value that it does not take.
    """
    match = _SPEC.fullmatch(text)
    assert match is not None
    return _make(match["head"].strip(), parse_options(match["options"]) if match["options"] else {})


def parse_tap(text: str) -> Pass:
    """The tap that ``WHAT[:key=value,...]`` asks for."""
    match = _SPEC.fullmatch(text)
    assert match is not None
    if not match["head"].strip():
        raise click.BadParameter("it names nothing to tap; try --tap hidden_states")
    options = parse_options(match["options"]) if match["options"] else {}
    return _make("tap-outputs", options, what=match["head"].strip())


def _make(name: str, options: dict[str, list[str]], **given: Any) -> Pass:
    import dataclasses

    from layergraph.cli.main import nearest
    from layergraph.errors import LayerGraphError
    from layergraph.passes import find_pass, pass_names
    from layergraph.passes.option_types import from_text, option_types

    head, has_option, key = name.partition(":")
    if has_option and head in pass_names():
        raise click.BadParameter(f"option {key!r} of {head} has no value; write {head}:{key or 'KEY'}=VALUE")
    try:
        cls = find_pass(name)
    except LayerGraphError:
        near = nearest(name, pass_names())
        hint = f" Did you mean {near!r}?" if near else ""
        own = "Is it one of your own? Name its module: --import MODULE."
        raise click.BadParameter(f"no pass named {name!r}.{hint} There are: {', '.join(pass_names())}. {own}") from None
    known = [item.name for item in dataclasses.fields(cls)]
    for key in options:
        if key not in known:
            near = nearest(key, known)
            hint = f" Did you mean {near!r}?" if near else ""
            has = f" It has: {', '.join(known)}." if known else " It has none."
            raise click.BadParameter(f"{name} has no option {key!r}.{hint}{has}")
    kinds = option_types(cls)
    for key, texts in options.items():
        given[key] = from_text([(text, _value(text)) for text in texts], kinds.get(key, Any))
    try:
        return cls.from_options(given)
    except LayerGraphError as error:
        raise click.BadParameter(error.message(shell=True)) from None
    except (TypeError, ValueError) as error:  # an option without a default is missing, or one that the pass refuses
        raise click.BadParameter(f"{name}: {error}") from None


__all__ = ["parse_options", "parse_pass", "parse_tap"]
