"""Native.

Owns: C++ for the CPU, compiled at first use: products of packed weights; with torch code that gives the same bits.
May import: torch.
Never: needs a compiler; knows a checkpoint's format.
"""

PUBLIC = ("library", "products", "tiles")  # The modules that other folders may import.
