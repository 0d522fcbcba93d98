"""``layergraph generate``: text from a model or program folder, written as it comes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layergraph.cli.console import import_option, verbose_option, working

if TYPE_CHECKING:
    import torch

    from layergraph.program import Program

_NONE = "none"
HELP = """Go on with PROMPT, by the program or model in FOLDER, and write the text as it comes.

FOLDER is a program written by layergraph, or a model written by save_pretrained, which is traced first. Without PROMPT
the text of --prompt-file or on standard input is continued. Greedy unless --temperature, --top-k or --top-p is given.
The text goes to standard output, the speed to standard error. The tokenizer is the one in FOLDER. The network is never
asked: adapters are folders on this machine.

--adapter may repeat: the first is woven in, the others join the same graph, and each writes a text of its own, under a
line "== NAME". Its NAME is that of the folder. "none" stands for the base model.

\b
Examples:
  layergraph generate saved/ "The import statement"
  layergraph generate qwen3/ "def main(" --max-new-tokens 80 --temperature 0.8 --seed 1
  layergraph generate qwen3/ "def main(" --adapter my-adapter/
  layergraph generate woven/ "def main(" --adapter code     an adapter that the program holds
  layergraph generate qwen3/ "If" --adapter none --adapter code/ --adapter prose/
  echo "Once upon" | layergraph generate saved/
  layergraph generate saved/ --prompt-file question.txt     as it is, the last line break included
  layergraph generate saved/ --ids 5,17,9                   without a tokenizer: ids in, ids out
