"""The FP8 projections of a layer against their references."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import reference_fp8 as fp8_reference

from weft.kernels.formats import fp8
from weft.kernels.formats.fp8 import Fp8Rows, Fp8Weight
from weft.kernels.matmul import fp8_projections, fp8_rows, gemm_launch
from weft.kernels.matmul import weight_layout as pack
from weft.kernels.matmul.fp8_few_config import few_config
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.reference import layer as reference
from weft.tools.kernels.fp8_operands import quantize_tokens, quantize_weight_blocks, row_values

pytestmark = pytest.mark.usefixtures("rounded")

EPS = 1e-5
FEW = GemmConfig(16, 128, 128, 3, 4, split=2, swap=True, per_sm=2)
FEW_WIDE = GemmConfig(16, 256, 128, 3, 4, split=2, swap=True)
MANY = GemmConfig(128, 128, 128, 3, 8)
MANY_WIDE = GemmConfig(128, 256, 128, 3, 8)
SPECIAL, SPECIAL_NARROW = GemmConfig(128, 256, 128, 4, 4, special=True), GemmConfig(128, 128, 128, 4, 4, special=True)
EVERY = pytest.mark.parametrize(
    ("config", "way"),
    [(FEW_WIDE, ""), (MANY_WIDE, ""), (SPECIAL, "promoted"), (None, "promoted")],
    ids=["few", "many", "promoted", "chosen"],
)  # fmt: skip


def error(got: Tensor, want: Tensor) -> float:
    """Relative error by norm; NaN never passes a comparison."""
    return float((got.double() - want.double()).norm() / want.double().norm())


class Case(NamedTuple):
    x: Tensor
    a: Fp8Rows
    sumsq: Tensor
    weight: Fp8Weight
    bias: Tensor | None


def case(tokens: int, features: int, depth: int, device: str, blocked: bool | str = False, bias: bool = False,
         span: int = 128) -> Case:  # fmt: skip
    """Activations with outlier channels, as trained models have them. blocked: "rows" mixes rows of several blocks."""
    x = torch.randn(tokens, depth).to(torch.bfloat16)
    x[:, 3] *= 50
    x[:, -1] *= 0.01
    w = torch.randn(features, depth) / depth**0.5
    weight = (quantize_weight_blocks if blocked else fp8.quantize_weight)(w)
    if blocked == "rows":
        order = torch.randperm(features)
        by_row = fp8.by_row(weight.scale, features)[order].contiguous()
        weight = Fp8Weight(weight.values.view(torch.uint8)[order].view(fp8.E4M3), by_row)
    a = fp8.quantize_rows(x, span=span)
    squares = x.float().square().sum(-1)
    sumsq = torch.stack((squares * 0.25, squares * 0.75))
    return Case(
        x.to(device), a._replace(values=a.values.to(device), scale=a.scale.to(device)), sumsq.to(device),
        Fp8Weight(*(t.to(device) for t in weight)),
        torch.randn(features, device=device).to(torch.bfloat16) if bias else None,
    )  # fmt: skip


def poisoned(tokens: int, width: int, device: str, span: int = 128) -> Fp8Rows:
    rows = fp8_projections.rows_buffer(tokens, width, device, span=span)
    rows.values.view(torch.uint8).fill_(127)  # NaN
    rows.scale.fill_(float("nan"))
    return rows


def assert_same_rows(got: Fp8Rows, want: Fp8Rows) -> None:
    """As good as the reference's: if the kernel's sum was rounded the other way, a number may be one step off."""
    assert error(row_values(got), row_values(want)) < 0.02
    same = got.values.view(torch.uint8) == want.values.view(torch.uint8)
    assert float(same.float().mean()) > 0.98
    assert float((got.scale == want.scale).float().mean()) > 0.98


def check_linear(tokens: int, features: int, depth: int, config: GemmConfig | None, way: str, device: str, num_sms: int,
                 blocked: bool | str = False, span: int = 128) -> None:  # fmt: skip
    c = case(tokens, features, depth, device, blocked, bias=True, span=span)
    want = fp8_reference.linear_project(
        c.a, c.sumsq.sum(0), c.weight, EPS, activation="silu", bias=c.bias, dtype=torch.float32
    )
    space = gemm_launch.workspace(device)
    first = torch.full((tokens, features), float("nan"), dtype=torch.bfloat16, device=device)
    again = first.clone()
    for out in (first, again):
        fp8_projections.linear_project(
            c.a, c.sumsq, c.weight, EPS, activation="silu", bias=c.bias, out=out, num_sms=num_sms, space=space,
            config=config, way=way,
        )  # fmt: skip
    assert error(first, want) < 5e-3
    assert torch.equal(first, again)
    assert not int(space.arrived.abs().sum())


@pytest.mark.parametrize(
    ("tokens", "features", "depth", "blocked"),
    [(1, 128, 256, False), (5, 200, 336, False), (5, 200, 336, True), (5, 200, 336, "rows"), (17, 128, 512, True)],
)
def test_few_tokens(tokens: int, features: int, depth: int, blocked: bool | str, device: str, num_sms: int) -> None:
    check_linear(tokens, features, depth, FEW, "", device, num_sms, blocked)


@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize(("features", "depth"), [(4096, 4096), (6144, 4096), (4096, 14336), (1000, 1040), (128, 256)])
@pytest.mark.usefixtures("large")
def test_few_tokens_on_hopper(features: int, depth: int, tokens: int, device: str, num_sms: int) -> None:
    config = few_config("linear", features, depth, num_sms)
    assert config.special
    check_linear(tokens, features, depth, config, "", device, num_sms)


def test_tokens_as_rows_of_the_tile(device: str, num_sms: int) -> None:
    check_linear(130, 192, 256, MANY, "", device, num_sms)


@pytest.mark.parametrize("blocked", [False, True, "rows"])
@pytest.mark.parametrize("tokens", [1, 16, 65, 128, 200, 777])
@pytest.mark.parametrize(("features", "depth"), [(1536, 2048), (1000, 1040), (512, 14336)])
@pytest.mark.parametrize(
    ("config", "way"), [(SPECIAL, "promoted"), (SPECIAL_NARROW, "promoted"), (MANY_WIDE, ""), (None, "promoted")]
)
@pytest.mark.usefixtures("large")
def test_every_way_to_split_it(
    config: GemmConfig | None, way: str, features: int, depth: int, tokens: int, blocked: bool | str, device: str,
    num_sms: int,
) -> None:  # fmt: skip
    check_linear(tokens, features, depth, config, way, device, num_sms, blocked)


@pytest.mark.parametrize("tokens", [129, 777])
@pytest.mark.parametrize(("features", "depth"), [(1536, 2048), (1000, 1040), (512, 14336), (512, 384)])
@pytest.mark.parametrize("config", [SPECIAL, SPECIAL_NARROW, MANY_WIDE, None])
@pytest.mark.usefixtures("large")
def test_scales_of_256_columns(
    config: GemmConfig | None, features: int, depth: int, tokens: int, device: str, num_sms: int
) -> None:
    """Two steps in one sum where the depth has an even number of them."""
    check_linear(tokens, features, depth, config, "promoted", device, num_sms, span=256)


@pytest.mark.parametrize("way", ["fast", "promoted"])
@pytest.mark.usefixtures("large")
def test_a_scale_for_each_token(way: str, device: str, num_sms: int) -> None:
    c = case(300, 1024, 4096, device)
    a = quantize_tokens(c.x)
    want = fp8_reference.linear_project(a, None, c.weight, dtype=torch.float32)
    out = torch.empty(300, 1024, dtype=torch.bfloat16, device=device)
    fp8_projections.linear_project(a, None, c.weight, out=out, num_sms=num_sms, config=SPECIAL, way=way)
    assert error(out, want) < 6e-3


@pytest.mark.parametrize("span", [128, 256])
@pytest.mark.parametrize("depth", [4096, 14336])
@pytest.mark.usefixtures("large")
def test_sums_lose_no_more_than_those_of_scaled_mm(depth: int, span: int, device: str, num_sms: int) -> None:
    """Compares with the same scales, by rows, and without its fast accumulation; promoted every `span` of the depth."""
    x, w = torch.randn(256, depth, device=device), torch.randn(512, depth, device=device) / depth**0.5
    a, weight = quantize_tokens(x), fp8.quantize_weight(w)
    out = torch.empty(256, 512, dtype=torch.bfloat16, device=device)
    mine = Fp8Rows(a.values, a.scale.expand(depth // 128, -1).contiguous(), span)
    fp8_projections.linear_project(mine, None, weight, out=out, num_sms=num_sms, config=SPECIAL, way="promoted")
    theirs = torch._scaled_mm(
        a.values, weight.values.t(), a.scale[0][:, None].contiguous(), weight.scale[None].contiguous(),
        out_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip
    exact = row_values(a).double() @ fp8.weight_values(weight).double().T
    assert error(out, exact) <= 1.02 * error(theirs, exact)


def test_a_scale_for_each_token_of_few(device: str, num_sms: int) -> None:
    c = case(3, 128, 256, device)
    a = quantize_tokens(c.x)
    want = fp8_reference.linear_project(a, None, c.weight, dtype=torch.float32)
    out = torch.empty(3, 128, dtype=torch.bfloat16, device=device)
    config = GemmConfig(16, 128, 128, 3, 4, swap=True)
    fp8_projections.linear_project(a, None, c.weight, out=out, num_sms=num_sms, config=config)
    assert error(out, want) < 5e-3


def check_residual(tokens: int, hidden: int, depth: int, config: GemmConfig | None, way: str, device: str, num_sms: int,
                   norm: bool, span: int = 128) -> None:  # fmt: skip
    c = case(tokens, hidden, depth, device, span=span)
    x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
    weight = torch.rand(hidden, device=device).to(torch.bfloat16) + 0.5 if norm else None
    want, squares, _ = fp8_reference.residual_project(c.a, c.weight, x, next_norm=weight)
    rows = fp8.quantize_rows(want, weight, span=span)
    scratch = torch.full((-(-hidden // 64), tokens), float("nan"), device=device)
    quantized = poisoned(tokens, hidden, device, span)
    space = gemm_launch.workspace(device)
    out, sumsq = fp8_projections.residual_project(
        c.a, c.weight, x, out=torch.full_like(x, float("nan")), sumsq=scratch, quantized=quantized, next_norm=weight,
        num_sms=num_sms, space=space, config=config, way=way,
    )  # fmt: skip
    assert error(out, want) < 5e-3
    assert error(sumsq.sum(0), squares) < 5e-3
    assert_same_rows(quantized, rows)
    # the quantised values are the stored ones, to the bit
    exact = fp8.quantize_rows(out, weight, span=span)
    assert torch.equal(quantized.scale, exact.scale)
    assert torch.equal(quantized.values.view(torch.uint8), exact.values.view(torch.uint8))
    plain = fp8_projections.WIDE if span > 128 and config is None else config  # of few tokens, another kernel
    same, _ = fp8_projections.residual_project(
        c.a, c.weight, x, out=x, sumsq=scratch, num_sms=num_sms, space=space, config=plain, way=way
    )
    assert torch.equal(same, out)


@pytest.mark.parametrize("norm", [False, True])
def test_a_residual_writes_the_next_operand(norm: bool, device: str, num_sms: int) -> None:
    check_residual(5, 256, 512, FEW, "", device, num_sms, norm)


@EVERY
@pytest.mark.parametrize("tokens", [1, 40, 129, 600])
@pytest.mark.parametrize(("hidden", "depth"), [(4096, 1024), (896, 4864)])
@pytest.mark.usefixtures("large")
def test_residual(hidden: int, depth: int, tokens: int, config: GemmConfig | None, way: str, device: str,
                  num_sms: int) -> None:  # fmt: skip
    check_residual(tokens, hidden, depth, config, way, device, num_sms, tokens % 2 == 0)


@pytest.mark.parametrize("tokens", [1, 6, 16])
@pytest.mark.parametrize(("hidden", "depth"), [(4096, 4096), (4096, 14336), (896, 4864), (1152, 512)])
@pytest.mark.usefixtures("large")
def test_residual_of_few_tokens_on_hopper(hidden: int, depth: int, tokens: int, device: str, num_sms: int) -> None:
    config = few_config("residual", hidden, depth, num_sms)
    assert config.special
    check_residual(tokens, hidden, depth, config, "", device, num_sms, tokens % 2 == 0)


@pytest.mark.parametrize("config", [SPECIAL, SPECIAL_NARROW, None])
@pytest.mark.parametrize("tokens", [40, 129, 600, 1000])
@pytest.mark.parametrize(("hidden", "depth"), [(4096, 1024), (896, 4864), (1152, 512)])
@pytest.mark.usefixtures("large")
def test_a_residual_writes_scales_of_256_columns(
    hidden: int, depth: int, tokens: int, config: GemmConfig | None, device: str, num_sms: int
) -> None:
    """For any requested tile: only one this wide covers them all."""
    check_residual(tokens, hidden, depth, config, "promoted", device, num_sms, tokens % 2 == 0, span=256)


@pytest.mark.usefixtures("large")
def test_scales_of_256_columns_are_refused_if_no_tile_covers_them(device: str, num_sms: int) -> None:
    c, x = case(200, 512, 256, device, blocked=True), torch.zeros(200, 512, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="scales of 256 columns"):
        fp8_projections.residual_project(
            c.a, c.weight, x, out=x, sumsq=torch.empty(8, 200, device=device), num_sms=num_sms,
            quantized=poisoned(200, 512, device, 256),
        )  # fmt: skip


def check_gate_up(tokens: int, hidden: int, inter: int, config: GemmConfig | None, way: str, device: str, num_sms: int,
                  activation: str = "silu", blocked: bool | str = False, span: int = 128) -> None:  # fmt: skip
    c = case(tokens, 2 * inter, hidden, device, blocked, bias=True, span=span)
    want = fp8_reference.gate_up_project(c.a, c.sumsq.sum(0), c.weight, EPS, activation=activation, bias=c.bias)
    got = fp8_projections.gate_up_project(
        c.a, c.sumsq, c.weight, EPS, activation=activation, bias=c.bias, quantized=poisoned(tokens, inter, device),
        num_sms=num_sms, space=gemm_launch.workspace(device), config=config, way=way,
    )  # fmt: skip
    assert_same_rows(got, want)


@pytest.mark.parametrize(("inter", "activation"), [(128, "silu"), (192, "gelu_tanh")])
def test_gate_up_writes_the_next_operand(inter: int, activation: str, device: str, num_sms: int) -> None:
    check_gate_up(5, 512, inter, FEW_WIDE, "", device, num_sms, activation)


@EVERY
@pytest.mark.parametrize("tokens", [1, 40, 129, 600])
@pytest.mark.parametrize(("hidden", "inter"), [(1024, 3584), (896, 4864)])
@pytest.mark.usefixtures("large")
def test_gate_up(hidden: int, inter: int, tokens: int, config: GemmConfig | None, way: str, device: str,
                 num_sms: int) -> None:  # fmt: skip
    check_gate_up(
        tokens, hidden, inter, config, way, device, num_sms, blocked={129: True, 600: "rows"}.get(tokens, False)
    )


@pytest.mark.parametrize("tokens", [1, 6, 16])
@pytest.mark.parametrize(("hidden", "inter"), [(4096, 14336), (896, 4864), (1040, 1000)])
@pytest.mark.usefixtures("large")
def test_gate_up_of_few_tokens_on_hopper(hidden: int, inter: int, tokens: int, device: str, num_sms: int) -> None:
    config = few_config("gate_up", 2 * inter, hidden, num_sms)
    assert config.special
    check_gate_up(tokens, hidden, inter, config, "", device, num_sms, "silu" if tokens > 1 else "gelu_tanh")


@pytest.mark.parametrize("tokens", [129, 600])
@pytest.mark.usefixtures("large")
def test_gate_up_of_scales_of_256_columns(tokens: int, device: str, num_sms: int) -> None:
    check_gate_up(tokens, 1024, 3584, SPECIAL, "promoted", device, num_sms, span=256)


def check_qkv(tokens: int, heads: int, kv_heads: int, d: int, page: int, hidden: int, norm: bool, eight: bool,
              config: GemmConfig | None, way: str, device: str, num_sms: int, span: int = 128) -> None:  # fmt: skip
    c = case(tokens, (heads + 2 * kv_heads) * d, hidden, device, bias=not norm, span=span)
    qn, kn = (torch.rand(d, device=device).to(torch.bfloat16) + 0.5 for _ in range(2)) if norm else (None, None)
    rotary = pack.rotary_table(10000.0 ** (-torch.arange(0, d, 2, device=device).float() / d), 3000)
    positions = torch.randint(0, 3000, (tokens,), device=device)
    pages, layers, layer = tokens // page + 3, 2, 1
    slots = torch.randperm((pages - 1) * page, device=device)[:tokens] + page
    scales = fp8.kv_scales(torch.rand(layers, 2, kv_heads, device=device) * 0.1 + 0.01) if eight else None
    kv = torch.full((pages, layers, 2, page, kv_heads, d), float("nan"), dtype=torch.bfloat16, device=device)
    if eight:
        kv = kv.to(fp8.E4M3)
    want_kv = kv.clone()
    out = torch.full((tokens, heads, d), float("nan"), dtype=torch.bfloat16, device=device)
    fp8_projections.qkv_project(
        c.a, c.sumsq, c.weight, c.bias, EPS, rotary, positions, slots, kv, layer, heads, qn, kn, scales, out=out,
        num_sms=num_sms, space=gemm_launch.workspace(device), config=config, way=way,
    )  # fmt: skip
    want = fp8_reference.qkv_project(
        c.a, c.sumsq.sum(0), c.weight, c.bias, EPS, rotary, positions, slots, want_kv, layer, heads, qn, kn, scales,
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert error(out, want) < 5e-3
    assert torch.equal(kv.float().isnan(), want_kv.float().isnan())
    assert error(kv.float().nan_to_num(), want_kv.float().nan_to_num()) < (0.02 if eight else 5e-3)


@pytest.mark.parametrize(("norm", "eight"), [(False, True), (True, True), (False, False)])
def test_qkv_of_few_tokens_writes_pages_of_either_format(norm: bool, eight: bool, device: str, num_sms: int) -> None:
    check_qkv(7, 4, 2, 128 if norm else 64, 16, 256, norm, eight, FEW, "", device, num_sms)


@EVERY
@pytest.mark.parametrize("tokens", [1, 13, 128, 333])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "page", "norm", "eight"),
    [(32, 8, 128, 64, False, True), (16, 8, 128, 128, True, True), (14, 2, 64, 16, False, True),
     (9, 3, 64, 32, True, False), (5, 5, 128, 64, False, False)],
)  # fmt: skip
@pytest.mark.usefixtures("large")
def test_qkv(heads: int, kv_heads: int, d: int, page: int, norm: bool, eight: bool, tokens: int,
             config: GemmConfig | None, way: str, device: str, num_sms: int) -> None:  # fmt: skip
    if norm and d == 64 and config is not None and config.special:
        pytest.skip("no whole head in its tile")
    check_qkv(tokens, heads, kv_heads, d, page, 1024, norm, eight, config, way, device, num_sms)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 4096), (6, 1040), (16, 4096)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "page", "norm", "eight"),
    [(32, 8, 128, 64, False, True), (16, 8, 128, 128, True, True), (14, 2, 64, 16, False, True),
     (9, 3, 64, 32, False, False), (5, 5, 128, 64, True, False)],
)  # fmt: skip
@pytest.mark.usefixtures("large")
def test_qkv_of_few_tokens_on_hopper(
    heads: int, kv_heads: int, d: int, page: int, norm: bool, eight: bool, tokens: int, hidden: int, device: str,
    num_sms: int,
) -> None:  # fmt: skip
    config = few_config("qkv", (heads + 2 * kv_heads) * d, hidden, num_sms)
    assert config.special
    check_qkv(tokens, heads, kv_heads, d, page, hidden, norm, eight, config, "", device, num_sms)


@pytest.mark.usefixtures("large")
def test_few_tokens_in_a_chain_are_the_same_each_time(device: str, num_sms: int) -> None:
    """Programs of three kernels share an SM: none may read what the previous one has not finished."""
    first, second = case(5, 2048, 2048, device), case(5, 4096, 2048, device)
    third = case(5, 2048, 2048, device)
    space = gemm_launch.workspace(device)
    begun = torch.randn(5, 2048, device=device).to(torch.bfloat16)
    x, between, gated = begun.clone(), poisoned(5, 2048, device), poisoned(5, 2048, device)
    sums, more = (torch.empty(32, 5, device=device) for _ in range(2))
    options = {"num_sms": num_sms, "space": space}

    def of(kind: str, features: int) -> GemmConfig:
        config = few_config(kind, features, 2048, num_sms)
        assert config.special
        return config

    def layer() -> None:
        x.copy_(begun)
        _, squares = fp8_projections.residual_project(
            first.a, first.weight, x, out=x, sumsq=sums, quantized=between, config=of("residual", 2048), **options
        )
        fp8_projections.gate_up_project(
            between, squares, second.weight, EPS, quantized=gated, config=of("gate_up", 4096), **options
        )
        fp8_projections.residual_project(
            gated, third.weight, x, out=x, sumsq=more, quantized=between, config=of("residual", 2048), **options
        )

    layer()
    torch.cuda.synchronize()
    want = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            layer()
    for _ in range(20):
        x.zero_()
        graph.replay()
        assert torch.equal(x, want)


@pytest.mark.parametrize(("norm", "eight"), [(False, True), (True, False)])
@pytest.mark.usefixtures("large")
def test_qkv_of_scales_of_256_columns(norm: bool, eight: bool, device: str, num_sms: int) -> None:
    check_qkv(333, 32, 8, 128, 64, 1024, norm, eight, SPECIAL, "promoted", device, num_sms, span=256)


def test_rows_after_the_count_in_device_memory_are_unchanged(device: str, num_sms: int) -> None:
    c = case(20, 128, 256, device)
    out = torch.full((20, 128), float("nan"), dtype=torch.bfloat16, device=device)
    count = torch.tensor([3], dtype=torch.int32, device=device)
    fp8_projections.linear_project(
        c.a, None, c.weight, out=out, num_sms=num_sms, num_tokens=count, space=gemm_launch.workspace(device), config=FEW
    )
    assert bool(out[3:].isnan().all())
    assert error(out[:3], fp8_reference.linear_project(c.a, None, c.weight, dtype=torch.float32)[:3]) < 5e-3


@pytest.mark.parametrize("live", [0, 3, 7])
@pytest.mark.usefixtures("large")
def test_few_tokens_on_hopper_are_as_many_as_the_count_says(live: int, device: str, num_sms: int) -> None:
    """The other rows stay unchanged, and no program waits for sums that no program writes."""
    c, space = case(7, 1000, 1040, device), gemm_launch.workspace(device)
    x = torch.randn(7, 1000, device=device).to(torch.bfloat16)
    count = torch.tensor([live], dtype=torch.int32, device=device)
    want, _, rows = fp8_reference.residual_project(c.a, c.weight, x)
    out, sums = torch.full_like(x, float("nan")), torch.full((8, 7), float("nan"), device=device)
    quantized = poisoned(7, 1000, device)
    fp8_projections.residual_project(
        c.a, c.weight, x, out=out, sumsq=sums, quantized=quantized, num_sms=num_sms, space=space, num_tokens=count,
        config=few_config("residual", 1000, 1040, num_sms),
    )  # fmt: skip
    for left in (out[live:], sums[:, live:], quantized.scale[:, live:], quantized.values[live:].float()):
        assert bool(left.isnan().all())
    assert not int(space.arrived.abs().sum())
    if live:
        assert error(out[:live], want[:live]) < 5e-3
        assert_same_rows(quantized.of_tokens(slice(0, live)), rows.of_tokens(slice(0, live)))


def test_operands_of_other_formats_are_refused(device: str, num_sms: int) -> None:
    c = case(4, 128, 256, device)
    out = torch.empty(4, 128, dtype=torch.bfloat16, device=device)
    with pytest.raises(TypeError, match="e4m3"):
        fp8_projections.linear_project(
            Fp8Rows(c.x, c.a.scale), None, c.weight, out=out, num_sms=num_sms
        )  # fmt: skip
    with pytest.raises(ValueError, match="scales of weights"):
        fp8_projections.linear_project(
            c.a, None, Fp8Weight(c.weight.values, c.weight.scale[:5]), out=out, num_sms=num_sms
        )


@pytest.mark.parametrize("span", [128, 256])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(3, 128), (5, 2096), (2, 14336)])
def test_a_pass_over_rows_quantises_them_to_the_bit(
    tokens: int, width: int, norm: bool, span: int, device: str
) -> None:
    x = (torch.randn(tokens, width, device=device) * torch.logspace(-20, 20, width, device=device)).to(torch.bfloat16)
    x[0, 5], x[-1, :128] = float("nan"), 0.0
    weight = torch.rand(width, device=device).to(torch.bfloat16) if norm else None
    want = fp8.quantize_rows(x, weight, span=span)
    count = torch.tensor([tokens], dtype=torch.int32, device=device)
    got = fp8_rows.quantize_rows(x, weight, out=poisoned(tokens + 1, width, device, span), num_tokens=count)
    assert bool(got.values[tokens].float().isnan().all())
    other_blocks = span // 128  # blocks that share no scale with the NaN
    assert torch.equal(got.scale[other_blocks:, :tokens], want.scale[other_blocks:])
    assert torch.equal(got.scale[:, 1:tokens], want.scale[:, 1:])
    assert torch.equal(got.values[1:tokens].view(torch.uint8), want.values[1:].view(torch.uint8))
    assert bool(row_values(Fp8Rows(got.values[:1], got.scale[:, :1]))[0, 5].isnan())


@pytest.mark.parametrize("kind", ["mean", "bias", "both", "without a weight"])
@pytest.mark.parametrize(("tokens", "width"), [(3, 128), (5, 2096)])
def test_a_pass_over_rows_norms_and_quantises_them(tokens: int, width: int, kind: str, device: str) -> None:
    """Like the reference, except for numbers at a tie: sums are added in another order. Widths of one block and of
    several iterations of the loop, the last of them not full."""
    x = torch.randn(tokens, width, device=device).mul(2).add(1).to(torch.bfloat16)
    weight = None if kind == "without a weight" else torch.rand(width, device=device).to(torch.bfloat16) + 0.5
    bias = None if kind == "mean" else torch.randn(width, device=device).to(torch.bfloat16)
    centred = kind != "bias"
    sumsq = reference.row_sumsq(x, centred)
    parts = torch.stack((sumsq * 0.25, sumsq * 0.75))
    want = fp8_reference.norm_rows(x, weight, bias, sumsq, 1e-5, centred=centred)
    count = torch.tensor([tokens], dtype=torch.int32, device=device)
    out = poisoned(tokens + 1, width, device)
    more = torch.zeros(tokens + 1, width, dtype=x.dtype, device=device)
    more[:tokens] = x
    given = torch.cat((parts, torch.ones(2, 1, device=device)), 1)
    got = fp8_rows.norm_rows(more, weight, bias, given, 1e-5, centred=centred, out=out, num_tokens=count)
    assert bool(got.values[tokens].float().isnan().all())
    assert torch.equal(got.scale[:, :tokens], want.scale)
    same = got.values[:tokens].view(torch.uint8) == want.values.view(torch.uint8)
    assert float(same.float().mean()) > 0.998
    mine = row_values(Fp8Rows(got.values[:tokens], got.scale[:, :tokens].contiguous()))
    assert float((mine - row_values(want)).norm() / row_values(want).norm()) < 2e-3
