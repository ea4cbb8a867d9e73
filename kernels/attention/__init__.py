"""Attention.

Owns: paged attention: backends, prefill, decode and fused (POD) kernels, their work lists and break-even tables.
May import: `common`, `native`, `formats`, `reference`.
Never: multiplies by a weight.
"""

PUBLIC = (
    "backend", "backends", "break_evens", "decode_attention", "decode_workspace", "fp8_unpack", "native_backend",
    "output", "prefill_attention", "torch_backend", "triton_backend", "work_lists",
)  # fmt: skip
"""The modules that other folders may import."""
