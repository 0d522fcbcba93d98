"""A fusion family in one file: the gate and up projections of a gated MLP become one product.

Run it: ``python examples/fuse_gate_up.py``. What a family needs is here in order: a pattern (``GATED``),
a replacement (:meth:`FuseGateUp.rewrite`), a weight map in both directions (``concat-rows``), a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import layergraph as lg
from layergraph.ir.match import Op, Value, Weight, find
from layergraph.ir.weights import Remap, RemapKind, register_remap
from layergraph.passes.base import Findings, Promise, Refusal, Site

ATEN = torch.ops.aten
# The pattern: ``act(linear(x, gate)) * linear(x, up)``, in either order.
GATED = Op(
    ATEN.mul,
    Op((ATEN.silu, ATEN.gelu), Op(ATEN.linear, Value("x"), Weight("gate_weight"), Value("gate_bias"), name="gate")),
    Op(ATEN.linear, Value("x"), Weight("up_weight"), Value("up_bias"), name="up"),
)


# The weight map: both directions together, tested bit for bit by check_pass.
def _join(tensors: Sequence[torch.Tensor], params: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    return [torch.cat(list(tensors))]


def _split(tensors: Sequence[torch.Tensor], params: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    return [part.clone() for part in tensors[0].split(list(params["rows"]))]


register_remap("concat-rows", RemapKind(_join, _split))


@lg.register_pass
@dataclass(frozen=True)
class FuseGateUp(lg.Pass):
    """One product for ``act(gate(x)) * up(x)``.

    Before::

        %0 = linear(x, mlp.gate_proj.weight)
        %1 = silu(%0)
        %2 = linear(x, mlp.up_proj.weight)
        %3 = mul(%1, %2)

    After::

        %0 = linear(x, mlp.gate_proj.weight)      # [2 * n, k]: gate above up
        %1 = slice(%0, -1, 0, n); %2 = silu(%1)
        %3 = slice(%0, -1, n, 2 * n)
        %4 = mul(%2, %3)

    Left alone: R1, a projection with a bias; R2, a weight that something else reads too.
    """

    pass_name: ClassVar[str] = "fuse-gate-up"
    promise: ClassVar[Promise] = "exact"

    def find(self, program: Any, graph: str) -> Findings:
        sites, refusals = [], []
        for match in find(program[graph], GATED):
            gate, up = match["gate"], match["up"]
            if match.leaks:
                continue  # a projection that something else uses as well is another kind of block
            if match["gate_bias"] is not None or match["up_bias"] is not None:
                refusals.append(Refusal(match.path, "R1", "projections without bias", "a bias"))
            elif any(len(match[weight].users) > 1 for weight in ("gate_weight", "up_weight")):
                refusals.append(
                    Refusal(match.path, "R2", "weights of these projections alone", "one that is used elsewhere")
                )
            else:
                sites.append(Site(match.path, (gate.name, up.name), "gate and up in one product"))
        return Findings(tuple(sites), tuple(refusals))

    def rewrite(self, site: Site, edit: lg.Edit) -> None:
        gate, up = (edit.node(name) for name in site.nodes)
        x, weight, other = gate.args[0], gate.args[1], up.args[1]
        rows = [int(weight.meta["val"].shape[0]), int(other.meta["val"].shape[0])]
        names = (edit.target_of(weight), edit.target_of(other))
        edit.replace_state(weight, remap=Remap("concat-rows", names, names[:1], {"rows": rows}))
        both = edit.call(ATEN.linear.default, x, weight, before=gate)
        edit.replace(gate, edit.call(ATEN.slice.Tensor, both, -1, 0, rows[0], before=gate))
        edit.replace(up, edit.call(ATEN.slice.Tensor, both, -1, rows[0], sum(rows), after=both))
        edit.erase(gate)
        edit.erase(up)
        edit.refresh_users(both)


if __name__ == "__main__":
    from layergraph.testing.zoo import tiny_model

    program = lg.optimize(tiny_model("llama"), passes=["fuse-gate-up"], verify=True)
    print(program.report())
