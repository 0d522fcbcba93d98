"""``layergraph bench conv2d``: the measured table that decides when a Conv2d becomes Linear."""

from __future__ import annotations

import json
from pathlib import Path

import click

from layergraph.cli.console import verbose_option, working


@click.command("conv2d", short_help="When a Conv2d patch embedding is faster as Linear, here.")
@click.option(
    "--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), show_default=True, help="Repeatable."
)
@click.option("--shape", "shapes", multiple=True, help="CHANNELS,SIDE,PATCH,FEATURES; those of ViT, CLIP and SigLIP.")
@click.option("--batch", default=4, show_default=True, help="Images at once.")
@click.option("--repeats", default=9, show_default=True, help="Timed runs of each form, interleaved.")
@click.option("--device", default="cpu", show_default=True)
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the table here, as JSON.")
@verbose_option
def conv2d_command(
    dtypes: tuple[str, ...], shapes: tuple[str, ...], batch: int, repeats: int, device: str, out: Path | None
) -> None:
    """Time Conv2d patch embeddings against Linear on this machine.

    \b
    Example:
      layergraph bench conv2d -o conv2d.json
      layergraph optimize vit/ --pass fuse-patch-embed:conv2d=conv2d.json -o fused/
    """
    with working() as say:
        import torch

        from layergraph.passes.conv_table import SHAPES, measure

        chosen = [getattr(torch, name, None) for name in dtypes]
        for name, dtype in zip(dtypes, chosen, strict=True):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise click.BadParameter(f"no floating-point dtype {name!r}", param_hint="--dtype")
        if device != "cpu" and not torch.accelerator.is_available():
            raise click.BadParameter("no accelerator is available to torch", param_hint="--device")
        if batch < 1 or repeats < 1:
            raise click.BadParameter("at least 1", param_hint="--batch, --repeats")
        sizes = [_sizes(text) for text in shapes] or list(SHAPES)
        table = measure(sizes, chosen, batch=batch, repeats=repeats, device=device, progress=say)
    click.echo("dtype      patch length  features  convolution over linear")
    for dtype, length, features, ratio in table["rows"]:
        click.echo(f"{dtype:10} {length:12}  {features:8}  {ratio:.2f}{'   Linear is faster' if ratio > 1 else ''}")
    if out is not None:
        out.write_text(json.dumps(table, indent=1) + "\n")
        click.echo(f"written to {out}")


def _sizes(text: str) -> tuple[int, int, int, int]:
    try:
        channels, side, patch, features = (int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"expected four numbers, found {text!r}", param_hint="--shape") from error
    if min(channels, patch, features) < 1 or side < patch:
        raise click.BadParameter(f"no patch fits: {text}", param_hint="--shape")
    return channels, side, patch, features


__all__ = ["conv2d_command"]
