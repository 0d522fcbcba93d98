"""The tables of ``docs/coverage``: one row a model type, with the reason where something does not work."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STATES = {
    "pass": "equal to eager",
    "parts": "equal to eager on the models inside; the whole could not be traced",
    "refused": "left alone, with the reason",
    "none": "nothing there to do",
    "fail": "differs, or an error of ours",
    "untraced": "could not be built, fed or traced; not a matter of the pass",
}
_COMMAND = "make coverage"
_SIZES = (
    "Where tiny sizes do not fit together, a model is built as its authors made it, with few layers. Inputs are made",
    "from signature and config; some seventy classes that take what nobody else takes (parts of codecs, decoders of",
    "masks) have theirs from a table. A row is about the whole model; where that cannot be traced, about its parts.",
    "",
)


def write_tables(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``taps.md`` and ``patch_embed.md`` from the results of all model types."""
    (folder / "taps.md").write_text(taps_table(rows))
    (folder / "patch_embed.md").write_text(patch_embed_table(rows))


def taps_table(rows: Sequence[Mapping[str, Any]]) -> str:
    text = [
        "# Taps, by architecture",
        "",
        "Every model type of transformers is built tiny, traced, and asked for every key of its",
        "`_can_record_outputs`; each entry is compared with the tuples that eager returns, at the traced size",
        "and at another. `largest` is the largest relative difference: 0 is bit for bit. Elsewhere the model has",
        "experts or packed attention, which are traced as other code than eager runs.",
        "",
        *_SIZES,
        *_head(rows, "taps"),
        "| model type | model | state | keys | entries | largest | reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        taps = row["taps"]
        figures = _figures(taps)
        reason = _reason(taps, row)
        text.append(
            f"| {row['model_type']} | {row['cls']} | {taps['state']} | {', '.join(figures['keys'])} "
            f"| {figures['compared'] or ''} | {figures['worst'] if figures['compared'] else ''} | {reason} |"
        )
    return "\n".join(text) + "\n"


def patch_embed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    text = [
        "# Convolutions as Linear, by architecture",
        "",
        "Every model type of transformers is built tiny, traced and rewritten with",
        "`FusePatchEmbed(conv2d=True)`; outputs are compared with eager, weights with its state dict, bit",
        "for bit. Model types without a convolution are counted, not listed.",
        "",
        *_SIZES,
        *_head(rows, "patch_embed"),
        "| model type | model | state | rewritten | left alone | largest | reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = row["patch_embed"]
        if found["state"] == "none":
            continue
        parts = [found, *found.get("parts", {}).values()]
        sites = [site.partition(":")[2].strip() for part in parts for site in part.get("sites", ())]
        refusals = [text for part in parts for text in part.get("refusals", ())]
        codes = Counter(match[0] for text in refusals if (match := re.search(r"R\d", text)))
        worst = max((part.get("worst", 0.0) for part in parts), default=0.0)
        left = ", ".join(f"{count} {code}" for code, count in sorted(codes.items()))
        text.append(
            f"| {row['model_type']} | {row['cls']} | {found['state']} | {_cell('; '.join(dict.fromkeys(sites)))} "
            f"| {left} | {f'{worst:.1e}' if sites else ''} | {_reason(found, row)} |"
        )
    return "\n".join(text) + "\n"


def _head(rows: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    import torch
    import transformers

    counts = Counter(row[kind]["state"] for row in rows)
    lines = [
        f"Made by `{_COMMAND}` with torch {torch.__version__.partition('+')[0]} and transformers "
        f"{transformers.__version__}, {len(rows)} model types.",
        "",
        "| state | model types | meaning |",
        "|---|---|---|",
        *(f"| {state} | {counts[state]} | {meaning} |" for state, meaning in _STATES.items() if counts[state]),
        "",
    ]
    reasons = Counter(_kind_of_reason(row) for row in rows if row[kind]["state"] in ("untraced", "parts"))
    if reasons:
        lines += ["Why the others could not be traced whole:", "", "| reason | model types |", "|---|---|"]
        lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
        lines.append("")
    return lines


def _kind_of_reason(row: Mapping[str, Any]) -> str:
    """Where it stopped, in words that can be counted."""
    reason = row["reason"]
    if "no forward of its own" in reason:
        return "it has no forward of its own, only methods"
    if "cannot be made" in reason or ("needs" in reason and row["stage"] == "inputs"):
        return "no recipe makes its example inputs"
    if "itself fails on these example inputs" in reason or row["stage"] in ("inputs", "eager"):
        return "eager itself fails on these sizes or inputs"
    if row["stage"] == "config":
        if "no model class" in reason or "No module named 'transformers" in reason:
            return "transformers has no model class for it alone"
        if "ImportError" in reason or "ModuleNotFound" in reason or "library" in reason:
            return "needs a package that is not installed"
        return "its config cannot be made small"
    if row["stage"] == "limit":
        return "more time or memory than allowed"
    return "torch.export cannot trace it"


def _figures(taps: Mapping[str, Any]) -> dict[str, Any]:
    parts = [taps, *taps.get("parts", {}).values()]
    keys = dict.fromkeys(key for part in parts for key in part.get("keys", ()))
    worst = max((part.get("worst", 0.0) for part in parts), default=0.0)
    compared = sum(part.get("compared", 0) for part in parts)
    return {"keys": list(keys), "compared": compared, "worst": "0" if worst == 0 else f"{worst:.1e}"}


def _reason(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    notes = [found.get("reason") or (row["reason"] if found["state"] != "pass" else "")]
    if found.get("upstream") and found.get("compared"):
        notes.append(f"eager itself fails with {', '.join(found['upstream'])}")
    elif found.get("beyond_eager"):
        notes.append(f"eager gives no {', '.join(found['beyond_eager'])} here")
    if found.get("by_hand"):
        notes.append(f"{', '.join(found['by_hand'])}: made by code between modules, left alone")
    return _cell("; ".join(filter(None, notes)))


def _cell(text: str) -> str:
    """Text that stays in its cell: no bars, no paths of the machine it was made on, not too long."""
    text = re.sub(r"/\S*/(\S+)", r"\1", text).replace("|", "/").replace("<", "&lt;")
    return text if len(text) <= 160 else text[:157] + "..."


__all__ = ["patch_embed_table", "taps_table", "write_tables"]
