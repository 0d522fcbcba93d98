"""Run passes one after another: find, rewrite, check, record. The program given is never changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from layergraph.errors import InputError, InputTypeError, LayerGraphError, NotFoundError, RefusedError
from layergraph.ir.edit import Edit
from layergraph.ir.exported import one_at_a_time
from layergraph.ir.program import Original, PassRecord, Program
from layergraph.passes.base import Findings, Pass
from layergraph.passes.guard import resolved_options, run_find, run_rewrite
from layergraph.passes.registry import find_pass, make_pass, pass_that_ran

Check = Callable[[Program, Program, Pass], Mapping[str, float]]
"""Given the program before and after a pass, and the pass: the largest relative error by output; raises if broken."""
Prepare = Callable[[Pass, Program], Pass]
"""Given a pass and the program it will run on: the pass with all it needs from outside of the graph."""
Progress = Callable[[str], None]


def resolve(passes: Sequence[Any]) -> list[Pass]:
    """Objects as they are, names as passes with default options.

    Raises:
        InputTypeError: neither a pass nor a name. NotFoundError: an unknown name.
    """
    if isinstance(passes, (str, Pass)) or not isinstance(passes, Sequence):
        raise InputTypeError("passes is not a list", found=repr(passes)[:80], do="write passes=[...]")
    resolved = []
    for item in passes:
        if isinstance(item, str):
            resolved.append(find_pass(item)())
        elif isinstance(item, Pass):
            resolved.append(item)
        elif isinstance(item, type) and issubclass(item, Pass):
            raise InputTypeError(f"{item.__name__} is a class", do=f"write {item.__name__}(...), with its options")
        else:
            raise InputTypeError(
                "not a pass",
                expected="a layergraph.Pass object or the name of one",
                found=f"{type(item).__name__}: {item!r}"[:80],
                do="derive from layergraph.Pass",
            )
    return resolved


@one_at_a_time
def run(
    program: Program,
    passes: Sequence[Pass],
    *,
    check: Check | None = None,
    strict: bool = False,
    keep_weights: bool = False,
    prepare: Prepare | None = None,
    labels: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Program:
    """The program after all passes, in order.

    Args:
        check: called after each pass that changed something.
        strict: raise on a refusal, or where a pass finds nothing.
        keep_weights: keep weights that passes drop, so that every pass can be removed again.
        prepare: called with each pass before it runs.
        labels: what to call the passes; by default their names, numbered.

    Raises:
        LayerGraphError: whatever a pass raises, with the pass and those before it named.
        RefusedError: see ``strict``.
    """
    say = progress or (lambda text: None)
    current = program
    for number, item in enumerate(passes):
        ran = [record.label for record in current.history]
        label = labels[number] if labels is not None else _label(item, current)
        say(f"{label}: looking for sites")
        try:
            _check_order(item, current)
            if prepare is not None:
                item = prepare(item, current)
            lifted = _lift_taps(current) if item.moves_inputs else []
            for record in reversed(lifted):  # the last of a name goes by that name
                current = remove(current, record.label)
            current = _run_one(current, item, label, check, strict, keep_weights, say)
            for record in lifted:
                again = make_pass(record.name, dict(record.options))
                current = _run_one(current, again, record.label, check, False, keep_weights, say)
        except LayerGraphError as error:
            error.pass_name = error.pass_name or label
            error.ran = error.ran or tuple(ran)
            raise
    return current


def _lift_taps(program: Program) -> list[PassRecord]:
    """Passes that only return values of the graph. They choose again after one that moves what enters a module."""
    return [record for record in program.history if record.promise == "additive" and record.outputs]


def _run_one(
    program: Program,
    item: Pass,
    label: str,
    check: Check | None,
    strict: bool,
    keep_weights: bool,
    say: Progress,
) -> Program:
    kept = {name: unit for name, unit in program.graphs.items() if item.keeps(program, name)}
    found: dict[str, Findings] = {name: run_find(item, program, name, label) for name in kept}
    options = resolved_options(item, next(iter(found.values())), label)
    if strict:
        _refuse(found, label)
    has_sites = any(findings.sites for findings in found.values())
    after = program.evolve(graphs=kept) if has_sites and len(kept) < len(program.graphs) else program
    counts: dict[str, dict[str, int]] = {}
    for name, findings in found.items():
        n_before = len(after[name].nodes)
        if findings.sites:
            say(f"{label}: rewriting {len(findings.sites)} sites")
            with Edit(after, name, made_by=label) as edit:
                for site in findings.sites:
                    run_rewrite(item, site, edit, label)
                after = edit.finish()
        made = sum(1 for node in after[name].provenance.values() if node.made_by == label)
        n_after = len(after[name].nodes)
        counts[name] = {"sites": len(findings.sites), "added": made, "removed": n_before + made - n_after}
    if after is program:
        record = _record(item, label, options, found, counts, {}, program, after)
        return program.evolve(history=(*program.history, record))
    if program.original is None:
        after = after.evolve(original=Original.of(program, keep_weights=keep_weights))
    elif keep_weights:
        after = after.evolve(original=program.original.keeping(program))
    say(f"{label}: checking")
    errors = check(program, after, item) if check is not None else {}
    record = _record(item, label, options, found, counts, errors, program, after)
    return after.evolve(history=(*program.history, record))


def _record(
    item: Pass,
    label: str,
    options: dict[str, Any],
    found: Mapping[str, Findings],
    counts: Mapping[str, Mapping[str, int]],
    errors: Mapping[str, float],
    before: Program,
    after: Program,
) -> PassRecord:
    refusals = {
        (refusal.path, refusal.code, f"expected {refusal.expected}, found {refusal.found}"): None
        for findings in found.values()
        for refusal in findings.refusals
    }
    notes = {note: None for findings in found.values() for note in findings.notes}
    outputs = [name for unit in after.graphs.values() for name in unit.interface.outputs]
    old = {name for unit in before.graphs.values() for name in unit.interface.outputs}
    return PassRecord(
        label=label,
        name=item.pass_name,
        options=options,
        promise=item.promises(),
        graphs=counts,
        sites=tuple(dict.fromkeys(str(site) for findings in found.values() for site in findings.sites)),
        notes=tuple(notes),
        refusals=tuple(refusals),
        errors=dict(errors),
        outputs=tuple(name for name in dict.fromkeys(outputs) if name not in old),
        sizes={
            "parameters": (before.n_parameters, after.n_parameters),
            "bytes": (before.parameter_bytes, after.parameter_bytes),
        },
    )


def _label(item: Pass, program: Program) -> str:
    """The pass's name, numbered past every one of that name that is there: labels stay what they were."""
    used = [record.label.partition("#")[2] or "1" for record in program.history if record.name == item.pass_name]
    return f"{item.pass_name}#{max(map(int, used)) + 1}" if used else item.pass_name


