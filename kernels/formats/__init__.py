"""Formats.

Owns: number formats: FP8 values and scales, FP8 matrices, matrices in 4 and 8 bits, packed KV pages; with the device
code that converts them.
May import: `common`, `native`.
Never: multiplies matrices or reads pages of KV by a page table.
"""

PUBLIC = (
    "fp8", "fp8_gluon", "fp8_matrix", "fp8_triton", "matrix", "packed_form", "packed_matrix", "packed_page",
    "packed_rows",
)  # fmt: skip
"""The modules that other folders may import."""
