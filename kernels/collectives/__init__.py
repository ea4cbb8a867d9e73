"""Collectives.

Owns: communication between GPUs that map each other's memory, and GEMMs that push partial sums to other ranks.
May import: `common`, `matmul`.
Never: starts processes or opens another GPU's memory.
"""

PUBLIC = ("peer", "push_gemm")  # The modules that other folders may import.
