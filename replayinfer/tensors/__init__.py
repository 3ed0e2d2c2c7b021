"""Steps on states that the caller owns: tensors in, tensors out, no pool and no plan.

For engines that keep states and rows in tensors of their own. `mamba2_walk` and `delta_walk` move
states token by token, as kernels without replay do; `mamba2_ring` replays rows that the caller
keeps in rings. Each says which slots it reads and writes, writes nothing for a pad, and checks all
but the values of index tensors, which stay on the device: an index outside the states counts as a
pad.
"""

from .delta import delta_walk
from .mamba2 import mamba2_ring, mamba2_walk

__all__ = ["delta_walk", "mamba2_ring", "mamba2_walk"]
