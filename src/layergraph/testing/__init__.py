"""For authors of passes: one call that checks everything a pass owes, and tiny models to check it on."""

from layergraph.testing.check import Checked, check_pass

__all__ = ["Checked", "check_pass"]
