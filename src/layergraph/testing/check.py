"""check_pass: everything a pass owes, on one model."""

from __future__ import annotations

import dataclasses
import io
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layergraph.adapters import preparer
from layergraph.api import load, trace
from layergraph.errors import InputError, LayerGraphError, PromiseError, StructureError
from layergraph.ir.execute import run_graph
from layergraph.passes.base import Findings, Pass
from layergraph.passes.registry import find_pass
from layergraph.program import Program
from layergraph.verify.numerics import relative_error, run_examples, tolerance_of


@dataclass(frozen=True)
class Checked:
    """What :func:`check_pass` saw.

    Attributes:
        before, after: the program without and with the pass.
        findings: by graph, what ``find`` returned.
        removed: whether ``program.remove`` led back to the fingerprint before (None if it needs dropped weights).
    """

    before: Program
    after: Program
    findings: dict[str, Findings]
    removed: bool | None


def check_pass(
    item: Pass,
    model: nn.Module | Program,
    example_inputs: Any = None,
    *,
    n_sites: int | None = None,
    expected: nn.Module | None = None,
) -> Checked:
    """Run one pass on one model and check all that a pass owes.

    * it is a frozen dataclass that its options make again;
    * ``find`` writes nothing and gives the same findings twice, with ``n_sites`` sites over all graphs, if given;
    * the program it ran on is unchanged; a pass without sites leaves the fingerprint as it was;
    * structure, sizes and the promise hold; two runs give the same graph;
    * every output is what ``expected`` computes, if given;
    * the result passes ``torch.export.save`` and ``load``, ``run_decompositions``, and ``save`` and ``load`` of ours;
    * original weights come back bit for bit, except those dropped;
    * ``remove`` leads back, unless weights were dropped.

    Args:
        item: the pass, registered with :func:`layergraph.register_pass`.
        model: a module (traced here) or a program.
        example_inputs: see :func:`layergraph.trace`.
        n_sites: over all graphs; a decoder with a language head has two of them, ``forward`` and ``step``.
        expected: for *defined* passes, a model that computes by itself what ``model`` computes after the pass. It is
            traced like ``model`` and compared with it on the same inputs, graph by graph.

    Raises:
        LayerGraphError: the first thing that does not hold.
    """
    before = model if isinstance(model, Program) else trace(model, example_inputs)
    _check_class(item)
    findings = _check_find(preparer()(item, before.ir), before, n_sites)
    fingerprint = before.fingerprint
    after = before.apply(item, verify=True)
    _require(before.fingerprint == fingerprint, item, "the program it ran on", "unchanged", "changed")
    again = before.apply(type(item).from_options(item.options()))
    _require(again.fingerprint == after.fingerprint, item, "a second run from its options", "the same graph", "another")
    if not any(found.sites for found in findings.values()):
        _require(after.fingerprint == fingerprint, item, "a run without sites", "an unchanged graph", "another")
    if expected is not None:
        _check_expected(item, after, trace(expected, example_inputs))
    _check_torch(item, after)
    _check_weights(item, before, after)
    _check_saved(item, after)
    return Checked(before, after, findings, _check_removed(item, before, after))


def _require(holds: bool, item: Pass, what: str, expected: str, found: str, do: str | None = None) -> None:
    if not holds:
        raise PromiseError(
            f"{what} is not as it must be", pass_name=item.pass_name, expected=expected, found=found, do=do
        )


def _check_class(item: Pass) -> None:
    params = getattr(type(item), "__dataclass_params__", None)
    _require(bool(params and params.frozen), item, "the class", "a frozen dataclass", type(item).__name__)
    try:
        find_pass(item.pass_name)
    except LayerGraphError as error:
        raise InputError(
            f"{type(item).__name__} is not registered", do="decorate it with @layergraph.register_pass"
        ) from error
    for field in dataclasses.fields(item):
        _require(not field.name.startswith("_"), item, f"option {field.name}", "a public name", "a private one")


