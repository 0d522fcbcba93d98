"""``layergraph``: the group of commands, and what becomes of errors."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

import layergraph
from layergraph.cli.console import is_verbose, verbose_option
from layergraph.errors import LayerGraphError, RefusedError

# Command -> module and attribute. Modules import torch inside their functions only.
_COMMANDS = {
    "optimize": ("layergraph.cli.optimize", "optimize_command"),
    "generate": ("layergraph.cli.generate", "generate_command"),
    "report": ("layergraph.cli.inspect", "report_command"),
    "dump": ("layergraph.cli.inspect", "dump_command"),
    "diff": ("layergraph.cli.inspect", "diff_command"),
    "explain": ("layergraph.cli.inspect", "explain_command"),
    "demo": ("layergraph.cli.demo", "demo_command"),
    "bench": ("layergraph.cli.bench", "bench_group"),
}

EPILOG = """
\b
Start here:
  layergraph demo                                   see every step on a small trained model
  layergraph optimize MODEL --tap hidden_states -o OUT
  layergraph dump OUT                               the graph, layer by layer
  layergraph generate OUT "Once upon a time"        text, with or without a shadow adapter
  layergraph optimize --help                        passes, taps, examples

\b
Exit codes:
  0    done
  1    failed; the message says what, where, and what to do
  2    the command line itself is wrong; nothing was loaded or written
  3    under --strict: a pass found nothing to do, or refused a site; nothing was written
  130  interrupted

In Python: layergraph.optimize(model, passes=[...]). Documentation: docs/index.md in the repository.
"""


class CommandLine(click.Group):
    """Loads commands when they are called, and turns errors into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if args and (near := nearest(args[0], _COMMANDS)):
                raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near!r}?", ctx) from error
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LayerGraphError as error:
            if is_verbose(ctx):
                raise
            _say(f"error: {error.message(shell=True)}")
            ctx.exit(3 if isinstance(error, RefusedError) else 1)
        except (click.ClickException, click.exceptions.Exit, click.Abort, KeyboardInterrupt, BrokenPipeError):
            raise
        except Exception as error:
            if is_verbose(ctx):
                raise
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            _say(f"error: {type(error).__name__}: {first}\n  do         run again with -v for the traceback")
            ctx.exit(1)


def nearest(name: str, names: Any) -> str | None:
    """The name most like ``name``, if any is."""
    import difflib

    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return found[0] if found else None


def _say(text: str) -> None:
    click.echo(text, err=True)


@click.command(cls=CommandLine, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(layergraph.__version__, prog_name="layergraph")
@verbose_option
def cli() -> None:
    """Rewrite Hugging Face models as graphs: trace once, run passes, save, load, look.

    A model folder is one written by save_pretrained; a program folder is one written by this tool or by
    program.save. Folders are read from this machine alone: the network is never asked, whatever a folder or the
    environment says. No code from a folder is run, only that of modules named with --import.
    """


def main() -> None:
    """Entry point of the ``layergraph`` command."""
    try:
        cli(prog_name="layergraph")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # ``layergraph dump ... | head``: the reader has left. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


__all__ = ["CommandLine", "cli", "main", "nearest"]
