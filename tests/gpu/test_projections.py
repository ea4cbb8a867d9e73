"""The fused projections of a layer against their references in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from weft.kernels.matmul import embedding, gemm_launch, projections
from weft.kernels.matmul import weight_layout as pack
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.reference import layer as reference

TINY = GemmConfig(16, 64, 64, 3, 4, 8, 2, True, 2, 1)
WHOLE = GemmConfig(16, 128, 64, 3, 4, 8, 1, True, 1, 1)
NARROW = GemmConfig(16, 64, 256, 5, 4, split=2, swap=True, per_sm=2)
"""as in tables for few tokens: widened to a head, with all of its steps, it would not fit an SM"""
SQUARE = GemmConfig(128, 128, 64, 3, 8, 8, 1, False, 1, 1)
WIDE = GemmConfig(128, 256, 64, 3, 8, 8, 1, False, 1, 2)
EPS = 1e-5


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def splits_of(x: Tensor, parts: int) -> Tensor:
    """Sums of squares of `x`'s rows in `parts` column blocks: `[parts, T]`."""
    return x.float().square().view(x.shape[0], parts, -1).sum(-1).t().contiguous()


def check_qkv(
    tokens: int, heads: int, kv_heads: int, d: int, page: int, hidden: int, dtype: torch.dtype, bias: bool,
    norm: bool | str, config: GemmConfig | None, device: str, num_sms: int, index: torch.dtype = torch.int64,
    normed: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns q and the pages. norm: of each head; "projection": of all. normed: there is a norm before the GEMM."""
    x = torch.randn(tokens, hidden, device=device).to(dtype) * 3
    rows = (heads + 2 * kv_heads) * d
    w = (torch.randn(rows, hidden, device=device) / hidden**0.5).to(dtype)
    b = torch.randn(rows, device=device).to(dtype) if bias else None
    widths = (heads * d, kv_heads * d) if norm == "projection" else (d, d)
    qn, kn = (torch.rand(width, device=device).to(dtype) + 0.5 for width in widths) if norm else (None, None)
    rotary = pack.rotary_table(10000.0 ** (-torch.arange(0, d, 2, device=device).float() / d), 3000)
    positions = torch.randint(0, 3000, (tokens,), device=device, dtype=index)
    pages, layers, layer = tokens // page + 3, 2, 1
    slots = (torch.randperm((pages - 1) * page, device=device)[:tokens] + page).to(index)
    kv = torch.full((pages, layers, 2, page, kv_heads, d), float("nan"), dtype=dtype, device=device)
    want_kv = kv.float()
    sumsq = splits_of(x, 4) if normed else None
    out = torch.full((tokens, heads, d), float("nan"), dtype=dtype, device=device)
    projections.qkv_project(
        x, sumsq, w, b, EPS, rotary, positions, slots, kv, layer, heads, qn, kn, out=out,
        raw=torch.full((tokens, rows), float("nan"), dtype=dtype, device=device), num_sms=num_sms,
        space=gemm_launch.workspace(device), config=config,
    )  # fmt: skip
    want = reference.qkv_project(
        x.float(), None if sumsq is None else sumsq.sum(0), w.float(), None if b is None else b.float(), EPS, rotary,
        positions.long(), slots.long(), want_kv, layer, heads, None if qn is None else qn.float(),
        None if kn is None else kn.float(),
    )  # fmt: skip
    assert error(out, want) < 4e-3
    assert torch.equal(kv.isnan(), want_kv.isnan())
    assert error(kv.nan_to_num(), want_kv.nan_to_num()) < 4e-3
    return out, kv


@pytest.mark.parametrize(("norm", "config"), [(False, TINY), (True, WHOLE), (True, NARROW)])
def test_qkv_of_few_tokens(norm: bool, config: GemmConfig, device: str, num_sms: int) -> None:
    check_qkv(7, 4, 2, 64 if not norm else 128, 16, 128, torch.float16, not norm, norm, config, device, num_sms)


@pytest.mark.parametrize("config", [SQUARE, WIDE, SPECIAL, None])
@pytest.mark.parametrize("tokens", [1, 13, 128, 333])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "page", "bias", "norm", "dtype"),
    [
        (32, 8, 128, 64, False, False, torch.bfloat16),
        (16, 8, 128, 128, False, True, torch.bfloat16),
        (14, 2, 64, 16, True, False, torch.float16),
        (9, 3, 64, 32, False, True, torch.float16),
        (5, 5, 128, 64, True, True, torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("large")
def test_qkv(
    heads: int, kv_heads: int, d: int, page: int, bias: bool, norm: bool, dtype: torch.dtype, tokens: int,
    config: GemmConfig | None, device: str, num_sms: int,
) -> None:  # fmt: skip
    index = torch.int32 if tokens % 2 else torch.int64
    check_qkv(tokens, heads, kv_heads, d, page, 1024, dtype, bias, norm, config, device, num_sms, index)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "bias", "norm", "sms"),
    [
        (32, 8, 128, False, False, 50),  # 72 tiles: 50 whole, 22 in halves
        (32, 8, 128, False, False, 28),  # 16 left, which 28 programs cannot take in halves
        (16, 8, 128, False, True, 45),  # 48 tiles: 3 in halves
        (14, 2, 64, True, False, 12),  # 15 tiles: 3 in halves, and the last half has no features
        (5, 5, 128, True, True, 20),  # 24 tiles: 4 in halves
    ],
)
@pytest.mark.usefixtures("large")
def test_qkv_with_a_last_wave_in_halves(
    heads: int, kv_heads: int, d: int, bias: bool, norm: bool, sms: int, device: str
) -> None:
    """The same bits as in three waves of whole tiles."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel of Hopper")
    whole = -(-(heads + 2 * kv_heads) * d // 256)
    outs = []
    for num_sms in (whole, sms):
        torch.manual_seed(4)
        outs.append(check_qkv(333, heads, kv_heads, d, 64, 1024, torch.bfloat16, bias, norm, SPECIAL, device, num_sms))
    for want, got in zip(*outs, strict=True):
        assert torch.equal(want.nan_to_num(7.0), got.nan_to_num(7.0))


def check_residual(tokens: int, hidden: int, k: int, dtype: torch.dtype, config: GemmConfig | None, device: str,
                   num_sms: int) -> None:  # fmt: skip
    a = torch.randn(tokens, k, device=device).to(dtype)
    w = (torch.randn(hidden, k, device=device) / k**0.5).to(dtype)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    want, _ = reference.residual_project(a.float(), w.float(), x.float())
    scratch = projections.sumsq_buffer(hidden, tokens, device).fill_(float("nan"))
    space = gemm_launch.workspace(device)
    out, sumsq = projections.residual_project(
        a, w, x, out=torch.full_like(x, float("nan")), sumsq=scratch, num_sms=num_sms, space=space, config=config
    )
    assert error(out, want) < 4e-3
    assert error(sumsq.sum(0), out.float().square().sum(-1)) < 1e-5
    same, _ = projections.residual_project(a, w, x, out=x, sumsq=scratch, num_sms=num_sms, space=space, config=config)
    assert torch.equal(same, out)


def test_residual_of_few_tokens(device: str, num_sms: int) -> None:
    check_residual(5, 128, 192, torch.float16, TINY, device, num_sms)


@pytest.mark.parametrize("config", [SQUARE, WIDE, SPECIAL, None])
@pytest.mark.parametrize("tokens", [1, 40, 129, 600])
@pytest.mark.parametrize(("hidden", "k", "dtype"), [(4096, 1024, torch.bfloat16), (896, 1120, torch.float16)])
@pytest.mark.usefixtures("large")
def test_residual(tokens: int, hidden: int, k: int, dtype: torch.dtype, config: GemmConfig | None, device: str,
                  num_sms: int) -> None:  # fmt: skip
    check_residual(tokens, hidden, k, dtype, config, device, num_sms)


def check_gate_up(tokens: int, hidden: int, inter: int, dtype: torch.dtype, config: GemmConfig | None, device: str,
                  num_sms: int, parts: int = 2) -> None:  # fmt: skip
    x = torch.randn(tokens, hidden, device=device).to(dtype) * 2
    w = (torch.randn(2 * inter, hidden, device=device) / hidden**0.5).to(dtype)
    sumsq = splits_of(x, parts)
    want = reference.gate_up_project(x.float(), sumsq.sum(0), w.float(), EPS)
    out = torch.full((tokens, inter), float("nan"), dtype=dtype, device=device)
    projections.gate_up_project(
        x, sumsq, w, EPS, out=out, num_sms=num_sms, space=gemm_launch.workspace(device), config=config
    )
    assert error(out, want) < 4e-3
    again = torch.empty_like(out)
    projections.gate_up_project(
        x, sumsq, w, EPS, out=again, num_sms=num_sms, space=gemm_launch.workspace(device), config=config
    )
    assert torch.equal(again, out)


def test_gate_up_of_few_tokens(device: str, num_sms: int) -> None:
    check_gate_up(5, 128, 96, torch.float16, TINY, device, num_sms)


def test_gate_up_with_more_partial_sums_than_fit_the_loops_registers(device: str, num_sms: int) -> None:
    check_gate_up(5, 160, 32, torch.float16, TINY, device, num_sms, parts=160)


@pytest.mark.parametrize("config", [SQUARE, WIDE, SPECIAL, None])
@pytest.mark.parametrize("parts", [40, 64])
@pytest.mark.usefixtures("large")
def test_gate_up_with_many_partial_sums(parts: int, config: GemmConfig | None, device: str, num_sms: int) -> None:
    check_gate_up(200, 1280, 1024, torch.bfloat16, config, device, num_sms, parts)


@pytest.mark.parametrize("config", [SQUARE, WIDE, SPECIAL, None])
@pytest.mark.parametrize("tokens", [1, 40, 129, 600])
@pytest.mark.parametrize(("hidden", "inter", "dtype"), [(1024, 3584, torch.bfloat16), (896, 4864, torch.float16)])
@pytest.mark.usefixtures("large")
def test_gate_up(tokens: int, hidden: int, inter: int, dtype: torch.dtype, config: GemmConfig | None, device: str,
                 num_sms: int) -> None:  # fmt: skip
    check_gate_up(tokens, hidden, inter, dtype, config, device, num_sms)


@pytest.mark.parametrize(("tokens", "hidden"), [(3, 96), (9, 256)])
def test_embedding_and_final_norm(tokens: int, hidden: int, device: str) -> None:
    table = torch.randn(50, hidden, device=device).to(torch.float16)
    ids = torch.randint(0, 50, (tokens,), device=device)
    x, sumsq = embedding.embed(
        ids, table, out=torch.empty(tokens, hidden, dtype=table.dtype, device=device),
        sumsq=projections.sumsq_buffer(hidden, tokens, device),
    )  # fmt: skip
    want, squares = reference.embed(ids, table)
    assert torch.equal(x, want)
    assert error(sumsq[0], squares) < 1e-5
    weight = torch.rand(hidden, device=device).to(torch.float16)
    rows = torch.tensor([2, 0], device=device)
    h = embedding.final_norm(x, sumsq, rows, weight, EPS, out=torch.empty(2, hidden, dtype=x.dtype, device=device))
    scale = reference.rms_scale(squares, hidden, EPS)
    assert error(h, (x.float() * scale[:, None] * weight.float())[rows]) < 5e-3
