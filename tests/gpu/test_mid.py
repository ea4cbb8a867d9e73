"""GEMMs of 64 to 512 tokens (`mid_hopper`) against their references in float32, and today's kernels to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from weft.kernels.matmul import gemm_launch, mid_hopper, mid_projections, projections
from weft.kernels.matmul import weight_layout as pack
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.matmul.mid_config import TALL, MidConfig
from weft.kernels.reference import layer as reference

EPS = 1e-5
WIDTHS = [
    *(MidConfig(w) for w in (64, 96, 128, 160, 192, 224, 256)),
    *(MidConfig(w, rows=TALL) for w in (64, 96, 128, 192, 224)),
]
CUT = [
    MidConfig(256, 2),
    MidConfig(256, 8),
    MidConfig(128, 3),
    MidConfig(128, 4, 4),
    MidConfig(64, 5),
    MidConfig(64, 7),
    MidConfig(64, 2, rows=TALL),
    MidConfig(128, 4, rows=TALL),
]
TOKENS = (1, 65, 128, 192, 200, 512)


@pytest.fixture(autouse=True)
def hopper(device: str) -> None:
    if device == "cpu" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel of Hopper, which nothing interprets")


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


class Case:
    """Operands of one GEMM. `run` returns all that it writes, from memory that held NaN."""

    def __init__(self, kind: str, tokens: int, features: int, depth: int, num_sms: int, *, head_dim: int = 128,
                 dtype: torch.dtype = torch.bfloat16, live: int | None = None) -> None:  # fmt: skip
        self.kind, self.dtype = kind, dtype
        self.a = torch.randn(tokens, depth, device="cuda").to(dtype)
        self.w = (torch.randn(features, depth, device="cuda") / depth**0.5).to(dtype)
        self.sumsq = self.a.float().square().view(tokens, 4, -1).sum(-1).t().contiguous()
        self.x = torch.randn(tokens, features, device="cuda").to(dtype)
        self.space = gemm_launch.workspace("cuda")
        self.options: dict[str, Any] = {"num_sms": num_sms, "space": self.space}
        if live is not None:
            self.options["num_tokens"] = torch.tensor([live], dtype=torch.int32, device="cuda")
        self.kv_heads, self.d = 2, head_dim
        self.heads = features // head_dim - 2 * self.kv_heads
        angle = 10000.0 ** (-torch.arange(0, head_dim, 2, device="cuda").float() / head_dim)
        self.rotary = pack.rotary_table(angle, 3000)
        self.positions = torch.randint(0, 3000, (tokens,), device="cuda")
        self.pages = tokens // 64 + 3
        self.slots = torch.randperm((self.pages - 1) * 64, device="cuda")[:tokens] + 64

    def _kv(self) -> Tensor:
        shape = (self.pages, 2, 2, 64, self.kv_heads, self.d)
        return torch.full(shape, float("nan"), dtype=self.dtype, device="cuda")

    def run(self, config: GemmConfig | MidConfig) -> list[Tensor]:
        module: Any = mid_projections if isinstance(config, MidConfig) else projections
        tokens, features = self.x.shape
        options = self.options | {"config": config}
        if self.kind == "plain":
            out = torch.full_like(self.x, float("nan"))
            return [module.linear_project(self.a, None, self.w, EPS, out=out, **options)]
        if self.kind == "residual":
            scratch = projections.sumsq_buffer(features, tokens, "cuda").fill_(float("nan"))
            out = torch.full_like(self.x, float("nan"))
            _, sums = module.residual_project(self.a, self.w, self.x, out=out, sumsq=scratch, **options)
            return [out, sums.sum(0)]
        if self.kind == "gate_up":
            out = torch.full((tokens, features // 2), float("nan"), dtype=self.dtype, device="cuda")
            return [module.gate_up_project(self.a, self.sumsq, self.w, EPS, out=out, **options)]
        out = torch.full((tokens, self.heads, self.d), float("nan"), dtype=self.dtype, device="cuda")
        kv = self._kv()
        module.qkv_project(self.a, self.sumsq, self.w, None, EPS, self.rotary, self.positions, self.slots, kv, 1,
                           self.heads, out=out, **options)  # fmt: skip
        return [out, kv]

    def expected(self) -> list[Tensor]:
        a, w, sums = self.a.float(), self.w.float(), self.sumsq.sum(0)
        if self.kind == "plain":
            return [a @ w.t()]
        if self.kind == "residual":
            y, squares = reference.residual_project(a, w, self.x.float())
            return [y, squares]
        if self.kind == "gate_up":
            return [reference.gate_up_project(a, sums, w, EPS)]
        kv = self._kv().float()
        q = reference.qkv_project(a, sums, w, None, EPS, self.rotary, self.positions, self.slots, kv, 1, self.heads)
        return [q, kv]

    def check(self, config: MidConfig) -> list[Tensor]:
        got, want = self.run(config), self.expected()
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g.isnan(), w.isnan()), "something was left out, or written where it should not be"
            assert error(g.nan_to_num(), w.nan_to_num()) < 6e-3
        assert not self.space.arrived.any(), "the next launch would find parts that are not there"
        return got


SIZES = {"plain": (1000, 1040), "residual": (1000, 1040), "gate_up": (1504, 1040), "qkv": (1536, 1088)}
"""features and depth; no multiple of most tiles"""


def case(kind: str, tokens: int, num_sms: int, **options: Any) -> Case:
    return Case(kind, tokens, *SIZES[kind], num_sms, **options)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_tile_of_any_width_gives_the_bits_of_the_widest(kind: str, tokens: int, num_sms: int) -> None:
    c = case(kind, tokens, num_sms)
    want = c.run(SPECIAL)
    for config in WIDTHS:
        got = c.check(config)
        assert torch.equal(got[0], want[0]), config
        if kind == "qkv":
            assert torch.equal(got[1].nan_to_num(7.0), want[1].nan_to_num(7.0)), config


@pytest.mark.parametrize("kind", SIZES)
def test_a_tile_gives_the_bits_of_the_widest_for_a_thousand_tokens_too(kind: str, num_sms: int) -> None:
    c = case(kind, 1280, num_sms, live=1200)
    want = c.run(SPECIAL)
    for config in (MidConfig(160), MidConfig(224, box=32)):
        got = c.run(config)
        assert torch.equal(got[0][:1200], want[0][:1200]), config
        if kind == "qkv":
            assert torch.equal(got[1].nan_to_num(7.0), want[1].nan_to_num(7.0)), config


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("sms", [132, 7])
def test_the_splits_of_a_depth_are_added_in_their_order(
    kind: str, tokens: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sms: with this few, programs wait for splits that they would compute later themselves."""
    c = case(kind, tokens, sms)
    for config in CUT:
        monkeypatch.setattr(mid_hopper, "MAX_POLLS", 20000 if sms == 132 else 50)
        first = c.check(config)
        for patience in (0, 3, 200):  # the last adds up all; some give up
            monkeypatch.setattr(mid_hopper, "MAX_POLLS", patience)
            for again, before in zip(c.check(config), first, strict=True):
                assert torch.equal(again.nan_to_num(7.0), before.nan_to_num(7.0)), (config, patience)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_of_both_sizes(head_dim: int, dtype: torch.dtype, num_sms: int) -> None:
    c = case("qkv", 130, num_sms, head_dim=head_dim, dtype=dtype)
    for config in (MidConfig(96), MidConfig(192), MidConfig(64, 4), MidConfig(256, 3)):
        c.check(config)


