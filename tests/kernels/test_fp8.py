"""The FP8 formats: every code of e4m3, scales that are powers of two, and the loss of GEMMs."""

from __future__ import annotations

import math

import pytest
import torch

from weft.kernels.formats import fp8
from weft.tools.kernels.fp8_operands import quantize_tokens, quantize_weight_blocks, row_values


def test_every_number_of_e4m3_is_one_of_float16_and_of_bfloat16() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.E4M3)
    exact = codes.float()
    assert int(exact.isnan().sum()) == 2
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(exact.to(dtype).float().nan_to_num(1e9), exact.nan_to_num(1e9))
    assert float(exact.nan_to_num(0).max()) == fp8.LARGEST
    assert torch.equal(fp8.saturated(exact).view(torch.uint8) & 127, codes.view(torch.uint8) & 127)


def test_values_too_large_become_the_largest_and_nan_stays_nan() -> None:
    x = torch.tensor([449.0, 464.0, 1e30, math.inf, -math.inf, math.nan, 17.0, 2.0**-10])
    got = fp8.saturated(x).float()
    assert got[:5].tolist() == [448.0] * 4 + [-448.0]
    assert bool(got[5].isnan())
    assert got[6:].tolist() == [16.0, 0.0]  # ties to even


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [(448.0, 0), (448.1, 1), (449.0, 1), (896.0, 1), (224.0, -1), (225.0, 0), (1.75, -8), (1.76, -7), (1.0, -8),
     (0.0, -40), (1e-30, -40), (3.3e38, 120)],
)  # fmt: skip
def test_the_scale_is_the_least_power_of_two_that_suffices(amax: float, exponent: int) -> None:
    scale = fp8.power_of_two_scale(torch.tensor([amax]))
    assert float(scale) == 2.0**exponent
    assert float(torch.tensor(amax) / scale) <= fp8.LARGEST


def test_a_row_with_nan_or_infinity_gives_no_number_and_leaves_its_neighbours_alone() -> None:
    x = torch.randn(3, 256)
    good = row_values(fp8.quantize_rows(x))
    x[0, 5], x[2, 200] = math.nan, math.inf
    rows = fp8.quantize_rows(x)
    total = fp8.scaled_matmul(rows, fp8.quantize_weight(torch.randn(8, 256)))
    assert bool(total[[0, 2]].isnan().all())
    assert torch.equal(row_values(rows)[1], good[1])


