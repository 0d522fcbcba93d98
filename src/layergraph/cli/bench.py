"""``layergraph bench``: a group whose commands live with what they measure."""

from __future__ import annotations

import importlib

import click

from layergraph.cli.console import verbose_option

_COMMANDS = {
    "conv2d": ("layergraph.cli.bench_conv2d", "conv2d_command"),
    "kernels": ("layergraph.kernels.bench", "kernels_command"),
}


class BenchGroup(click.Group):
    """Mounts the commands that this version has."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in _COMMANDS if self.get_command(ctx, name) is not None]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[name]
        try:
            command: click.Command | None = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            return None
        return command


@click.group("bench", cls=BenchGroup, short_help="Measure kernels and patch embeddings on this machine.")
@verbose_option
def bench_group() -> None:
    """Measure on this machine: shadow kernels against what the memory allows, and Conv2d against Linear.

    \b
    Example:
      layergraph bench kernels --help
      layergraph bench conv2d -o conv2d.json
    """


__all__ = ["BenchGroup", "bench_group"]
