"""Native.

Owns: C++ for the CPU, compiled at first use: products of packed weights, decode attention, whole layers.
May import: torch.
Never: needs a compiler; knows a checkpoint's format.
"""

PUBLIC = ("layers", "library", "products", "tiles")  # The modules that other folders may import.
