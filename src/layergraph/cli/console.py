"""What the commands share: the -v option, and a quiet start of the libraries."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from layergraph.progress import Say, progress_line

_KEY = "layergraph.verbose"


def _remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    # meta is shared by a group and its commands: -v counts before and after the command's name.
    ctx.meta[_KEY] = ctx.meta.get(_KEY, False) or value


def verbose_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``-v``: show tracebacks, and what the libraries warn about."""
    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_remember,
        help="Show tracebacks, and what torch and transformers warn about.",
    )(function)


def is_verbose(ctx: click.Context) -> bool:
    """Whether -v was given to the group or the command."""
    return bool(ctx.meta.get(_KEY, False))


def quiet_libraries() -> None:
    """Keep transformers off the network, and both libraries' chatter off the terminal unless -v was given.

    Called by commands before they import torch. The process is ours alone here, so global settings meet nobody.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    ctx = click.get_current_context(silent=True)
    if ctx is not None and is_verbose(ctx):
        return
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def working() -> Iterator[Say]:
    """A progress line on a terminal, under which the libraries are imported first."""
    with progress_line(None) as say:
        say("importing torch and transformers")
        quiet_libraries()
        yield say


__all__ = ["is_verbose", "quiet_libraries", "verbose_option", "working"]
