"""What the passes did, as a table for people and as data for programs."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from layergraph.ir.program import PassRecord, Program


@dataclass(frozen=True)
class Report:
    """History of a program: each pass with its sites, refusals, sizes before and after, largest errors.

    ``parameters`` and ``bytes`` are what the graphs use. ``kept``, number and bytes, is what passes dropped and
    ``verify=True`` keeps beside them in memory, so that the passes can be removed; it is not saved.

    ``print(report)`` shows tables; :meth:`as_dict` gives the same as plain data.
    """

    model: str
    fingerprint: str
    n_nodes: dict[str, int]
    parameters: int
    bytes: int
    kept: tuple[int, int]
    records: tuple[PassRecord, ...]

    @classmethod
    def of(cls, program: Program) -> Report:
        return cls(
            model=program.model.cls.rpartition(":")[2],
            fingerprint=program.fingerprint,
            n_nodes={name: len(unit.nodes) for name, unit in program.graphs.items()},
            parameters=program.n_parameters,
            bytes=program.parameter_bytes,
            kept=_kept(program),
            records=program.history,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "nodes": dict(self.n_nodes),
            "parameters": self.parameters,
            "bytes": self.bytes,
            "kept": {"parameters": self.kept[0], "bytes": self.kept[1]},
            "passes": [record.to_dict() for record in self.records],
        }

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=110, force_terminal=False)
        nodes = ", ".join(f"{name} {count} nodes" for name, count in self.n_nodes.items())
        size = f"{self.parameters:,} parameters, {human_bytes(self.bytes)}"
        console.print(f"{self.model}   {nodes}   {size}   {self.fingerprint[:12]}", highlight=False)
        if self.kept[0]:
            kept = f"{self.kept[0]:,} parameters, {human_bytes(self.kept[1])}"
            console.print(f"kept beside them, to undo passes (verify=True): {kept}", highlight=False)
        if not self.records:
            console.print("no pass has run", highlight=False)
        else:
            console.print(_table(self.records))
        for record in self.records:
            for line in _details(record):
                console.print(line, highlight=False, markup=False)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    __repr__ = __str__


def _kept(program: Program) -> tuple[int, int]:
    """Number and bytes of the weights that no graph has any more and the original is restored from."""
    kept = program.original.kept if program.original is not None else {}
    held = set(program.state_dict) | {name for remap in program.weights for name in remap.original}
    in_use = {id(tensor) for name, tensor in kept.items() if name in held}
    gone = {id(tensor): tensor for name, tensor in kept.items() if name not in held}
    tensors = [tensor for key, tensor in gone.items() if key not in in_use]
    return sum(item.numel() for item in tensors), sum(item.numel() * item.element_size() for item in tensors)


def _table(records: tuple[PassRecord, ...]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("pass", "promise", "sites", "refused", "nodes", "parameters", "largest error"):
        table.add_column(title, justify="left" if title in ("pass", "promise") else "right")
    for record in records:
        counts = record.graphs.values()
        added, removed = sum(c["added"] for c in counts), sum(c["removed"] for c in counts)
        before, after = record.sizes["parameters"]
        table.add_row(
            record.label,
            record.promise,
            " + ".join(str(c["sites"]) for c in counts),  # by graph: the lines below name each place once
            str(len(record.refusals)),
            f"-{removed} +{added}",
            f"{after:,}" if before == after else f"{before:,} -> {after:,}",
            f"{max(record.errors.values()):.1e}" if record.errors else "not run",
        )
    return table


def _details(record: PassRecord, limit: int = 8) -> list[str]:
    lines = [record.label]
    lines += [f"  + {site}" for site in record.sites[:limit]]
    if len(record.sites) > limit:
        lines.append(f"  + ... {len(record.sites) - limit} more")
    if not record.sites:
        lines.append("  nothing to do: the graph is unchanged")
    lines += [
        f"  - {path or '(model)'} left alone ({code}): {reason}" for path, code, reason in record.refusals[:limit]
    ]
    if len(record.refusals) > limit:
        lines.append(f"  - ... {len(record.refusals) - limit} more left alone")
    lines += [f"  note: {note}" for note in record.notes]
    return lines


def human_bytes(count: float) -> str:
    """``538.2 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


__all__ = ["Report", "human_bytes"]
