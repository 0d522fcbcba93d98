"""``layergraph report | dump | diff | explain``: text about models and programs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from layergraph.cli.console import import_option, verbose_option, working

_FOLDER = click.Path(path_type=Path)
_submodule = click.option("--submodule", metavar="PATH", help="Take only this module of a model, such as model.visual.")
_graph = click.option("--graph", default="forward", show_default=True, help="Which graph of the program.")


@click.command("report", short_help="What each pass did to a saved program.")
@click.argument("folder", metavar="PROGRAM", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="As data: passes with options, sites, refusals, sizes, errors.")
@import_option
@verbose_option
def report_command(folder: Path, as_json: bool) -> None:
    """Say what each pass did to a saved program.

    \b
    Example:
      layergraph report saved/
    """
    from layergraph.cli.folders import open_program

    with working() as say:
        report = open_program(folder, None, say).report()
    click.echo(json.dumps(report.as_dict(), indent=1) if as_json else str(report))


@click.command("dump", short_help="Print a graph by layer, equal layers once.")
@click.argument("folder", metavar="FOLDER", type=_FOLDER)
@_graph
@_submodule
@import_option
@verbose_option
def dump_command(folder: Path, graph: str, submodule: str | None) -> None:
    """Print a graph layer by layer; layers that compute the same are printed once.

    FOLDER is a program, or a model, which is traced first. Nodes are numbered within a layer; h is the hidden state
    that enters it, ^name comes from elsewhere.

    \b
    Examples:
      layergraph dump saved/
      layergraph dump qwen2-vl/ --submodule model.visual | less
    """
    from layergraph.cli.folders import open_program

    with working() as say:
        program = open_program(folder, submodule, say)
        from layergraph.ir.printing import listing

        text = listing(program.ir, graph)
    click.echo(text)


@click.command("diff", short_help="Print what changed between two programs or models.")
@click.argument("before", metavar="A", type=_FOLDER)
@click.argument("after", metavar="B", type=_FOLDER)
@_graph
@_submodule
@import_option
@verbose_option
def diff_command(before: Path, after: Path, graph: str, submodule: str | None) -> None:
    """Print what changed from A to B, layer by layer; layers that changed alike are printed once.

    A and B are programs, or models, which are traced first. --submodule applies to those that are models.

    \b
    Examples:
      layergraph diff llama/ saved/
      layergraph diff qwen2-vl/ tower/ --submodule model.visual
    """
    from layergraph.cli.folders import MANIFEST, open_program

    with working() as say:
        a, b = (
            open_program(folder, None if (folder / MANIFEST).is_file() else submodule, say)
            for folder in (before, after)
        )
    click.echo(a.diff(b, graph))


@click.command("explain", short_help="Who made a node, or what a module is made of.")
@click.argument("folder", metavar="PROGRAM", type=_FOLDER)
@click.argument("what", metavar="NODE_OR_PATH")
@_graph
@import_option
@verbose_option
def explain_command(folder: Path, what: str, graph: str) -> None:
    """Say which pass made a node or changed a weight, and from what, or what a module is made of.

    \b
    Examples:
      layergraph explain tower/ patch_embed.proj
      layergraph explain tower/ patch_embed.proj.weight
      layergraph explain tower/ %linear_default
    """
    from layergraph.cli.folders import open_program

    with working() as say:
        program = open_program(folder, None, say)
    click.echo(program.explain(what, graph))


__all__ = ["diff_command", "dump_command", "explain_command", "report_command"]
