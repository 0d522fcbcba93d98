"""Compiler-style graph rewriting for Hugging Face and peft models, on ``torch.export``."""

from layergraph.api import load, optimize, trace
from layergraph.errors import LayerGraphError
from layergraph.ir.edit import Edit
from layergraph.ir.weights import Remap, WeightMap, register_remap
from layergraph.passes import Findings, FusePatchEmbed, Pass, Refusal, Site, TapOutputs, register_pass
from layergraph.program import Program

__version__ = "0.1.0"

__all__ = [
    "Edit",
    "Findings",
    "FusePatchEmbed",
    "LayerGraphError",
    "Pass",
    "Program",
    "Refusal",
    "Remap",
    "Site",
    "TapOutputs",
    "WeightMap",
    "__version__",
    "load",
    "optimize",
    "register_pass",
    "register_remap",
    "trace",
]
