"""`gemm.matmul` against float64, with poisoned outputs and token counts that are no multiple of a tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from weft.kernels.matmul import gemm, gemm_launch
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig

SPLIT = GemmConfig(16, 64, 64, 3, 4, 8, 3, True, 2, 1)
CONFIGS = {
    "tiny": GemmConfig(16, 64, 128, 4, 4, 8, 4, True, 2, 1),
    "swap64": GemmConfig(64, 128, 64, 3, 8, 8, 2, True, 1, 1),
    "square": GemmConfig(128, 128, 64, 4, 8, 8, 1, False, 1, 1),
    "wide": GemmConfig(128, 256, 64, 3, 8, 8, 1, False, 1, 2),
    "special": SPECIAL,
    "wide4": GemmConfig(128, 256, 64, 4, 8, 8, 1, False, 1, 4),
}


def error(got: Tensor, want: Tensor) -> float:
    """Relative error by norm; NaN never passes a comparison."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k, device=device).to(dtype), (torch.randn(n, k, device=device) / k**0.5).to(dtype)


@pytest.mark.parametrize("out_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 192, 256), (16, 200, 320)])
def test_matmul_of_few_tokens_with_a_split_depth(
    m: int, n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype | None, device: str, num_sms: int
) -> None:
    a, w = operands(m, n, k, dtype, device)
    out = torch.full((m, n), float("nan"), dtype=out_dtype or dtype, device=device)
    space = gemm_launch.workspace(device)
    for _ in range(2):  # the second run finds the counters as the first left them
        gemm.matmul(a, w, out, num_sms=num_sms, space=space, config=SPLIT)
        assert error(out, a.double() @ w.double().t()) < 4e-3
    assert int(space.arrived.abs().sum()) == 0


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("m", [1, 17, 64, 128, 200, 777])
@pytest.mark.usefixtures("large")
def test_matmul_for_every_way_to_split_it(
    m: int, config: GemmConfig, out_dtype: torch.dtype, device: str, num_sms: int
) -> None:
    a, w = operands(m, 1544, 2048, torch.bfloat16, device)
    out = torch.full((m, 1544), float("nan"), dtype=out_dtype, device=device)
    space = gemm_launch.workspace(device)
    gemm.matmul(a, w, out, num_sms=num_sms, space=space, config=config)
    assert error(out, a.double() @ w.double().t()) < 4e-3


@pytest.mark.parametrize("m", [1, 2, 8, 16, 33, 64, 100, 128, 256, 300, 512, 1024, 2048])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1000, 4096)])
@pytest.mark.usefixtures("large")
def test_matmul_with_its_own_choice_and_twice_the_same(m: int, n: int, k: int, device: str, num_sms: int) -> None:
    a, w = operands(m, n, k, torch.bfloat16, device)
    first = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
    second = torch.empty_like(first)
    space = gemm_launch.workspace(device)
    gemm.matmul(a, w, first, num_sms=num_sms, space=space)
    gemm.matmul(a, w, second, num_sms=num_sms - 12, space=space)
    assert error(first, a.float() @ w.float().t()) < 4e-3
    gemm.matmul(a, w, second, num_sms=num_sms, space=space)
    assert torch.equal(first, second)


@pytest.mark.usefixtures("large")
def test_tiles_after_the_count_in_device_memory_are_skipped(device: str, num_sms: int) -> None:
    a, w = operands(1024, 512, 512, torch.bfloat16, device)
    out = torch.full((1024, 512), float("nan"), dtype=torch.bfloat16, device=device)
    count = torch.tensor([130], dtype=torch.int32, device=device)
    gemm.matmul(a, w, out, num_sms=num_sms, num_tokens=count, config=CONFIGS["square"])
    assert error(out[:130], a[:130].double() @ w.double().t()) < 4e-3
    assert bool(out[256:].isnan().all())


def test_a_split_gemm_without_workspace_is_refused(device: str, num_sms: int) -> None:
    a, w = operands(8, 192, 256, torch.bfloat16, device)
    with pytest.raises(ValueError, match="workspace"):
        gemm.matmul(a, w, torch.empty(8, 192, dtype=a.dtype, device=device), num_sms=num_sms, config=SPLIT)
