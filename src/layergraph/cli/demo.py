"""``layergraph demo``."""

from __future__ import annotations

import click

from layergraph.cli.console import start_libraries, verbose_option


@click.command("demo", short_help="Every step on two models, in about a minute.")
@click.option("--quick", is_flag=True, help="A smaller tower and fewer timing runs.")
@verbose_option
def demo_command(quick: bool) -> None:
    """Show every step on two models: rewrite, look, compare with eager, time, save, load, undo.

    A small language model, trained and bundled with the package, gets taps; a Qwen2-VL vision tower of real width
    gets its Conv3d patch embedding fused; two trained shadow adapters write in turn from one graph. Nothing is
    downloaded; it takes about a minute on two cores. What it prints is measured while it runs.
    """
    start_libraries()
    from layergraph.demo import run_demo

    run_demo(quick=quick)


__all__ = ["demo_command"]