@pytest.mark.parametrize("depth", [128, 200, 512])
def test_rows_keep_four_bits_of_each_number_in_any_block(depth: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(5, depth) * torch.logspace(-6, 6, 5)[:, None]
    x[:, 7] *= 1000  # an outlier affects only its own block
    got = row_values(fp8.quantize_rows(x.to(torch.bfloat16)))
    blocks = x.abs().split(128, 1)
    for mine, block in zip((got - x).abs().split(128, 1), blocks, strict=True):
        # half a unit of the last of four bits, or of the finest step below the block's largest number; and bfloat16's
        step = torch.maximum(block * 2**-4, block.amax(1, keepdim=True) * 2.0**-17)
        assert bool((mine <= step * 1.07).all())


def test_a_norms_weight_is_multiplied_in_before_the_cast() -> None:
    x, weight = torch.randn(4, 256), torch.rand(256)
    want, got = fp8.quantize_rows(x * weight), fp8.quantize_rows(x, weight)
    assert torch.equal(want.values.float(), got.values.float())
    assert torch.equal(want.scale, got.scale)


@pytest.mark.parametrize("depth", [128, 384, 512])
def test_two_blocks_may_share_the_larger_ones_scale(depth: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(5, depth)
    x[:, 7] *= 1000
    alone, shared = fp8.quantize_rows(x), fp8.quantize_rows(x, span=256)
    assert (alone.span, shared.span) == (128, 256)
    for first in range(0, depth // 128, 2):
        assert torch.equal(shared.scale[first], alone.scale[first : first + 2].amax(0))
        assert torch.equal(shared.scale[first], shared.scale[first : first + 2][-1])
    # next to an outlier, a block loses what e4m3 has no exponents for: at most half of its finest step
    lost = (row_values(shared) - x).abs()
    step = torch.maximum(x.abs() * 2**-4, shared.scale.t().repeat_interleave(128, 1) * 2.0**-10)
    assert bool((lost <= step * 1.001).all())


@pytest.mark.parametrize("blocked", [False, True])
def test_weights_of_any_shape_round_trip_within_four_bits(blocked: bool) -> None:
    torch.manual_seed(2)
    w = torch.randn(200, 336).to(torch.bfloat16)
    w[3] = 0
    quantized = (quantize_weight_blocks if blocked else fp8.quantize_weight)(w)
    assert quantized.blocked == blocked
    assert quantized.scale.shape == ((2, 3) if blocked else (200,))
    error = (fp8.weight_values(quantized) - w.float()).norm() / w.float().norm()
    assert 0.01 < float(error) < 0.04
    assert not fp8.weight_values(quantized)[3].any()


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("of", ["blocks", "tokens"])
def test_a_gemm_multiplies_the_dequantised_values(of: str, blocked: bool) -> None:
    torch.manual_seed(3)
    x, w = torch.randn(6, 336), torch.randn(200, 336)
    a = (fp8.quantize_rows if of == "blocks" else quantize_tokens)(x)
    weight = (quantize_weight_blocks if blocked else fp8.quantize_weight)(w)
    exact = row_values(a).double() @ fp8.weight_values(weight).double().t()
    assert float((fp8.scaled_matmul(a, weight) - exact).norm() / exact.norm()) < 1e-6


def test_a_checkpoints_static_activation_scale_is_used_for_all_tokens() -> None:
    x = torch.randn(4, 64)
    rows = fp8.quantize_static(x, torch.tensor(0.25))
    assert rows.scale.shape == (1, 4)
    assert torch.equal(rows.values.float(), fp8.saturated(x * 4).float())


def test_k_and_v_are_written_with_the_scale_of_their_head() -> None:
    scales = fp8.kv_scales(torch.tensor([[[0.5, 4.0], [1.0, 1.0]]]))
    k = torch.full((1, 2, 4), 1000.0)
    stored = fp8.quantize_kv(k, scales.inverse[0, 0])
    assert (stored.float() * scales.scale[0, 0][:, None]).amax(-1).tolist() == [[224.0, 1024.0]]  # 250 is 256 in e4m3
    assert torch.equal(fp8.unit_kv_scales(3, 2, "cpu").inverse, torch.ones(3, 2, 2))


@pytest.mark.parametrize("outliers", [1.0, 100.0])
def test_dynamic_scales_lose_no_more_than_a_static_one(outliers: float) -> None:
    """The best static scale is that of the largest of these numbers. It loses the precision of much smaller ones."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 512, generator=generator) * torch.rand(64, 1, generator=generator).square()
    x[:, 7] *= outliers
    weight = fp8.quantize_weight(torch.randn(64, 512, generator=generator))
    exact = x.double() @ fp8.weight_values(weight).double().T

    def lost(rows: fp8.Fp8Rows) -> float:
        apart = (fp8.scaled_matmul(rows, weight) - exact).norm(dim=1) / exact.norm(dim=1)
        return float(apart.mean())

    static, made = lost(fp8.quantize_static(x, x.abs().max() / fp8.LARGEST)), lost(fp8.quantize_rows(x))
    assert made < 1.02 * static
    assert outliers == 1.0 or made < 0.95 * static


@pytest.mark.parametrize("depth", [512, 4096])
def test_a_gemm_loses_no_more_than_torchs_with_the_same_scales(depth: int) -> None:
    """`torch._scaled_mm` by rows, which rounds to 16 bits; outlier channels as trained models have them."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(32, depth, generator=generator)
    x[:, 3] *= 50
    rows = quantize_tokens(x)
    weight = fp8.quantize_weight(torch.randn(64, depth, generator=generator) / depth**0.5)
    theirs = torch._scaled_mm(
        rows.values, weight.values.t(), rows.scale[0][:, None].contiguous(), weight.scale[None].contiguous(),
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    exact = row_values(rows).double() @ fp8.weight_values(weight).double().T
    ours = fp8.scaled_matmul(rows, weight).to(torch.bfloat16)
    assert (ours - exact).norm() <= 1.001 * (theirs - exact).norm()
    assert (fp8.scaled_matmul(rows, weight) - exact).norm() < 1e-5 * exact.norm()
