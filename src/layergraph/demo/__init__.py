"""The demo: every step on a small trained language model and a vision tower of real width. No network."""

from layergraph.demo.run import Demo, run_demo

__all__ = ["Demo", "run_demo"]