def _check_find(item: Pass, program: Program, n_sites: int | None) -> dict[str, Findings]:
    kept = [name for name in program.ir if item.keeps(program.ir, name)]
    first = {name: item.find(program.ir, name) for name in kept}
    second = {name: item.find(program.ir, name) for name in kept}
    _require(first == second, item, "find called twice", "the same findings", "others")
    counts = {name: len(found.sites) for name, found in first.items()}
    if n_sites is not None:
        found = f"{sum(counts.values())} ({', '.join(f'{name} {count}' for name, count in counts.items())})"
        expected = f"{n_sites} over all graphs"
        do = "see what it finds: print(program.apply(the_pass).report()); then mend find() or n_sites"
        _require(sum(counts.values()) == n_sites, item, "the number of sites", expected, found, do)
    return first


def _check_expected(item: Pass, after: Program, twin: Program) -> None:
    _require(set(after.ir) <= set(twin.ir), item, "the list of graphs", ", ".join(twin.ir), ", ".join(after.ir))
    for name, unit in after.ir.graphs.items():
        found, wanted = run_examples(unit), run_examples(twin.ir[name], of=unit)
        if found is None or wanted is None:
            raise InputError(
                f"graph {name!r} has no weights or inputs to compare", do="give models that are not on meta"
            )
        _require(set(found) == set(wanted), item, f"what {name} returns", ", ".join(wanted), ", ".join(found))
        for output, value in wanted.items():
            error, allowed = relative_error(found[output], value), tolerance_of(value.dtype)
            what = f"output {output} of graph {name}"
            _require(error <= allowed, item, what, f"what `expected` gives, within {allowed:g}", f"{error:.3g} off")


def _check_torch(item: Pass, after: Program) -> None:
    """torch's own tools take every graph, and what they give computes the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # of torch, on its own tree specs
        _check_torch_quietly(item, after)


def _check_torch_quietly(item: Pass, after: Program) -> None:
    for name, unit in after.ir.graphs.items():
        expected = run_examples(unit)
        if expected is None:
            continue
        buffer = io.BytesIO()
        torch.export.save(unit.exported, buffer)
        buffer.seek(0)
        inputs = dict((unit.exported.example_inputs or ((), {}))[1])
        for how, exported in (
            ("torch.export.load", torch.export.load(buffer)),
            ("run_decompositions", unit.exported.run_decompositions()),
        ):
            given = {key: tensor.clone() for key, tensor in inputs.items()}
            with torch.no_grad():
                outputs = exported.module()(**given)
            for output, value in expected.items():
                error = relative_error(outputs[output], value)
                allowed = tolerance_of(value.dtype)
                if error > allowed:
                    raise StructureError(
                        f"graph {name!r} computes something else after {how}",
                        pass_name=item.pass_name,
                        expected=f"{output} within {allowed:g}",
                        found=f"{error:.3g}",
                    )


def _check_weights(item: Pass, before: Program, after: Program) -> None:
    original = before.state_dict()
    for name, tensor in after.state_dict().items():
        if name in original:
            same = tensor.dtype == original[name].dtype and torch.equal(tensor, original[name])
            _require(same, item, f"weight {name} in the original layout", "equal bit for bit", "another")


def _check_saved(item: Pass, after: Program) -> None:
    if any(tensor.device.type == "meta" for tensor in after.ir.state.values()):
        return
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("original", "graph"):
            after.save(folder, layout, progress=False)
            loaded = load(folder, progress=False)
            _require(loaded.fingerprint == after.fingerprint, item, "a loaded program", after.fingerprint, "another")
            for name, unit in after.ir.graphs.items():
                inputs = dict((unit.exported.example_inputs or ((), {}))[1])
                with torch.no_grad():
                    old = run_graph(unit, {key: tensor.clone() for key, tensor in inputs.items()})
                    new = run_graph(loaded.ir[name], {key: tensor.clone() for key, tensor in inputs.items()})
                for output, value in old.items():
                    _require(torch.equal(new[output], value), item, f"output {output} after load", "equal", "another")


def _check_removed(item: Pass, before: Program, after: Program) -> bool | None:
    try:
        removed = after.remove(item.pass_name)
    except InputError:
        return None
    _require(removed.fingerprint == before.fingerprint, item, "the program after remove", before.fingerprint, "another")
    return True


__all__ = ["Checked", "check_pass"]
