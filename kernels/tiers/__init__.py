"""Tiers.

Owns: kernels that move KV pages to lower tiers: packing and unpacking.
May import: `common`, `formats`.
Never: decides which page moves.
"""

PUBLIC = ("pack_pages",)  # The modules that other folders may import.
