"""Tuples that a model returns when asked, as a run of it showed (see :mod:`layergraph.trace.hf_returned`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from layergraph.ir.layers import LayerIndex, ModuleCall
from layergraph.ir.program import GraphUnit
from layergraph.passes.tap_values import Entry, Recorded, call_output

Source = tuple[ModuleCall, bool, str]  # a call, whether the value went into it, the value


def place_returned(unit: GraphUnit, key: str, recorded: Sequence[Recorded]) -> list[Recorded]:
    """The tuples of ``key``: those the model returns, in its own fields, then what is ``recorded`` beyond that.

    One that is recorded by table and returned is taken as recorded: that knows more of it (what a block itself gave
    where the model returns the normed state).
    """
    placed: list[Recorded] = []
    matched: set[int] = set()
    for name, entries in unit.layers.returned.get(key, {}).items():
        sources = [list(_sources(unit.layers, places)) for places in entries]
        known = [item for item in recorded if _is_same(item, sources)]
        matched.update(map(id, known))
        field = tuple(name.split("."))
        own = known[0].entries if known else _entries(unit.layers, name, sources)
        collector = known[0].collector if known else ".".join(field[:-1])
        placed.append(Recorded(key, collector, field, tuple(own), 0))
    fields = {item.field for item in placed}
    return [*placed, *(item for item in recorded if id(item) not in matched and item.field not in fields)]


def _sources(layers: LayerIndex, places: Sequence[str]) -> Iterator[Source]:
    for place in places:
        path, _, rest = place.removeprefix(">").partition("#")
        number, _, key = rest.partition(":")
        calls = layers.by_path.get(path, ())
        if not number.isdigit() or int(number) >= len(calls):
            continue  # a pass took that module away
        call = calls[int(number)]
        value = _value(layers, call, place.startswith(">"), key)
        if value is not None:
            yield call, place.startswith(">"), value


def _value(layers: LayerIndex, call: ModuleCall, is_input: bool, key: str) -> str | None:
    if is_input:
        return dict(call.inputs).get(key)
    if key in ("", "0") and call.returns in ("tensor", "tuple", "list"):
        return call_output(layers, call, 0)[0]
    return call_output(layers, call, key=key)[0]


def _is_same(item: Recorded, sources: Sequence[Sequence[Source]]) -> bool:
    if not sources or len(item.entries) != len(sources):
        return False
    pairs = zip(item.entries, sources, strict=True)
    return all(entry.value in [value for _, _, value in found] for entry, found in pairs)


def _entries(layers: LayerIndex, name: str, sources: Sequence[Sequence[Source]]) -> Iterator[Entry]:
    """Entries of a tuple that the model's own code collected, told apart by the repeated blocks they come from."""
    blocks = _blocks(layers, sources)
    left = [
        path
        for path in blocks
        if not any(call.path == path for found in sources for call, into, _ in found if not into)
    ]
    for position, found in enumerate(sources):
        outputs = [source for source in found if not source[1]]
        own = next((source for source in outputs if source[0].path in blocks), None)
        chosen = own or next(iter(outputs or found), None)
        if chosen is None:
            yield Entry(f"{name}.{position}", None, None, None, is_between=True)
        elif own is None and position == 0 and blocks:
            yield Entry(chosen[0].path, chosen[2], chosen[2], chosen[2], is_initial=True)
        elif own is None and position == len(sources) - 1 and len(left) == 1:
            # What comes after the last block (a norm) stands in its place.
            call = layers.by_path[left[0]][-1]
            yield Entry(left[0], chosen[2], call_output(layers, call)[0], call.first_input)
        else:
            yield Entry(chosen[0].path, chosen[2], chosen[2], chosen[2] if chosen[1] else chosen[0].first_input)


def _blocks(layers: LayerIndex, sources: Sequence[Sequence[Source]]) -> tuple[str, ...]:
    """The stack that gives most of the entries."""
    given = {call.path for found in sources for call, into, _ in found if not into}
    counts = Counter({stack: len(given.intersection(items)) for stack, items in layers.stacks.items()})
    best = counts.most_common(1)
    return layers.stacks[best[0][0]] if best and best[0][1] else ()


__all__ = ["place_returned"]
