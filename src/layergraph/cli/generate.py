"""``layergraph generate``: text from a model or program folder, written as it comes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layergraph.cli.console import verbose_option, working

if TYPE_CHECKING:
    from layergraph.program import Program

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken", "*.spm", "spiece.model", "sentencepiece*.model")
HELP = """Go on with PROMPT, by the program or model in FOLDER, and write the text as it comes.

FOLDER is a program written by layergraph, or a model written by save_pretrained, which is traced first. Without PROMPT
the text on standard input is continued. Greedy unless --temperature is given. The text goes to standard output, the
speed to standard error.

\b
Examples:
  layergraph generate saved/ "The import statement"
  layergraph generate qwen3/ "def main(" --max-new-tokens 80 --temperature 0.8 --seed 1
  layergraph generate qwen3/ "def main(" --adapter my-adapter/
  layergraph generate woven/ "def main(" --adapter code     an adapter that the program holds
  echo "Once upon" | layergraph generate saved/
  layergraph generate saved/ --ids 5,17,9                   without a tokenizer: ids in, ids out
"""


@click.command("generate", help=HELP, short_help="Write text with a program or model, with or without an adapter.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--ids", metavar="1,2,3", help="Token ids instead of a prompt; ids are written.")
@click.option("--adapter", metavar="FOLDER|NAME", help="A shadow adapter to weave in, or one that the program holds.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0, min_open=True), help="Sample, at this temperature.")
@click.option("--top-k", type=click.IntRange(min=1), help="Sample among so many tokens.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample among the likeliest of this share.")
@click.option("--seed", type=int, default=0, show_default=True, help="For sampling.")
@click.option("--num-beams", type=click.IntRange(min=1), default=1, show_default=True, help="Beam search.")
@click.option("--engine", type=click.Choice(["eager", "inductor"]), default="eager", show_default=True)
@verbose_option
def generate_command(
    folder: Path,
    prompt: str | None,
    ids: str | None,
    adapter: str | None,
    max_new_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    num_beams: int,
    engine: str,
) -> None:
    given = _ids(ids) if ids is not None else None
    if given is not None and prompt is not None:
        raise click.UsageError("PROMPT and --ids are two ways to say the same")
    if given is None and prompt is None:
        prompt = "" if sys.stdin.isatty() else sys.stdin.read()
    if given is None and not prompt:
        raise click.UsageError("there is no prompt: give PROMPT, --ids, or text on standard input")
    with working() as say:
        import torch

        tokenizer: Any = None if given is not None else _tokenizer(folder)
        program, name = _with_adapter(_open(folder, say), adapter, say)
        tokens = torch.tensor([given or []])
        if tokenizer is not None:
            tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    samples = temperature is not None or top_k is not None or top_p is not None
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": samples, "num_beams": num_beams}
    options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p} if samples else {}
    options = {key: value for key, value in options.items() if value is not None}
    if tokenizer is not None and num_beams == 1:
        from transformers import TextStreamer

        options["streamer"] = TextStreamer(tokenizer, skip_special_tokens=True)
    started = time.perf_counter()
    made = program.generate(tokens, adapter=name, engine=engine, **options)[0]
    seconds, count = time.perf_counter() - started, len(made) - tokens.shape[1]
    if tokenizer is None:
        click.echo(",".join(str(token) for token in made.tolist()))
    elif "streamer" not in options:
        click.echo(tokenizer.decode(made, skip_special_tokens=True))
    used = f", adapter {name}" if name is not None else ""
    click.echo(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} a second{used}", err=True)


def _ids(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"expected numbers separated by commas, found {text!r}", param_hint="--ids") from error
    if min(found) < 0:
        raise click.BadParameter("ids are not negative", param_hint="--ids")
    return found


def _open(folder: Path, say: Any) -> Program:
    from layergraph.cli.folders import open_program
    from layergraph.errors import NotSupportedError

    program = open_program(folder, None, say)
    if "step" not in program.programs:
        raise NotSupportedError(
            "this program does not generate: it has no cached graph",
            path=str(folder),
            found=program.ir.model.uncached_because,
            do="use a decoder whose cache can be traced",
        )
    return program


def _with_adapter(program: Program, adapter: str | None, say: Any) -> tuple[Program, str | None]:
    """The program, with one more adapter if a folder is named; and the name of the one to use."""
    from layergraph.errors import NotFoundError
    from layergraph.passes import WeaveShadow

    if adapter is None:
        return program, program.active_adapter
    if adapter in program.adapters:
        return program, adapter
    if not Path(adapter).is_dir():
        raise NotFoundError(
            f"no adapter {adapter!r}",
            expected=f"a folder, or one of the program's: {', '.join(program.adapters) or 'it holds none'}",
            do="check the path",
        )
    if program.adapters:
        program.add_adapter(adapter, "given", pad=True)
        return program, "given"
    say("weaving the adapter in")
    return program.apply(WeaveShadow(adapter, name="given"), progress=say), "given"


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    from layergraph.errors import MissingFileError

    try:
        # transformers makes an empty one where there are no files at all.
        if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
            raise FileNotFoundError("no tokenizer files")
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise MissingFileError(
            "the folder has no tokenizer that transformers can read",
            path=str(folder),
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            do="copy the tokenizer's files into it, or give token ids with --ids",
        ) from error


__all__ = ["HELP", "generate_command"]
