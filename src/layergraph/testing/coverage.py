"""Which architectures of transformers the passes hold on: each built tiny, traced, rewritten, compared with eager.

``python -m layergraph.testing.coverage`` checks every model type and writes ``docs/coverage``. Each model is checked
in a process of its own with limits on time and memory; results are kept line by line, so a run that stops goes on
where it was.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from layergraph.api import trace
from layergraph.errors import LayerGraphError
from layergraph.passes.fuse_patch_embed import FusePatchEmbed
from layergraph.passes.tap_outputs import TapOutputs
from layergraph.passes.tap_registry import registry_keys
from layergraph.program import Program
from layergraph.testing.coverage_configs import Sizes, build_sized, list_sizes
from layergraph.testing.coverage_inputs import example_inputs, is_special
from layergraph.trace.flatten import flatten_output
from layergraph.trace.inputs import batch_like, dynamic_dims
from layergraph.verify.numerics import relative_error

# fp32 in another order of summation: experts and packed attention are traced as other code than eager runs.
TOLERANCE = 1e-5
TOLERANCE_DOUBLE = 1e-10
_STAGES = ("config", "inputs", "eager", "trace", "done")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Row:
    """What was found on one model type.

    Attributes:
        taps, patch_embed: ``{"state": ..., "reason": ...}`` and figures; states are ``pass``, ``parts``, ``fail``,
            ``refused``, ``none`` (nothing there to do) and ``untraced``.
        stage: how far it came: ``config``, ``inputs``, ``eager``, ``trace``, ``done``.
        sizes: of the model, see :func:`layergraph.testing.coverage_configs.list_sizes`.
    """

    model_type: str
    cls: str = ""
    stage: str = "config"
    reason: str = ""
    sizes: str = "tiny"
    taps: dict[str, Any] = field(default_factory=dict)
    patch_embed: dict[str, Any] = field(default_factory=dict)


def check_model_type(model_type: str) -> Row:
    """Build, trace and rewrite a small model of one type; never raises.

    Where a model does not build, or eager fails, in one kind of sizes, the next is tried.
    """
    best = Row(model_type)
    for number, sizes in enumerate(list_sizes()):
        row = _check_sizes(model_type, sizes)
        if number == 0 or _rank(row) > _rank(best):
            best = row
        found_fault = "fail" in (row.taps["state"], row.patch_embed["state"])
        if found_fault or row.stage not in ("config", "eager"):
            break
    return best


def _check_sizes(model_type: str, sizes: Sizes) -> Row:
    row = Row(model_type, sizes=sizes.name)
    try:
        model = build_sized(model_type, sizes)
        row.cls, row.stage = type(model).__name__, "inputs"
        if not _check_model(row, model):
            _check_parts(row, model)
    except Exception as error:
        row.reason = short(error)
    if row.stage != "done":
        for part in (row.taps, row.patch_embed):
            part.setdefault("state", "untraced")
    return row


def _rank(row: Row) -> tuple[int, ...]:
    """Faults above all, whole models above parts, then what came further."""
    states = (row.taps["state"], row.patch_embed["state"])
    return "fail" in states, row.stage == "done", "parts" in states, _STAGES.index(row.stage)


def _check_model(row: Row, model: nn.Module) -> bool:
    """Whether the model could be traced whole; then the row says how taps and fusion went."""
    try:
        inputs = example_inputs(model)
        row.stage = "eager"
        plain = _eager(model, inputs, {})
        row.stage = "trace"
        program = trace(model, inputs, cached=False, progress=False)
    except Exception as error:
        row.reason = short(error)
        return False
    row.stage = "done"
    row.taps = _checked(_check_taps, model, program, inputs, plain)
    row.patch_embed = _checked(_check_patch_embed, model, program, inputs, plain)
    return True


def _checked(check: Any, model: nn.Module, program: Program, inputs: Mapping[str, Any], plain: Any) -> dict[str, Any]:
    """What ``check`` finds; where float32 differs from eager, what it finds in float64.

    Random weights can make a model that blows rounding up (Snake activations, deep stacks of batch norms): a sum in
    another order is then far off in float32, and is not in float64. A rewrite that is wrong is off in both.
    """
    single = guarded(check, model, program, inputs, plain)
    if single["state"] != "fail" or single.get("worst", 0.0) <= TOLERANCE:
        return single
    twin = copy.deepcopy(model).double()
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    try:
        again = trace(twin, wide, cached=False, progress=False)
        double = guarded(check, twin, again, wide, _eager(twin, wide, {}))
    except Exception:
        return single
    if double["state"] != "pass" or double["worst"] > TOLERANCE_DOUBLE:
        return single
    return double | {"reason": f"in float64; in float32 rounding grows to {single['worst']:.1g} with these weights"}


def _check_parts(row: Row, model: nn.Module) -> None:
    """The models inside one that cannot be traced whole: towers, text models, encoders."""
    whole, stage = row.reason, row.stage
    found: dict[str, Row] = {}
    for path, part in model.named_modules():
        inside = any(path.startswith(done + ".") for done in found)
        if path and not inside and _is_pretrained(part):
            attempt = Row(row.model_type, type(part).__name__)
            if _check_model(attempt, part):
                found[path] = attempt
    row.reason, row.stage = whole, stage
    for kind in ("taps", "patch_embed"):
        results = {path: getattr(attempt, kind) for path, attempt in found.items()}
        good = [path for path, result in results.items() if result["state"] in ("pass", "refused")]
        bad = [path for path, result in results.items() if result["state"] == "fail"]
        if bad:
            state = {"state": "fail", "reason": f"{bad[0]}: {results[bad[0]].get('reason', '')}"}
        elif good:
            state = {"state": "parts", "reason": f"{', '.join(good)}; whole: {whole}"}
        else:
            state = {"state": "untraced", "reason": whole}
        setattr(row, kind, state | {"parts": results})


def _is_pretrained(module: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def guarded(check: Any, *args: Any) -> dict[str, Any]:
    try:
        return dict(check(*args))
    except LayerGraphError as error:
        return {"state": "fail", "reason": short(error)}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"state": "fail", "reason": f"{short(error)} (in {last.name})"}


def short(error: BaseException) -> str:
    """One line of an exception, without memory addresses or paths."""
    if isinstance(error, LayerGraphError):
        text = " | ".join(str(part) for part in (error.what, error.path, error.found) if part)
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:240]


# Taps -------------------------------------------------------------------------------------------------------------


def _check_taps(
    model: nn.Module, program: Program, inputs: Mapping[str, Any], plain: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    keys = registry_keys(program.ir.model, program.ir["forward"].layers)
    if not keys:
        return {"state": "none", "reason": "returns no such tuples, whatever it is asked for"}
    tapped, refused = program, {}
    for key in keys:
        try:
            tapped = tapped.apply(TapOutputs(key))
        except LayerGraphError as error:
            refused[key] = short(error)
    refusals = [item for record in tapped.ir.history for item in record.refusals if item[1] == "R2"]
    left = {item[0] for item in refusals}
    result: dict[str, Any] = {"keys": [key for key in keys if key not in refused], "refused": refused}
    compared, worst, problems = 0, 0.0, []
    by_hand: dict[str, None] = {}
    upstream: dict[str, str] = {}
    for given in (inputs, *_other_sizes(model, program, inputs)):
        bare = plain if given is inputs else _eager(model, given, {})
        expected = recorded(model, given, keys, bare, upstream)
        found = _replay(tapped, given)
        expected = _whole(expected, found)
        for name, value in expected.items():
            if name not in found and (name in left or name.rpartition(".")[0] in left):
                by_hand[re.sub(r"(\.\d+)+$", "", name)] = None
                continue
            if name not in found:
                problems.append(f"{name} is missing")
                continue
            off = relative_error(found[name], value)
            worst = max(worst, off)
            compared += 1
            if off > TOLERANCE:
                problems.append(f"{name} differs by {off:.2g}")
    unused = [" ".join(item) for item in refusals]
    result |= {"compared": compared, "worst": worst, "unused": unused, "by_hand": list(by_hand)}
    if upstream:
        result["upstream"] = upstream
    beyond = [key for key in result["keys"] if not any(key in name for name in expected)]
    if beyond:
        result["beyond_eager"] = beyond
    if problems:
        return {"state": "fail", "reason": "; ".join(problems[:3]) + f" ({len(problems)} in all)", **result}
    if not compared and by_hand:
        return {"state": "refused", "reason": "", **result}
    if not compared:
        nothing = "; ".join(f"eager fails with {name}: {why}" for name, why in upstream.items())
        reason = next(iter(refused.values()), nothing or "eager gives nothing for the keys it declares")
        return {"state": "refused" if refused or upstream else "none", "reason": reason, **result}
    return {"state": "pass", "reason": "", **result}


def _whole(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``expected``, with lists of weights, one for each packed image, as the one block-diagonal matrix of a trace."""
    lists: dict[str, list[torch.Tensor]] = {}
    for name, value in expected.items():
        parent = name.rpartition(".")[0]
        lists.setdefault(parent if name not in found and parent in found else name, []).append(value)
    whole = {}
    for name, values in lists.items():
        whole[name] = values[0]
        if len(values) > 1:
            whole[name] = torch.zeros_like(found[name])
            start = 0
            for value in values:
                end = start + value.shape[-1]
                whole[name][..., start:end, start:end] = value
                start = end
    return whole


