"""Model -> Program."""

from layergraph.trace.export import trace

__all__ = ["trace"]
