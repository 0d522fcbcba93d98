"""The auxiliary loss of a woven shadow: the task's own loss on the first shadow state (arXiv 2604.19254, Eq. 8-9)."""

from __future__ import annotations

from typing import Any

import torch

from layergraph.errors import NotSupportedError
from layergraph.ir.adapter import LOSS_WEIGHT, ShadowPlan
from layergraph.ir.edit import Edit
from layergraph.ir.layers import span

ATEN = torch.ops.aten
_SCOPE = "shadow.loss"
_MEAN = 1  # torch's number for reduction="mean"


def add_auxiliary_loss(plan: ShadowPlan, edit: Edit, seed: torch.fx.Node) -> None:
    """Add ``weight * loss(head(s^(0)), labels)`` to the loss, and return its detached value as ``shadow_loss``.

    Raises:
        NotSupportedError: the head is no plain linear layer, or the problem type is not known from the labels.
    """
    maker = _Loss(plan, edit, seed)
    auxiliary = maker.classification() if plan.task == "SEQ_CLS" else maker.language()
    total = edit.output_node("loss")
    weighted = maker.call(ATEN.mul.Tensor, edit.input_node(LOSS_WEIGHT), auxiliary)
    if edit.value(weighted).dtype != edit.value(total).dtype:
        weighted = maker.call(ATEN.to.dtype, weighted, edit.value(total).dtype)
    edit.replace_output("loss", maker.call(ATEN.add.Tensor, total, weighted))
    edit.add_output("shadow_loss", maker.call(ATEN.detach.default, auxiliary))


class _Loss:
    """Appends ops at the end of the graph."""

    def __init__(self, plan: ShadowPlan, edit: Edit, seed: torch.fx.Node) -> None:
        self.plan, self.edit, self.seed = plan, edit, seed
        self.labels = edit.input_node("labels")
        self.end = next(iter(reversed(edit.graph.nodes)))
        root = edit.program.model.cls.replace(":", ".")
        self.scope = {"L__self__": ("", root), "shadow_loss": (_SCOPE, "layergraph.shadow_loss")}

    def call(self, target: Any, *args: Any) -> torch.fx.Node:
        return self.edit.call(target, *args, before=self.end, scope=self.scope)

    def language(self) -> torch.fx.Node:
        """Cross entropy of the next token, in the head's dtype as in peft."""
        logits = self._head(self.seed)
        vocabulary = self.edit.value(logits).shape[-1]
        logits = self.call(ATEN.slice.Tensor, logits, 1, 0, -1)
        labels = self.call(ATEN.slice.Tensor, self.labels, 1, 1, 9223372036854775807)
        logits = self.call(ATEN.reshape.default, logits, [-1, vocabulary])
        labels = self.call(ATEN.reshape.default, labels, [-1])
        return self.call(ATEN.cross_entropy_loss.default, logits, labels, None, _MEAN, -100)

    def classification(self) -> torch.fx.Node:
        """Regression, one label or several, told apart by number and dtype of the labels as in transformers."""
        logits = self._head(self._pooled())
        count = int(self.edit.value(logits).shape[-1])
        dtype = self.edit.value(self.labels).dtype
        if count == 1:
            flat = self.call(ATEN.reshape.default, self.labels, [-1])
            flat = self.call(ATEN.to.dtype, flat, self.edit.value(logits).dtype)
            return self.call(ATEN.mse_loss.default, self.call(ATEN.reshape.default, logits, [-1]), flat)
        if dtype in (torch.int64, torch.int32):
            labels = self.call(ATEN.reshape.default, self.labels, [-1])
            return self.call(ATEN.cross_entropy_loss.default, logits, labels, None, _MEAN, -100)
        return self.call(ATEN.binary_cross_entropy_with_logits.default, logits, self.labels)

    def _pooled(self) -> torch.fx.Node:
        """The last token that is no padding, on whichever side that is; index 0 in a row of padding."""
        if "attention_mask" not in self.edit.program[self.edit.name].interface.input_names:
            return self.call(ATEN.select.int, self.seed, 1, -1)
        mask = self.edit.input_node("attention_mask")
        device = self.edit.value(mask).device
        length = self.call(ATEN.sym_size.int, mask, 1)
        rows = self.call(ATEN.sym_size.int, self.seed, 0)
        places = self.edit.call(ATEN.arange.default, length, device=device, before=self.end, scope=self.scope)
        real = self.call(ATEN.ne.Scalar, mask, 0)
        last = self.call(ATEN.argmax.default, self.call(ATEN.mul.Tensor, real, places), -1)
        batch = self.edit.call(ATEN.arange.default, rows, device=device, before=self.end, scope=self.scope)
        return self.call(ATEN.index.Tensor, self.seed, [batch, last])

    def _head(self, hidden: torch.fx.Node) -> torch.fx.Node:
        """The base's head (as it stands in the graph, an adapter's copy included), or the adapter's own."""
        path = str(self.plan.head)
        linears = [node for node in span(self.edit.graph, path) if node.op == "call_function"]
        if len(linears) != 1 or linears[0].target is not ATEN.linear.default:
            raise NotSupportedError(
                "the auxiliary loss needs a head that is one linear layer",
                pass_name=self.edit.made_by,
                path=path,
                found=", ".join(str(node.target) for node in linears)[:200] or "nothing",
                do="set auxiliary_loss_weight to 0 and trace without labels",
            )
        if self.plan.head_state:
            names = [self.plan.head_state[key] for key in ("weight", "bias") if key in self.plan.head_state]
            return self.call(ATEN.linear.default, hidden, *(self.edit.input_node(name) for name in names))
        return self.call(ATEN.linear.default, hidden, *linears[0].args[1:])


__all__ = ["add_auxiliary_loss"]