def recorded(
    model: nn.Module,
    inputs: Mapping[str, Any],
    keys: tuple[str, ...],
    plain: Mapping[str, torch.Tensor],
    failures: dict[str, str],
) -> dict[str, torch.Tensor]:
    """What eager adds to its return value when asked for ``keys``: by argument, else by config.

    Where eager itself raises when asked, the reason goes into ``failures``.
    """
    flags = {f"output_{key.removeprefix('output_')}": True for key in keys}
    found: dict[str, torch.Tensor] = {}
    for name in flags:
        # A copy each time: hooks of transformers stay, and count twice where other models collect next time.
        try:
            one = _try_eager(copy.deepcopy(model), inputs, {name: True})
        except Exception as error:
            failures[name] = short(error)
            continue
        # Entries of tuples only: asking for router logits also makes a loss of them, which is no tap.
        found.update(
            {key: value for key, value in one.items() if key not in plain and key.rpartition(".")[2].isdigit()}
        )
    return found


def _try_eager(model: nn.Module, inputs: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    try:
        return _eager(model, inputs, flags)
    except (TypeError, AttributeError):
        # It takes no such argument; the collecting models inside still read their configs.
        twin = copy.deepcopy(model)
        for module in twin.modules():
            config = getattr(module, "config", None)
            for name, value in flags.items():
                with contextlib.suppress(ValueError, TypeError):
                    if config is not None:
                        setattr(config, name, value)
        return _eager(twin, inputs, {})


def _eager(model: nn.Module, inputs: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return flatten_output(model(**_copied(inputs), **extra, **flags))[1]


def _replay(program: Program, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The program's outputs, drawing the same random numbers as eager (masked autoencoders draw their masks)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return flatten_output(program(**_copied(inputs)))[1]


def _copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _other_sizes(model: nn.Module, program: Program, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same inputs at one other size, where the model has sizes that vary."""
    if is_special(model):
        return
    labels = {label for dims in dynamic_dims(model, dict(inputs)).values() for label in dims.values()}
    sizes = {"batch": 3, "sequence": 11, "decoder_sequence": 6, "images": 3}
    asked = {label: sizes[label] for label in labels if label in sizes}
    if "image_grid_thw" in inputs:
        asked |= {"images": asked["batch"], "sequence": 31}
    if asked:
        with contextlib.suppress(LayerGraphError):
            other = batch_like(model, inputs, asked)
            # Some architectures have sizes that the trace itself fixes: a matter of tracing, tested there.
            _replay(program, other)
            yield other


# Convolutions -----------------------------------------------------------------------------------------------------


def _check_patch_embed(
    model: nn.Module, program: Program, inputs: Mapping[str, Any], plain: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    kinds = sorted({type(m).__name__ for m in model.modules() if isinstance(m, _CONVOLUTIONS)})
    if not kinds:
        return {"state": "none", "reason": "no convolution"}
    fused = program.apply(FusePatchEmbed(conv2d=True))
    record = fused.ir.history[-1]
    result: dict[str, Any] = {"convolutions": kinds, "sites": list(record.sites)}
    result["refusals"] = [" ".join(refusal) for refusal in record.refusals]
    if not record.sites:
        reason = result["refusals"][0] if result["refusals"] else "its convolutions are not part of this graph"
        return {"state": "refused" if result["refusals"] else "none", "reason": reason, **result}
    worst = 0.0
    for given in (inputs, *_other_sizes(model, program, inputs)):
        expected = plain if given is inputs else _eager(model, given, {})
        found = _replay(fused, given)
        for name, value in expected.items():
            worst = max(worst, relative_error(found[name], value) if name in found else float("inf"))
    back = fused.state_dict()
    state = model.state_dict()
    same = all(name in state and torch.equal(value, state[name]) for name, value in back.items())
    result["worst"] = worst
    if worst > TOLERANCE or not same:
        reason = f"differs from eager by {worst:.2g}" if same else "weights do not come back bit for bit"
        return {"state": "fail", "reason": reason, **result}
    return {"state": "pass", "reason": "", **result}


__all__ = ["TOLERANCE", "TOLERANCE_DOUBLE", "Row", "check_model_type", "guarded", "recorded", "short"]
