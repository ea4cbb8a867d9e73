"""Matmul.

Owns: GEMMs of a dense layer with their fused epilogues, the row kernels around them, tile tables.
May import: `common`, `formats`, `reference`.
Never: routes tokens to experts or talks to other ranks.
"""

PUBLIC = (
    "adapter_depth", "adapter_work", "embedding", "fp8_config", "fp8_few_config", "fp8_hopper", "fp8_projections",
    "fp8_rows", "fp8_triton", "gemm", "gemm_config", "gemm_hopper", "gemm_launch", "gemm_tiles", "heads", "image_rows",
    "mid_config", "mid_projections", "projections", "rows", "tuned", "weight_layout",
)  # fmt: skip
"""The modules that other folders may import."""
