"""Common.

Owns: what every kernel folder uses: the GPU description, dependent launch, Hopper helpers, compilation, source digests.
May import: torch, triton.
Never: defines a kernel.
"""

PUBLIC = ("block_sizes", "compilation", "dependent_launch", "gpu", "hopper", "source_digest", "warm_start")
"""The modules that other folders may import."""
