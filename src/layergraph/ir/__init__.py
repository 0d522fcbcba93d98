"""The graph and nothing else: programs, edits, layers, weight maps, text."""

from layergraph.ir.edit import Edit
from layergraph.ir.interface import GraphInput, Interface
from layergraph.ir.layers import LayerIndex, ModuleCall
from layergraph.ir.program import Capture, GraphUnit, ModelInfo, PassRecord, Program, Provenance
from layergraph.ir.template import Output
from layergraph.ir.weights import Remap, RemapKind, WeightMap, register_remap

__all__ = [
    "Capture",
    "Edit",
    "GraphInput",
    "GraphUnit",
    "Interface",
    "LayerIndex",
    "ModelInfo",
    "ModuleCall",
    "Output",
    "PassRecord",
    "Program",
    "Provenance",
    "Remap",
    "RemapKind",
    "WeightMap",
    "register_remap",
]
