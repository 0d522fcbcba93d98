"""ExportedProgram graphs as JSON: torch's own schema, without its pickled parts. Checked with torch 2.11 to 2.14."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch._export.serde import serialize as serde
from torch.export import ExportedProgram

from layergraph.errors import FormatError
from layergraph.ir import exported as torch_side
from layergraph.ir.graph_check import check_graph


@torch_side.one_at_a_time
def dump_graph(exported: ExportedProgram) -> bytes:
    """Graph, signature, sizes and call specs as JSON. Weights, constants and example inputs are left out."""
    # Before torch 2.13 serialize cannot leave them out and pickles all there is. Its verifier asks for names and kinds.
    empty = torch.empty(0)
    state = {
        name: torch.nn.Parameter(empty, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else empty
        for name, tensor in exported.state_dict.items()
    }
    bare = torch_side.with_state(exported, state, constants=dict.fromkeys(exported.constants, empty), examples={})
    return bytes(serde.serialize(bare).exported_program)


def load_graph(
    data: bytes,
    state: dict[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
    examples: Mapping[str, torch.Tensor] | None,
    name: str,
) -> ExportedProgram:
    """An ExportedProgram from :func:`dump_graph`'s JSON over the given tensors. Nothing is unpickled, no code is run.

    The graph is on the CPU, as the tensors are, wherever it was saved: this machine may not have that device.

    Raises:
        FormatError: not such JSON, holding code, or written by a torch whose schema this one does not read.
    """
    data = _on_cpu(check_graph(data, name), data)
    artifact = serde.SerializedArtifact(
        exported_program=data,
        state_dict=state,
        constants=dict(constants),
        example_inputs=((), dict(examples)) if examples else b"",
    )
    try:
        with torch_side.graph_lock:  # torch keeps the reader at work in a global, and refuses a second one
            exported = serde.deserialize(artifact)
    except Exception as error:
        raise FormatError(
            f"the graph {name!r} cannot be read",
            found=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300],
            expected=f"a graph that torch {torch.__version__} reads (saved by {_torch_version(data)})",
            do="use the torch it was saved with, or make the program again from the model",
        ) from error
    return exported


_ELSEWHERE = re.compile(rb'"type":\s*"(?!cpu")')


def _on_cpu(graph: Any, data: bytes) -> bytes:
    """The JSON with every device the CPU; ``graph`` is the same, parsed."""
    if not _ELSEWHERE.search(data):
        return data
    stack = [graph]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            for key in ("device", "as_device"):
                if isinstance(item.get(key), dict) and "type" in item[key]:
                    item[key] = {"type": "cpu", "index": None}
            stack.extend(item.values())
    return json.dumps(graph).encode()


def _torch_version(data: bytes) -> Any:
    try:
        return f"torch {json.loads(data)['torch_version']}"
    except (ValueError, KeyError, TypeError):
        return "an unknown version"


__all__ = ["dump_graph", "load_graph"]