@pytest.mark.parametrize("config", [MidConfig(192), MidConfig(128, 4), MidConfig(224, rows=TALL)])
@pytest.mark.parametrize("kind", ["residual", "gate_up", "plain"])
def test_tiles_after_the_count_in_device_memory_are_skipped(kind: str, config: MidConfig, num_sms: int) -> None:
    c = case(kind, 512, num_sms, live=130)
    got, want = c.run(config)[0], c.expected()[0]
    assert error(got[:130], want[:130]) < 6e-3
    assert bool(got[256:].isnan().all())
    assert not c.space.arrived.any()


@pytest.mark.parametrize("config", [MidConfig(64), MidConfig(224), MidConfig(128, 4), MidConfig(256, 3)])
@pytest.mark.parametrize("kind", ["residual", "gate_up", "qkv", "plain"])
def test_loading_only_live_tokens_changes_no_bit_of_them(kind: str, config: MidConfig, num_sms: int) -> None:
    for live in (1, 31, 32, 33, 64, 65, 96, 97, 128, 129, 160, 200, 256):
        c = case(kind, 256, num_sms, live=live)
        want, got = c.run(config), c.run(config._replace(box=32))
        assert torch.equal(got[0][:live], want[0][:live]), live
        for a, b in zip(got[1:], want[1:], strict=True):  # sums of squares; or K and V, whose other slots hold NaN
            rows = slice(None) if kind == "qkv" else slice(live)
            assert torch.equal(a[rows].nan_to_num(7.0), b[rows].nan_to_num(7.0)), live
        assert bool(got[0][-(-live // 64) * 64 :].isnan().all()), "rows of nobody are written"
        assert not c.space.arrived.any()


@pytest.mark.parametrize(
    "config",
    [MidConfig(224), MidConfig(256, 4, 4), MidConfig(128, 8), MidConfig(128, rows=TALL), MidConfig(128, 3, rows=TALL)],
)
def test_a_graph_of_many_gives_the_same_each_time(config: MidConfig, num_sms: int) -> None:
    """One workspace for all of them, in place, as in an engine."""
    from weft.kernels.common.dependent_launch import dependent_launch

    c = Case("residual", 256, 1024, 2048, num_sms)
    scratch = projections.sumsq_buffer(1024, 256, "cuda")
    x = c.x.clone()

    def launch() -> None:
        for _ in range(8):
            mid_projections.residual_project(c.a, c.w, x, out=x, sumsq=scratch, config=config, **c.options)

    with dependent_launch(True):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
    want = None
    for _ in range(50):
        x.copy_(c.x)
        graph.replay()
        torch.cuda.synchronize()
        want = x.clone() if want is None else want
        assert torch.equal(x, want)
    assert error(want, c.x.float() + 8 * (c.a.float() @ c.w.float().t())) < 2e-2


def test_a_table_takes_effect(monkeypatch: pytest.MonkeyPatch, num_sms: int) -> None:
    from weft.kernels.matmul import mid_rule, mid_table

    if num_sms != mid_table.MACHINE[1]:
        pytest.skip("tables are for GPUs of 132 SMs")
    c = Case("plain", 200, 4096, 4096, num_sms)
    seen: list[MidConfig] = []
    launch = mid_hopper.launch_gemm
    monkeypatch.setattr(mid_hopper, "launch_gemm", lambda *a, **k: (seen.append(a[1]), launch(*a, **k)))
    out = torch.empty_like(c.x)
    for table in ({}, {(256, 4096, 4096): MidConfig(256, 4)}):
        monkeypatch.setattr(mid_table, "_shipped", lambda table=table: table)
        mid_projections.linear_project(c.a, None, c.w, EPS, out=out, **c.options)
    assert seen == [mid_rule.by_rule(200, 4096, 4096, num_sms), MidConfig(256, 4)]