def _check_order(item: Pass, program: Program) -> None:
    for record in program.history:
        if item.pass_name in pass_that_ran(record.name).after:
            raise InputError(
                f"{item.pass_name} must run before {record.name}",
                pass_name=item.pass_name,
                do="change the order of passes",
            )


def _refuse(found: Mapping[str, Findings], label: str) -> None:
    for findings in found.values():
        for refusal in findings.refusals:
            raise RefusedError(
                f"{label} left {refusal.path or 'the model'} as it is",
                pass_name=label,
                path=refusal.path,
                expected=refusal.expected,
                found=f"{refusal.found}   {refusal.code}",
                do="nothing if that is meant; strict=False keeps the rest",
            )
    if not any(findings.sites for findings in found.values()):
        raise RefusedError(f"{label} found nothing to do", pass_name=label, do="drop the pass, or strict=False")


@one_at_a_time
def remove(program: Program, what: Pass | str, **options: Any) -> Program:
    """The program without one of its passes, given the object, its label, or its name (the last of it).

    An additive pass only loses its outputs; otherwise the passes that remain run again on the original graph.

    Raises:
        NotFoundError: no such pass ran. InputError: dropped weights would be needed.
    """
    position = _position(program, what)
    record = program.history[position]
    rest = [*program.history[:position], *program.history[position + 1 :]]
    if record.promise == "additive":
        return _without_outputs(program, record, rest)
    original = program.original
    if original is None:
        return rerun(program, rest, **options)
    # Weights that a pass which stays had dropped are dropped again; who kept weights to undo a pass goes on undoing.
    was_meta = any(tensor.is_meta for tensor in program.state_dict.values())
    source = original.restore(program, missing="meta")
    try:
        after = rerun(source, rest, keep_weights=bool(original.kept), **options)
    except NotFoundError as error:
        if error.pass_name is None:  # not what a pass named: a pass that is not imported
            raise
        raise InputError(
            f"{record.label} cannot be removed from under {error.pass_name}, which names what it made",
            found=error.what,
            do=f"remove {error.pass_name!r} first",
        ) from error
    if not was_meta and any(tensor.is_meta for tensor in after.state_dict.values()):
        original.restore(program)  # says which weights are gone
    if not was_meta and after.original is not None:
        held = {name: tensor for name, tensor in after.original.kept.items() if not tensor.is_meta}
        after = after.evolve(original=replace(after.original, kept=held))
    return after


def rerun(source: Program, history: Sequence[PassRecord], **options: Any) -> Program:
    """Passes that ran once on another state of the program, run again on ``source``, under their labels."""
    passes = [make_pass(item.name, dict(item.options)) for item in history]
    return run(source, passes, labels=[item.label for item in history], **options)


def _without_outputs(program: Program, record: PassRecord, rest: list[PassRecord]) -> Program:
    after = program
    for name, unit in program.graphs.items():
        gone = [output for output in record.outputs if output in unit.interface.outputs]
        if gone:
            edit = Edit(after, name, made_by=f"remove {record.label}")
            for target in unit.targets.values():
                edit.keep_state(target)  # a tap may have used what nothing else does; it was there before
            for output in gone:
                edit.remove_output(output)
            after = edit.finish()
    changed = any(any(count["sites"] for count in item.graphs.values()) for item in rest)
    return after.evolve(history=tuple(rest), original=after.original if changed else None)


def _position(program: Program, what: Pass | str) -> int:
    latest_first = list(reversed(list(enumerate(program.history))))
    if isinstance(what, Pass):
        matches = [
            number
            for number, record in latest_first
            if record.name == what.pass_name and what.left(dict(record.options))
        ]
    else:
        # A label names one pass; the name alone is the label of the first.
        matches = [number for number, record in latest_first if record.label == what]
        matches += [number for number, record in latest_first if record.name == what]
    if matches:
        return matches[0]
    if not isinstance(what, (str, Pass)):
        raise InputTypeError(
            "what to remove is neither a pass nor a name",
            found=repr(what)[:80],
            do="give the pass object, its label in program.report(), or its name",
        )
    wanted = what if isinstance(what, str) else what.describe()
    raise NotFoundError(
        f"no pass {wanted!r} ran on this program",
        expected=", ".join(record.label for record in program.history) or "none ran",
        do="use a label from program.report()",
    )


__all__ = ["Check", "Prepare", "remove", "rerun", "resolve", "run"]
