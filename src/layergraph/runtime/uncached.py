"""Why a program has no cached graph, and what to do about it."""

from __future__ import annotations

from layergraph.errors import InputError, NotSupportedError
from layergraph.ir.program import Program

# What the uncached graph can be given while text grows.
_TEXT = {"input_ids", "attention_mask", "position_ids"}


def writes_text(program: Program) -> bool:
    """Whether the uncached graph alone can generate: token ids in, logits out, of a model that generates."""
    unit = program.forward
    own = set(program.shadow.input_names) if program.shadow is not None else set()
    needed = set(unit.interface.input_names) - own
    return (
        program.model.generation_config is not None
        and "logits" in unit.interface.outputs
        and "input_ids" in needed <= _TEXT
    )


def no_cached_graph(program: Program, path: str | None = None) -> NotSupportedError:
    """The error for a program without the graph ``step``: the reason it keeps, and a remedy that holds in its case."""
    reason = program.model.uncached_because
    slower = "generate(..., use_cache=False) does without it, slower"
    slower_shell = "--no-cache does without it, slower"
    is_text = writes_text(program)
    dropped_by, is_reversible = _dropped_by(program)
    if dropped_by is not None:
        found = f"{dropped_by} dropped it" + (f": {reason}" if reason else "")
        back = f"program.remove({dropped_by!r}) brings it back" if is_reversible else "start again from the model"
        do = [back if is_reversible else f"{back}, without {dropped_by}", slower if is_text else ""]
        shell = [f"start again from the model's folder, without {dropped_by}", slower_shell if is_text else ""]
    elif not is_text:
        found = reason or f"{program.model.cls.rpartition(':')[2]} does not write text from token ids alone"
        do = ["trace a whole decoder, of a class that generates, such as ...ForCausalLM"]
        shell = ["give the folder of a decoder that generates, such as ...ForCausalLM"]
    elif reason is None:
        found = "traced with cached=False"
        do = ["trace the model again without cached=False", slower]
        shell = ["layergraph optimize, on the model's own folder, traces it with a cache", slower_shell]
    else:
        found = reason
        do = [slower, "layergraph.trace(model, cached=True) traces it, or says what stands against it"]
        shell = [slower_shell]
    return NotSupportedError(
        "this program has no cached graph",
        path=path,
        found=found,
        do="; ".join(filter(None, do)),
        shell="; ".join(filter(None, shell)),
    )


def _dropped_by(program: Program) -> tuple[str | None, bool]:
    """Label of the pass that dropped a cached graph which was there, and whether taking it out brings that back."""
    if program.original is None:
        return None, False
    try:
        source, is_reversible = program.original.restore(program), True
    except InputError:
        source, is_reversible = program.original.restore(program, missing="meta"), False
    if "step" not in source.graphs:
        return None, False
    return next(record.label for record in program.history if "step" not in record.graphs), is_reversible


__all__ = ["no_cached_graph", "writes_text"]
