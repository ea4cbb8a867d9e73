"""Sampling.

Owns: kernels after the last layer and state kept on the device: sampling, last tokens, page tables.
May import: `common`, `reference`.
Never: copies logits to the host.
"""

PUBLIC = ("resident", "sampler", "verified")  # The modules that other folders may import.