"""


@click.command("generate", help=HELP, short_help="Write text with a program or model, with or without an adapter.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path), help="A text file to continue.")
@click.option("--ids", metavar="1,2,3", help="Token ids instead of a prompt; ids are written.")
@click.option(
    "--adapter",
    "adapters",
    metavar="FOLDER|NAME|none",
    multiple=True,
    help="A shadow adapter to weave in, one that the program holds, or none; may repeat.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0, min_open=True), help="Sample, at this temperature.")
@click.option("--top-k", type=click.IntRange(min=1), help="Sample among so many tokens.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample among the likeliest of this share.")
@click.option("--seed", type=int, default=0, show_default=True, help="For sampling.")
@click.option("--num-beams", type=click.IntRange(min=1), default=1, show_default=True, help="Beam search.")
@click.option("--engine", type=click.Choice(["eager", "inductor"]), default="eager", show_default=True)
@click.option("--no-cache", is_flag=True, help="Compute every token anew: slow, for programs without a cached graph.")
@import_option
@verbose_option
def generate_command(
    folder: Path,
    prompt: str | None,
    prompt_file: Path | None,
    ids: str | None,
    adapters: tuple[str, ...],
    max_new_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    num_beams: int,
    engine: str,
    no_cache: bool,
) -> None:
    if no_cache and engine != "eager":
        raise click.UsageError("--no-cache goes with --engine eager only")
    given = _ids(ids) if ids is not None else None
    if sum(item is not None for item in (prompt, prompt_file, given)) > 1:
        raise click.UsageError("PROMPT, --prompt-file and --ids are ways to say the same: give one")
    if given is None:
        prompt = _prompt(prompt, prompt_file)
    with working() as say:
        import torch

        from layergraph.ir.folder_read import check_folder

        check_folder(folder)
        tokenizer: Any = None if given is not None else _tokenizer(folder)
        tokens = torch.tensor([given if tokenizer is None else tokenizer(prompt)["input_ids"]], dtype=torch.long)
        program, names = _with_adapters(_open(folder, no_cache, say), adapters, say)
        _check_tokens(program, tokens)
    samples = temperature is not None or top_k is not None or top_p is not None
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": samples, "num_beams": num_beams}
    options |= {"use_cache": False} if no_cache else {}
    options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p} if samples else {}
    options = {key: value for key, value in options.items() if value is not None}
    for name in names:
        if len(names) > 1:
            click.echo(f"== {name or _NONE}")
        torch.manual_seed(seed)
        _write(program, tokens, tokenizer, name, {**options, "engine": engine})


def _write(program: Program, tokens: torch.Tensor, tokenizer: Any, name: str | None, options: dict[str, Any]) -> None:
    """Generate, write the text (word by word where there are no beams), and say how fast."""
    import torch

    streams = tokenizer is not None and options["num_beams"] == 1
    if streams:
        from transformers import TextStreamer

        options["streamer"] = TextStreamer(tokenizer, skip_special_tokens=True)
    started = time.perf_counter()
    made = program.generate(tokens, attention_mask=torch.ones_like(tokens), adapter=name, **options)[0]
    seconds, count = time.perf_counter() - started, len(made) - tokens.shape[1]
    if tokenizer is None:
        click.echo(",".join(str(token) for token in made.tolist()))
    elif not streams:
        click.echo(tokenizer.decode(made, skip_special_tokens=True))
    used = f", adapter {name}" if name is not None else ""
    click.echo(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} a second{used}", err=True)


def _prompt(prompt: str | None, file: Path | None) -> str:
    """What to go on with: as given, of a file, or of standard input."""
    from layergraph.errors import FormatError, MissingFileError

    if file is not None:
        try:
            prompt = file.read_text(encoding="utf-8")
        except OSError as error:
            raise MissingFileError(
                "the prompt cannot be read", path=str(file), found=error.strerror, do="check the path"
            ) from error
        except UnicodeDecodeError as error:
            raise FormatError(
                "the prompt is not text", path=str(file), expected="UTF-8", found=str(error), do="give a text file"
            ) from error
    elif prompt is None:
        prompt = "" if sys.stdin.isatty() else sys.stdin.read()
    if not prompt:
        raise click.UsageError("there is no prompt: give PROMPT, --prompt-file, --ids, or text on standard input")
    return prompt


def _check_tokens(program: Program, tokens: torch.Tensor) -> None:
    """Refuse what the embedding could not look up.

    Raises:
        InputError: no token at all. OutOfRangeError: an id beyond the vocabulary.
    """
    from layergraph.errors import InputError, OutOfRangeError

    if tokens.numel() == 0:
        raise InputError("the tokenizer makes no token of this prompt", do="give a longer one, or ids with --ids")
    config: Mapping[str, Any] = program.ir.model.config or {}
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if isinstance(size, int) and int(tokens.max()) >= size:
        raise OutOfRangeError(
            "a token id lies beyond the vocabulary",
            expected=f"0 to {size - 1}",
            found=str(int(tokens.max())),
            do="give ids of this model's own tokenizer",
        )


def _ids(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"expected numbers separated by commas, found {text!r}", param_hint="--ids") from error
    if min(found) < 0:
        raise click.BadParameter("ids are not negative", param_hint="--ids")
    return found


def _open(folder: Path, no_cache: bool, say: Any) -> Program:
    from layergraph.cli.folders import open_program
    from layergraph.runtime.uncached import no_cached_graph, writes_text

    program = open_program(folder, None, say)
    if not (writes_text(program.ir) if no_cache else "step" in program.programs):
        raise no_cached_graph(program.ir, str(folder))
    return program


def _with_adapters(program: Program, adapters: Sequence[str], say: Any) -> tuple[Program, list[str | None]]:
    """The program with the adapters that are named by folder, and the names of those to use, in order."""
    names: list[str | None] = []
    for adapter in adapters:
        program, name = _with_adapter(program, adapter, say)
        names.append(name)
    return program, names or [program.active_adapter]


def _with_adapter(program: Program, adapter: str, say: Any) -> tuple[Program, str | None]:
    from layergraph.errors import NotFoundError
    from layergraph.passes import WeaveShadow

    if adapter in program.adapters:
        return program, adapter
    if adapter == _NONE:
        return program, None
    folder = Path(adapter)
    if not folder.is_dir():
        raise NotFoundError(
            f"no adapter {adapter!r}",
            expected=f"a folder, or one of the program's: {', '.join(program.adapters) or 'it holds none'}",
            do="check the path; one that is on a hub must be downloaded first, since nothing is downloaded here",
        )
    name = re.sub(r"\W+", "-", folder.resolve().name).strip("-") or "given"
    while name in program.adapters:
        name += "-2"
    if program.adapters:
        program.add_adapter(folder, name, pad=True)
        return program, name
    say("weaving the adapter in")
    return program.apply(WeaveShadow(folder, name=name), progress=say), name


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    from layergraph.cli.folders import TOKENIZER_FILES
    from layergraph.errors import MissingFileError

    try:
        # transformers makes an empty one where there are no files at all.
        if not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
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
