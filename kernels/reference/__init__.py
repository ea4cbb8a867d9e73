"""Reference.

Owns: the plain torch implementation of every operation; it serves on the CPU and is what kernels are tested against.
May import: `common`, `formats`.
Never: uses Triton.
"""

PUBLIC = ("adapters", "experts", "latent", "layer", "sampling", "sampling_shards", "states")
"""The modules that other folders may import."""
