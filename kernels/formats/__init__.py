"""Formats.

Owns: number formats: FP8 values and scales, FP8 matrices, packed KV pages; with the device code that converts them.
May import: `common`.
Never: multiplies matrices or reads pages of KV by a page table.
"""

PUBLIC = ("fp8", "fp8_gluon", "fp8_matrix", "fp8_triton", "packed_page")  # The modules that other folders may import.
