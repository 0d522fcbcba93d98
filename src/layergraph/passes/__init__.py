"""Rewrites of graphs, one file a pass."""

from layergraph.passes.base import Findings, Pass, Refusal, Site
from layergraph.passes.fuse_patch_embed import FusePatchEmbed
from layergraph.passes.registry import find_pass, make_pass, pass_names, register_pass
from layergraph.passes.tap_outputs import TapOutputs
from layergraph.passes.weave_shadow import WeaveShadow

__all__ = [
    "Findings",
    "FusePatchEmbed",
    "Pass",
    "Refusal",
    "Site",
    "TapOutputs",
    "WeaveShadow",
    "find_pass",
    "make_pass",
    "pass_names",
    "register_pass",
]
