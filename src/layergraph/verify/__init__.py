"""Judges of passes: structure after every pass, numbers on request."""

from layergraph.verify.numerics import check_promise, relative_error
from layergraph.verify.structure import check_sizes, check_structure

__all__ = ["check_promise", "check_sizes", "check_structure", "relative_error"]
