"""GEMMs `a[M, K] @ weight[N, K].T`: the only dispatch between the plain Triton and the Hopper kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from weft.kernels.common.gpu import is_hopper
from weft.kernels.matmul import gemm_triton
from weft.kernels.matmul.adapter_depth import More
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.matmul.gemm_launch import Launch, Workspace, check_operands, launch_of


def _for_more(kind: str, launch: Launch, a: Tensor, out: Tensor, fields: dict[str, Any]) -> Launch:
    """Return a launch with the same bits that is faster with further depth: loops of plain Triton are not pipelined
    across tiles then. Not for "residual", whose sums of squares would have another order."""
    tiles = launch.config[:3] == SPECIAL[:3] and not launch.config.swap and launch.split == 1
    able = kind == "gate_up" or (kind == "linear" and out.dtype == a.dtype and "SOFTCAP" not in fields)
    if tiles and able and is_hopper():
        return launch._replace(config=launch.config._replace(special=True))
    return launch


def run_gemm(
    kind: str, launch: Launch, a: Tensor, weight: Tensor, out: Tensor, num_tokens: Tensor | None,
    space: Workspace | None, x: Tensor | None = None, more: More | None = None, **fields: Any,
) -> None:  # fmt: skip
    """Run a GEMM with epilogue `kind` on the kernel that `launch.config` names; see each `product_kernel`.

    more: its further depth for LoRA adapters."""
    if more is not None:
        launch = _for_more(kind, launch, a, out, fields)
    if launch.config.special:
        from weft.kernels.matmul import gemm_hopper

        gemm_hopper.launch_gemm(kind, launch, a, weight, out, num_tokens, x, more, **fields)
    else:
        gemm_triton.launch_gemm(kind, launch, a, weight, out, num_tokens, space, x, more, **fields)


def matmul(
    a: Tensor, weight: Tensor, out: Tensor, *, num_sms: int, space: Workspace | None = None,
    num_tokens: Tensor | None = None, config: GemmConfig | None = None, bias: Tensor | None = None,
    factor: float = 1.0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute `out[M, N] = a[M, K] @ weight[N, K].T`; out is bf16, fp16 or float32.

    num_tokens: optional int32 scalar in device memory; rows past it do not change (up to a tile). bias `[N]` is added,
    then the result is multiplied by `factor` and soft-capped if `softcap` is not 0."""
    check_operands(a, weight)
    m, n, k = a.shape[0], weight.shape[0], a.shape[1]
    launch = launch_of(m, n, k, config, num_sms)
    bent = factor != 1.0 or softcap > 0.0
    # The warp-specialized kernel's output has its input dtype, without factor or soft cap.
    if launch.config.special and (out.dtype != a.dtype or bent):
        launch = launch_of(m, n, k, GemmConfig(128, 256, 64, 3, 8), num_sms)
    if bias is None and not bent:
        run_gemm("plain", launch, a, weight, out, num_tokens, space)
    else:
        options: dict[str, Any] = {"factor": factor, "SOFTCAP": softcap} if bent else {}
        run_gemm("linear", launch, a, weight, out, num_tokens, space, bias=bias, PARTS=0, **options)
    return out
