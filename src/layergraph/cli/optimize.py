"""``layergraph optimize``: model folder in, program folder out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layergraph.cli.console import import_option, load_imports, start_libraries, verbose_option, working

if TYPE_CHECKING:
    from layergraph.passes import Pass

HELP = """Trace the model in FOLDER, run passes on it, and save the program into OUT.

FOLDER is a model written by save_pretrained, or a program written before. OUT holds the graph, the weights under the
model's own names, and a manifest; for a whole model it is a checkpoint of the model's own kind too, tokenizer
included. Python reads it with layergraph.load(OUT). An older program in OUT is replaced in one step; if anything
fails, it stays.

\b
Passes (--pass NAME[:key=value,...]), run in the order given:
  fuse-patch-embed  non-overlapping convolutions (Conv3d patch embeddings) become
                    matrix products; conv2d=true|false|auto|TABLE.json
  weave-shadow      a shadow adapter (ShadowPEFT) becomes part of a decoder's
                    graph; adapter=FOLDER
  tap-outputs       what --tap does, at its place among the other passes

\b
Taps (--tap WHAT[:key=value,...]), after the passes:
  hidden_states                     what the model records under that name, all of it
  hidden_states:entries=2,14,-3     some entries, as transformers counts them
  hidden_states:layers=0,1          what blocks 0 and 1 return
  'model.layers.*.mlp'              modules by path or glob
  Qwen3Attention:index=0            modules by class
  model.layers.0.self_attn::softmax#0   an op inside a module
  keys: entries layers index at=input|output reduce=last|mean|norm|topk,K
        dtype only=true name

Without --pass and --tap, what the model's own config asks for (fusion_config) is done. A pass of your own is known
by its name once --import names its module. The network is never asked: an adapter is a folder on this machine.

\b
Examples:
  layergraph optimize llama/ --tap hidden_states:entries=2,14,-3 -o saved/
  layergraph optimize llama/ --tap hidden_states:layers=0,only=true -o draft-states/
  layergraph optimize qwen2-vl/ --submodule model.visual --pass fuse-patch-embed --verify -o tower/
  layergraph optimize saved/ --tap 'model.layers.*.mlp' -o saved/
  layergraph optimize llama/ --attention eager --tap attentions -o attentions/
  layergraph optimize opt/ --import my_passes --pass fold-scale -o folded/

More: docs/passes/tap-outputs.md, docs/passes/fuse-patch-embed.md, docs/errors.md.
"""


class SpecType(click.ParamType):
    """A click type that parses with a function; parsing may import torch, so not before a value is there."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        start_libraries()
        load_imports()
        try:
            return self._parse(value)
        except click.BadParameter as error:
            self.fail(error.message, param, ctx)


def _pass(text: str) -> Pass:
    from layergraph.cli.specs import parse_pass

    return parse_pass(text)


def _tap(text: str) -> Pass:
    from layergraph.cli.specs import parse_tap

    return parse_tap(text)


@click.command("optimize", help=HELP, short_help="Trace a model, run passes, save the program.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--pass", "passes", multiple=True, type=SpecType("name[:key=value,...]", _pass), help="A pass to run; may repeat."
)
@click.option(
    "--tap", "taps", multiple=True, type=SpecType("what[:key=value,...]", _tap), help="A value to return; may repeat."
)
@click.option("--submodule", metavar="PATH", help="Take only this module of the model, such as model.visual.")
@click.option(
    "--attention",
    type=click.Choice(["eager", "sdpa"]),
    help="Load the model with this attention; tapping attentions takes eager.",
)
@import_option
@click.option("--verify", is_flag=True, help="Run each pass's promise on example inputs and report the largest error.")
@click.option("--strict", is_flag=True, help="Fail (exit code 3) if a pass finds nothing, or leaves a site alone.")
@click.option(
    "--layout",
    type=click.Choice(["original", "graph"]),
    default="original",
    show_default=True,
    help="Names and shapes of the saved weights: the model's own, or the graph's. Both load.",
)
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@verbose_option
def optimize_command(
    folder: Path,
    passes: tuple[Pass, ...],
    taps: tuple[Pass, ...],
    submodule: str | None,
    attention: str | None,
    verify: bool,
    strict: bool,
    layout: str,
    out: Path,
) -> None:
    from layergraph.cli.folders import check_adapters, check_output, copy_companions, open_folder
    from layergraph.errors import RefusedError

    check_output(out, folder)
    chosen = [*passes, *taps]
    with working() as say:
        from layergraph.api import optimize
        from layergraph.program import Program

        check_adapters(chosen)
        source = open_folder(folder, submodule, say, attention)
        program = optimize(source, chosen or None, verify=verify, strict=strict, progress=say)
        if strict and not program.report().records:
            what = "no pass was asked for, on the command line or by the model's config"
            raise RefusedError(what, do="add --pass", shell="add --pass or --tap")
        program.save(out, layout, progress=say)
        is_checkpoint = submodule is None and (layout == "original" or isinstance(source, Program))
        copied = copy_companions(folder, out, whole=is_checkpoint)
        report = str(program.report())
    click.echo(report)
    click.echo(f"saved to {out}" + (f", with {', '.join(copied)}" if copied else ""))


__all__ = ["HELP", "SpecType", "optimize_command"]
