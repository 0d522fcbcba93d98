"""What the commands share: -v, --import, and a start of the libraries that is quiet and off the network."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from layergraph.progress import Say, progress_line

_KEY, _IMPORTS = "layergraph.verbose", "layergraph.imports"


def _remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    # meta is shared by a group and its commands: -v counts before and after the command's name.
    ctx.meta[_KEY] = ctx.meta.get(_KEY, False) or value


def verbose_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``-v``: show tracebacks, and what the libraries warn about."""
    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        is_eager=True,  # known before a pass is parsed, which may fail
        expose_value=False,
        callback=_remember,
        help="Show tracebacks, and what torch and transformers warn about.",
    )(function)


def import_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--import MODULE``: passes of one's own, known before ``--pass`` and programs name them."""
    return click.option(
        "--import",
        "imports",
        metavar="MODULE",
        multiple=True,
        is_eager=True,  # --pass may stand before it
        expose_value=False,
        callback=_note_imports,
        help="A Python module, of the current folder or installed, that registers passes or ops; may repeat.",
    )(function)


def _note_imports(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> None:
    ctx.meta.setdefault(_IMPORTS, []).extend(value)


def load_imports() -> None:
    """Import what ``--import`` names, once. The current folder is searched first, as ``python -m`` does.

    Raises:
        click.BadParameter: there is no such module.
        InputError: it raises an error while it is imported.
    """
    ctx = click.get_current_context(silent=True)
    names = ctx.meta.get(_IMPORTS, []) if ctx is not None else []
    if not names:
        return
    start_libraries()
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    while names:
        _import(names.pop(0))


def _import(name: str) -> None:
    from layergraph.errors import InputError, LayerGraphError

    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        raise click.BadParameter(
            f"{name!r} is no name of a module; it is given as in Python: my_passes, or package.my_passes",
            param_hint="'--import'",
        )
    try:
        importlib.import_module(name)
    except LayerGraphError as error:
        error.path = error.path or _place(error)
        raise
    except (Exception, SystemExit) as error:
        # A module that is there and imports one that is not is at fault itself.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise click.BadParameter(
                f"no module named {name!r}, neither in the current folder nor installed", param_hint="'--import'"
            ) from error
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else ""
        raise InputError(
            f"the module {name} cannot be imported",
            path=_place(error),
            found=f"{type(error).__name__}: {first}" if first else type(error).__name__,
            do=f"mend it: python -c 'import {name}' must work; -v shows the traceback",
        ) from error


def _place(error: BaseException) -> str | None:
    """File and line of the code that failed: the last that is neither of Python's own library nor of this package."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    library = Path(os.__file__).parent
    theirs = ("<frozen", str(Path(__file__).parents[1]), *(str(path) for path in library.glob("*.py")))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(theirs)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def is_verbose(ctx: click.Context) -> bool:
    """Whether -v was given to the group or the command."""
    return bool(ctx.meta.get(_KEY, False))


def start_libraries() -> None:
    """Keep transformers off the network, whatever the environment says, and both libraries' chatter off the terminal.

    Called by commands before they import torch (huggingface_hub reads its variable once). The process is ours alone
    here, so global settings meet nobody. With -v the chatter stays.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
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
        start_libraries()
        load_imports()
        yield say


__all__ = ["import_option", "is_verbose", "load_imports", "start_libraries", "verbose_option", "working"]
