"""The shadow ops: a reference in plain torch defines each, Triton kernels run them on a GPU.

``ops`` registers ``layergraph::shadow_inject``, ``layergraph::shadow_update`` and ``layergraph::shadow_update_inject``;
``DECOMPOSITIONS`` turns them back into aten; ``join`` fuses an update with the next inject; ``tuning`` holds the block
sizes. Importing this package needs no Triton.
"""

from layergraph.kernels import ops
from layergraph.kernels.ops import DECOMPOSITIONS

__all__ = ["DECOMPOSITIONS", "ops"]
