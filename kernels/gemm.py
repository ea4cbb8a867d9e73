"""Matrix products `a[M, K] @ weight[N, K].T`: the one dispatch between the plain Triton and the Hopper kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.kernels import gemm_triton
from weft.kernels.gemm_config import GemmConfig
from weft.kernels.gemm_launch import Launch, Workspace, check_operands, launch_of


def product(
    kind: str, launch: Launch, a: Tensor, weight: Tensor, out: Tensor, num_tokens: Tensor | None,
    space: Workspace | None, x: Tensor | None = None, **fields: Any,
) -> None:  # fmt: skip
    """A product with the epilogue `kind` on the kernel that `launch.config` names; see `product_kernel` of each."""
    if launch.config.special:
        from weft.kernels import gemm_hopper

        gemm_hopper.launch_product(kind, launch, a, weight, out, num_tokens, x, **fields)
    else:
        gemm_triton.launch_product(kind, launch, a, weight, out, num_tokens, space, x, **fields)


def matmul(
    a: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    num_sms: int,
    space: Workspace | None = None,
    num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """`out[M, N] = a[M, K] @ weight[N, K].T`; out bf16, fp16 or float32.

    num_tokens: optional int32 scalar in device memory; rows past it are left as they are (up to a tile).
    """
    check_operands(a, weight)
    m, n, k = a.shape[0], weight.shape[0], a.shape[1]
    launch = launch_of(m, n, k, config, num_sms)
    if launch.config.special and out.dtype != a.dtype:  # the warp-specialised kernel writes what it reads
        launch = launch_of(m, n, k, GemmConfig(128, 256, 64, 3, 8), num_sms)
    product("plain", launch, a, weight, out, num_tokens, space)
    return out
