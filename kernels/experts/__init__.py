"""Experts.

Owns: mixture-of-experts layers: the router, grouped GEMMs, token permutation.
May import: `common`, `formats`, `reference`, `matmul`.
Never: decides which expert lives on which rank.
"""

PUBLIC = ("experts", "experts_config", "fp8_experts", "router")  # The modules that other folders may import.
