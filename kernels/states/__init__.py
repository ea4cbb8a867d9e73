"""States.

Owns: kernels of layers that keep a recurrent state in pages: convolution, gated delta rule, Mamba-2, gated norm.
May import: `common`, `reference`.
Never: decides which pages hold a state, or when it is kept.
"""

PUBLIC = ("conv", "delta_rule", "gated_norm", "mamba2", "state_pages")  # The modules that other folders may import.
