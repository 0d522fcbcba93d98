"""fuse-patch-embed: convolutions whose stride equals their kernel become Linear."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from layergraph.errors import InputError
from layergraph.ir.edit import Edit
from layergraph.ir.exported import hint
from layergraph.ir.layers import module_path
from layergraph.ir.match import arguments
from layergraph.ir.program import GraphUnit, Program
from layergraph.ir.weights import Remap
from layergraph.passes.base import Findings, Pass, Promise, Refusal, Site
from layergraph.passes.conv_node import CONVOLUTIONS, TRANSPOSED, Conv
from layergraph.passes.conv_table import nearest, read_table

ATEN = torch.ops.aten
_RESHAPES = (ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default)
_CASTS = (ATEN.to.dtype, ATEN.to.dtype_layout, ATEN._to_copy.default)


@dataclass(frozen=True)
class FusePatchEmbed(Pass):
    """Rewrite non-overlapping convolutions as a matrix product on flattened patches.

    Before::

        %0 f32[patches,3,2,14,14] = view(hidden_states, [-1, 3, 2, 14, 14])
        %1 f32[patches,1280,1,1,1] = conv3d(%0, patch_embed.proj.weight, None, [2, 14, 14])
        %2 f32[patches,1280] = view(%1, [-1, 1280])

    After::

        %0 f32[patches,1280] = linear(hidden_states, patch_embed.proj.weight)

    with the weight ``[1280, 1176]`` instead of ``[1280, 3, 2, 14, 14]``; :class:`~layergraph.WeightMap` leads back, so
    checkpoints stay as they were. Activations of three to five dimensions are cut into patches by one reshape and
    one permute, and a following ``flatten(2).transpose(1, 2)`` or channels-last permute folds away. A size that the
    kernel does not divide loses its remainder, as in the convolution.

    Matched by structure alone. Left alone, with the reason in the report:

    * R1: stride differs from kernel (patches overlap, or leave gaps);
    * R2: padding is not 0;
    * R3: dilation is not 1;
    * R4: a transposed convolution;
    * R5: the weight is computed in the graph instead of being a parameter;
    * R6: a Conv2d that the option ``conv2d`` decides against;
    * R7: a size that may vary holds a single patch in the example inputs: torch would fix the graph at one.

    Which Conv2d is worth it is decided from data of the graph alone, so that ``find`` stays pure. ``"auto"`` rewrites
    where the input is cut into patches already (no permute is needed then), or where the weight is bfloat16 or
    float16. Measured with one thread of a Xeon with AMX, torch 2.13, ViT-B/16, CLIP-B/32, CLIP-L/14 and SigLIP-SO400M,
    batches of 1 and 8, the convolution takes 1.6 to 2.6 times the time of permute and Linear in bfloat16, and 0.9 to
    1.6 times in float32, where the copy eats what the product gains. Elsewhere: give a table measured there.

    Args:
        conv2d: True rewrites Conv2d too, False leaves it, ``"auto"`` see above. A table (path to JSON, its data, or
            rows, see :mod:`layergraph.passes.conv_table`) rewrites where the measured shape nearest in dtype, patch
            length and features was faster as Linear.
    """

    pass_name: ClassVar[str] = "fuse-patch-embed"
    promise: ClassVar[Promise] = "exact"

    conv2d: Any = "auto"

    def __post_init__(self) -> None:
        if self.conv2d is True or self.conv2d is False or self.conv2d == "auto":
            return
        is_path = isinstance(self.conv2d, Path) or (isinstance(self.conv2d, str) and self.conv2d.endswith(".json"))
        if not (is_path or isinstance(self.conv2d, (Mapping, tuple, list))):
            raise InputError(
                f"conv2d={self.conv2d!r} is not an option",
                pass_name=self.pass_name,
                expected='True, False, "auto", or a table: a path to JSON, its data, or rows',
                do="use one of these",
            )
        object.__setattr__(self, "conv2d", read_table(self.conv2d))

    def find(self, program: Program, graph: str) -> Findings:
        unit = program[graph]
        sites, refusals, notes = [], [], []
        for node in unit.graph.nodes:
            if node.op != "call_function" or (node.target not in CONVOLUTIONS and node.target not in TRANSPOSED):
                continue
            path = module_path(node)
            refusal = _refuse(unit, node, path)
            if refusal is None:
                refusal, why = self._decide(node, path)
            if refusal is not None:
                refusals.append(refusal)
                continue
            conv = Conv.read(node)
            weight = list(conv.weight_shape)
            if len(conv.weight.users) > 1:
                notes.append(f"{path}: its weight is used elsewhere too, so it keeps its shape and is viewed in place")
            detail = f"conv{conv.n_dims}d {weight} -> linear [{weight[0]}, {conv.n_inputs}]"
            detail += f" in {conv.groups} groups" if conv.groups > 1 else ""
            sites.append(Site(path, (node.name,), detail + (f" ({why})" if why else "")))
        return Findings(tuple(sites), tuple(refusals), tuple(notes))

    def _decide(self, node: torch.fx.Node, path: str) -> tuple[Refusal | None, str]:
        """For Conv2d: the refusal, or why it is rewritten."""
        conv = Conv.read(node)
        if conv.n_dims != 2 or self.conv2d is True:
            return None, ""
        weight = conv.weight.meta["val"]
        dtype = str(weight.dtype).removeprefix("torch.")
        if self.conv2d is False:
            return Refusal(path, "R6", "conv2d=True", "conv2d=False"), ""
        if self.conv2d == "auto":
            if conv.covers_input:
                return None, "its input is cut into patches already"
            if weight.dtype in (torch.bfloat16, torch.float16):
                return None, f"{dtype} is faster as Linear"
            rule = "input cut into patches already, or a 16-bit weight"
            return Refusal(path, "R6", rule, f"conv2d='auto', {dtype} on {weight.device.type}"), ""
        row = nearest(self.conv2d, dtype, conv.n_inputs, conv.n_outputs)
        if row is None:
            return Refusal(path, "R6", "a dtype that the table has", dtype), ""
        measured = f"measured {row[3]:.2f} times the time of Linear at {row[1]} to {row[2]}"
        if row[3] <= 1:
            return Refusal(path, "R6", "a shape that the table says is faster as Linear", measured), ""
        return None, measured

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.node(site.nodes[0])
        conv = Conv.read(node)
        weight = _matrix(conv, edit)
        if conv.covers_input:
            _rewrite_flat(conv, weight, edit)
        else:
            _rewrite_patches(conv, weight, edit)


def _refuse(unit: GraphUnit, node: torch.fx.Node, path: str) -> Refusal | None:
    given = arguments(node)
    if node.target in TRANSPOSED or given.get("transposed"):
        return Refusal(path, "R4", "a convolution", "a transposed one")
    weight = given["weight"]
    if not isinstance(weight, torch.fx.Node) or weight.name not in unit.targets:
        return Refusal(path, "R5", "a parameter as weight", f"computed by %{getattr(weight, 'name', weight)}")
    conv = Conv.read(node)
    if conv.stride != conv.kernel:
        return Refusal(path, "R1", f"stride == kernel {conv.kernel}", f"stride {conv.stride}")
    if any(conv.padding):
        return Refusal(path, "R2", "padding 0", f"padding {conv.padding}")
    if any(size != 1 for size in conv.dilation):
        return Refusal(path, "R3", "dilation 1", f"dilation {conv.dilation}")
    sizes = conv.input.meta["val"].shape[-conv.n_dims :]
    for size, kernel in zip(sizes, conv.kernel, strict=True):
        if isinstance(size, torch.SymInt) and kernel > 1 and hint(size) // kernel == 1:
            expected = "example inputs with two patches or more along each size that may vary"
            return Refusal(path, "R7", expected, f"size {hint(size)} for a kernel of {kernel}")
    return None


def _matrix(conv: Conv, edit: Edit) -> torch.fx.Node:
    """The weight as a matrix [D, K], or [groups, D / groups, K]."""
    weight = conv.weight
    original = [int(size) for size in weight.meta["val"].shape]
    shape = [conv.n_outputs, conv.n_inputs]
    if conv.groups > 1:
        shape = [conv.groups, conv.n_outputs // conv.groups, conv.n_inputs]
    if len(weight.users) > 1:
        # Something else reads it as it is: a view costs nothing and needs no second copy.
        return edit.call(ATEN.view.default, weight, shape, before=conv.node)
    target = edit.target_of(weight)
    shapes = {"original_shape": original, "rewritten_shape": shape}
    edit.replace_state(weight, remap=Remap("reshape", (target,), (target,), shapes))
    return weight


def _linear(conv: Conv, patches: torch.fx.Node, weight: torch.fx.Node, edit: Edit) -> torch.fx.Node:
    """[..., K] -> [..., D]; grouped: [..., groups * K] -> [..., D] as a batched product."""
    if conv.groups == 1:
        return edit.call(ATEN.linear.default, patches, weight, conv.bias, before=conv.node)
    at = conv.node
    lead = _sizes(patches, edit, at)[:-1]
    # Groups first and one row dimension: a product that broadcasts would have to know which counts are 1.
    rows = edit.call(ATEN.reshape.default, patches, [-1, conv.groups, conv.n_inputs], before=at)
    by_group = edit.call(ATEN.transpose.int, rows, 0, 1, before=at)
    product = edit.call(ATEN.bmm.default, by_group, edit.call(ATEN.transpose.int, weight, 1, 2, before=at), before=at)
    together = edit.call(ATEN.transpose.int, product, 0, 1, before=at)
    joined = edit.call(ATEN.reshape.default, together, [*lead, conv.n_outputs], before=at)
    return edit.call(ATEN.add.Tensor, joined, conv.bias, before=at) if conv.bias is not None else joined


def _rewrite_flat(conv: Conv, weight: torch.fx.Node, edit: Edit) -> None:
    """One patch a sample: [N, C, *kernel] is [N, C * K] already; the views around fold away."""
    node = conv.node
    n_features = conv.n_inputs * conv.groups
    source, casts = conv.input, []
    while source.target in _CASTS and len(source.users) == 1:
        casts.append(source)
        source = source.args[0]
    flat = source
    if source.target in _RESHAPES and _is_matrix(source.args[0], n_features):
        flat = source.args[0]
    elif not _is_matrix(source, n_features):
        count = _sizes(source, edit, node)[0]  # not -1: torch would have to divide, and may fix a size to do so
        flat = edit.call(ATEN.reshape.default, source, [count, n_features], before=node)
    for cast in reversed(casts):
        flat = edit.call(cast.target, flat, *cast.args[1:], before=node, like=cast, **cast.kwargs)
    product = _linear(conv, flat, weight, edit)
    for user in list(node.users):
        if user.target in _RESHAPES and _is_matrix(user, conv.n_outputs):
            edit.replace(user, product)
            edit.erase(user)
    if node.users or edit.is_output(node):
        shape = [-1, conv.n_outputs, *([1] * conv.n_dims)]
        edit.replace(node, edit.call(ATEN.reshape.default, product, shape, before=node))
    edit.erase(node)
    edit.refresh_users(product)


def _is_matrix(node: Any, n_columns: int) -> bool:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 2 and str(value.shape[1]) == str(n_columns)


def _rewrite_patches(conv: Conv, weight: torch.fx.Node, edit: Edit) -> None:
    """Cut the activation into patches: [N, C, T, H, W] -> [N, T', H', W', C * K] -> linear -> [N, T', H', W', D]."""
    node = conv.node
    at, x, n = node, conv.input, conv.n_dims
    if not conv.is_batched:
        x = edit.call(ATEN.unsqueeze.default, x, 0, before=at)
    batch, channels, *sizes = _sizes(x, edit, at)
    counts = []
    for dim, (size, kernel) in enumerate(zip(sizes, conv.kernel, strict=True)):
        count = _divide(size, kernel, edit, at)
        if not (isinstance(size, int) and size % kernel == 0) and kernel > 1:
            end = count * kernel if isinstance(count, int) else edit.call(operator.mul, count, kernel, before=at)
            x = edit.call(ATEN.slice.Tensor, x, dim + 2, 0, end, before=at)
        counts.append(count)
    pairs = [item for pair in zip(counts, conv.kernel, strict=True) for item in pair]
    split = edit.call(ATEN.reshape.default, x, [batch, channels, *pairs], before=at)
    order = [0, *range(2, 2 * n + 2, 2), 1, *range(3, 2 * n + 2, 2)]
    moved = edit.call(ATEN.permute.default, split, order, before=at)
    patches = edit.call(ATEN.reshape.default, moved, [batch, *counts, conv.n_inputs * conv.groups], before=at)
    product = _linear(conv, patches, weight, edit)
    _fold_users(conv, product, [batch, *counts], edit)
    if node.users or edit.is_output(node):
        last = edit.call(ATEN.permute.default, product, [0, n + 1, *range(1, n + 1)], before=at)
        # Whoever reads it may rely on the convolution's memory layout.
        result = edit.call(ATEN.contiguous.default, last, before=at)
        if not conv.is_batched:
            result = edit.call(ATEN.squeeze.dim, result, 0, before=at)
        edit.replace(node, result)
    edit.erase(node)
    edit.refresh_users(product)


def _fold_users(conv: Conv, product: torch.fx.Node, lead: list[Any], edit: Edit) -> None:
    """Users that only move channels last get the product itself, or one reshape of it."""
    node, n = conv.node, conv.n_dims
    if not conv.is_batched:
        return  # one dimension less: flatten(2) and transpose(1, 2) mean others
    tokens: torch.fx.Node | None = None
    for user in list(node.users):
        if user.target is ATEN.permute.default and [d % (n + 2) for d in user.args[1]] == [0, *range(2, n + 2), 1]:
            edit.replace(user, product)
            edit.erase(user)
        elif _flattens_grid(user, node, n) and all(_moves_last(step) for step in user.users):
            for step in list(user.users):
                if tokens is None:
                    count = lead[1]
                    for size in lead[2:]:  # not -1, which an empty batch leaves open
                        both = isinstance(count, int) and isinstance(size, int)
                        count = count * size if both else edit.call(operator.mul, count, size, before=node)
                    shape = [lead[0], count, conv.n_outputs]
                    tokens = product if n == 1 else edit.call(ATEN.reshape.default, product, shape, before=node)
                edit.replace(step, tokens)
                edit.erase(step)
            edit.erase(user)
        elif n == 1 and _moves_last(user):
            edit.replace(user, product)
            edit.erase(user)


def _flattens_grid(user: torch.fx.Node, node: torch.fx.Node, n_dims: int) -> bool:
    """``flatten(2)``, or a view to [N, D, everything else]."""
    if user.target is ATEN.flatten.using_ints:
        start, end = (*user.args[1:], *((0, -1)[len(user.args) - 1 :]))[:2]
        return start == 2 and end in (-1, n_dims + 1)
    if user.target in _RESHAPES:
        before, after = node.meta["val"], user.meta["val"]
        return after.dim() == 3 and str(after.shape[:2]) == str(before.shape[:2])
    return False


def _moves_last(node: torch.fx.Node) -> bool:
    """``transpose(1, 2)`` of three dimensions, however written."""
    if node.target is ATEN.transpose.int:
        return {dim % 3 for dim in node.args[1:3]} == {1, 2} and node.meta["val"].dim() == 3
    return node.target is ATEN.permute.default and [dim % 3 for dim in node.args[1]] == [0, 2, 1]


def _sizes(node: torch.fx.Node, edit: Edit, at: torch.fx.Node) -> list[Any]:
    """Sizes of what a node computes: ints where fixed, else nodes that compute them."""
    return [
        size if isinstance(size, int) else edit.call(ATEN.sym_size.int, node, dim, before=at)
        for dim, size in enumerate(node.meta["val"].shape)
    ]


def _divide(size: Any, kernel: int, edit: Edit, at: torch.fx.Node) -> Any:
    if isinstance(size, int):
        return size // kernel
    return size if kernel == 1 else edit.call(operator.floordiv, size, kernel, before=at)


__all__ = ["FusePatchEmbed"]
