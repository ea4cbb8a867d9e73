"""`kernels_digest`: identifies the kernels that a plan was measured with.

A plan's tiles and timings, and those of the serial plan it was compared with, are valid only for the code that was
measured. `tests/engine/test_kernel_sources.py` compiles such plans and checks that no kernel is missing here.
"""

from __future__ import annotations

from weft.engine.model.spec import ModelSpec
from weft.kernels.common.source_digest import source_digest

DENSE = (
    "attention/decode_attention", "attention/decode_hopper", "attention/decode_workspace", "attention/output",
    "attention/prefill_attention", "attention/prefill_hopper", "attention/scores", "attention/triton_backend",
    "attention/work_lists", "common/block_sizes", "common/dependent_launch", "common/hopper", "formats/fp8_gluon",
    "formats/fp8_triton", "matmul/adapter_depth", "matmul/embedding", "matmul/fp8_rows", "matmul/gemm",
    "matmul/gemm_activations", "matmul/gemm_config", "matmul/gemm_h200.json", "matmul/gemm_hopper",
    "matmul/gemm_launch", "matmul/gemm_tiles", "matmul/gemm_triton", "matmul/heads", "matmul/mid_config",
    "matmul/mid_epilogues", "matmul/mid_h200.json", "matmul/mid_hopper", "matmul/mid_projections", "matmul/mid_rule",
    "matmul/mid_table", "matmul/projections", "matmul/rows", "sampling/resident", "sampling/sampler",
)  # fmt: skip
"""Every plan depends on these."""
FP8 = (
    "attention/fp8_attention", "attention/fp8_decode", "attention/fp8_decode_warps", "attention/fp8_unpack",
    "formats/fp8", "matmul/fp8_config", "matmul/fp8_few_config", "matmul/fp8_few_hopper", "matmul/fp8_hopper",
    "matmul/fp8_projections", "matmul/fp8_triton",
)  # fmt: skip
"""Plans with FP8 weights or FP8 KV also depend on these."""
EXPERTS = (
    "experts/experts", "experts/experts_config", "experts/experts_hopper", "experts/experts_triton", "experts/router",
)  # fmt: skip
"""Plans of mixture-of-experts models also depend on these."""
FP8_EXPERTS = ("experts/fp8_experts", "experts/fp8_experts_hopper", "experts/fp8_experts_triton")
RANKS = ("collectives/peer", "collectives/push_gemm", "collectives/push_gemm_hopper")
"""Plans for several ranks also depend on these."""


def sources(spec: ModelSpec, *, fp8: bool) -> tuple[str, ...]:
    """Return the modules of `kernels` that a plan for this model depends on. fp8: weights or KV pages are FP8."""
    experts = spec.experts is not None
    return (
        *DENSE,
        *(FP8 if fp8 else ()),
        *(EXPERTS if experts else ()),
        *(FP8_EXPERTS if experts and fp8 else ()),
        *(RANKS if spec.shard_of.ranks > 1 else ()),
    )


def kernels_digest(spec: ModelSpec, *, fp8: bool) -> str:
    """Return the digest of `sources`, as plan files record it."""
    return source_digest(*sources(spec, fp8=fp8))
