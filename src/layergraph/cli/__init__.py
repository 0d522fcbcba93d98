"""The command line. Nothing heavy is imported before a command that needs it runs, so ``--help`` is instant."""

from layergraph.cli.main import cli, main

__all__ = ["cli", "main"]
