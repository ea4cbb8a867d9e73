"""Parts of families beyond Llama's layer, in projections and after them, against the references in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_projections import EPS, SQUARE, TINY, WIDE, check_qkv, error, splits_of
from torch import Tensor

pytest.importorskip("triton")
from weft.kernels.matmul import embedding, gemm, gemm_launch, projections, rows
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.reference import layer as reference

BF16, FP16 = torch.bfloat16, torch.float16
TILED = ((1, None), (40, None), (333, SQUARE), (333, WIDE), (333, SPECIAL))
"""tokens and the tiles they are computed in"""


def random(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


def options(device: str, num_sms: int, config: GemmConfig | None) -> dict[str, Any]:
    return {"num_sms": num_sms, "space": gemm_launch.workspace(device), "config": config}


def check_first_of_mlp(
    tokens: int, hidden: int, inter: int, activation: str, gated: bool, bias: bool, normed: bool, dtype: torch.dtype,
    config: GemmConfig | None, device: str, num_sms: int,
) -> None:  # fmt: skip
    x = random(tokens, hidden, dtype=dtype, device=device, scale=2.0)
    features = 2 * inter if gated else inter
    w = random(features, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    b = random(features, dtype=dtype, device=device) if bias else None
    sumsq = splits_of(x, 2) if normed else None
    project, expected = (
        (projections.gate_up_project, reference.gate_up_project)
        if gated
        else (projections.linear_project, reference.up_project)
    )
    out = torch.full((tokens, inter), float("nan"), dtype=dtype, device=device)
    project(x, sumsq, w, EPS, activation=activation, bias=b, out=out, **options(device, num_sms, config))
    want = expected(
        x.float(), None if sumsq is None else sumsq.sum(0), w.float(), EPS, activation=activation,
        bias=None if b is None else b.float(),
    )  # fmt: skip
    assert error(out, want) < 4e-3


@pytest.mark.parametrize(
    ("activation", "gated", "bias", "normed"),
    [
        ("gelu_tanh", True, False, True),
        ("gelu", True, True, False),
        ("silu", True, True, True),
        ("relu", False, True, True),
        ("gelu", False, True, True),
        ("gelu_tanh", False, False, False),
        ("relu2", False, False, True),
        ("silu", False, True, False),
    ],
)
def test_activations_and_biases_of_few_tokens(
    activation: str, gated: bool, bias: bool, normed: bool, device: str, num_sms: int
) -> None:
    check_first_of_mlp(5, 64, 48, activation, gated, bias, normed, FP16, TINY, device, num_sms)


@pytest.mark.parametrize(("tokens", "config"), TILED)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.usefixtures("large")
def test_activations_and_biases(
    activation: str, gated: bool, tokens: int, config: GemmConfig | None, device: str, num_sms: int
) -> None:
    check_first_of_mlp(tokens, 1024, 1208, activation, gated, True, True, BF16, config, device, num_sms)
    if activation == "relu":
        check_first_of_mlp(tokens, 512, 1024, activation, gated, False, False, FP16, config, device, num_sms)


def check_residual(
    tokens: int, hidden: int, k: int, bias: bool, post: bool, centred: bool, dtype: torch.dtype,
    config: GemmConfig | None, device: str, num_sms: int,
) -> None:  # fmt: skip
    a = random(tokens, k, dtype=dtype, device=device)
    w = random(hidden, k, dtype=dtype, device=device, scale=k**-0.5)
    x = random(tokens, hidden, dtype=dtype, device=device) + 0.75
    b = random(hidden, dtype=dtype, device=device) if bias else None
    norm = torch.rand(hidden, device=device) + 0.5 if post else None
    want, _ = reference.residual_project(
        a.float(), w.float(), x.float(), post_norm=norm, bias=None if b is None else b.float(), eps=EPS
    )
    scratch = projections.sumsq_buffer(hidden, tokens, device).fill_(float("nan"))
    raw = torch.full((tokens, hidden), float("nan"), dtype=dtype, device=device)
    out, sums = projections.residual_project(
        a, w, x, out=x, sumsq=scratch, post_norm=norm, bias=b, eps=EPS, centred=centred, raw=raw,
        **options(device, num_sms, config),
    )  # fmt: skip
    assert error(out, want) < 4e-3
    assert error(sums.sum(0), reference.row_sumsq(out, centred)) < 1e-5
    if centred or post:
        assert len(sums) == 1


@pytest.mark.parametrize(
    ("bias", "post", "centred"),
    [(True, False, False), (True, False, True), (False, False, True), (False, True, False), (True, True, True)],
)
def test_sums_of_few_tokens(bias: bool, post: bool, centred: bool, device: str, num_sms: int) -> None:
    check_residual(5, 128, 64, bias, post, centred, FP16, TINY, device, num_sms)


@pytest.mark.parametrize(("tokens", "config"), TILED)
@pytest.mark.parametrize(("bias", "post", "centred"), [(True, False, True), (False, True, False), (True, False, False)])
@pytest.mark.usefixtures("large")
def test_sums(
    bias: bool, post: bool, centred: bool, tokens: int, config: GemmConfig | None, device: str, num_sms: int
) -> None:
    check_residual(tokens, 3584, 1024, bias, post, centred, BF16, config, device, num_sms)
    check_residual(tokens, 776, 512, bias, post, centred, FP16, config, device, num_sms)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "bias", "norm", "normed"),
    [
        (3, 1, 80, True, "", True),
        (2, 2, 96, False, "head", True),
        (4, 2, 16, True, "head", False),
        (3, 3, 32, True, "projection", False),
        (2, 1, 128, False, "projection", True),
    ],
)
def test_heads_that_are_not_fused_with_their_projection(
    heads: int, kv_heads: int, d: int, bias: bool, norm: str, normed: bool, device: str, num_sms: int
) -> None:
    check_qkv(5, heads, kv_heads, d, 16, 64, FP16, bias, norm, TINY, device, num_sms, normed=normed)


@pytest.mark.parametrize(("tokens", "config"), TILED)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "norm"),
    [(16, 8, 256, "head"), (32, 32, 96, ""), (32, 32, 80, ""), (40, 8, 128, "projection"), (12, 3, 192, "head")],
)
@pytest.mark.usefixtures("large")
def test_other_heads(
    heads: int, kv_heads: int, d: int, norm: str, tokens: int, config: GemmConfig | None, device: str, num_sms: int
) -> None:
    check_qkv(tokens, heads, kv_heads, d, 64, 1024, BF16, tokens == 40, norm, config, device, num_sms)


@pytest.mark.parametrize("hidden", [96, 2056])
@pytest.mark.parametrize("centred", [False, True])
def test_embedding_with_scale_and_positions(hidden: int, centred: bool, device: str) -> None:
    table = random(50, hidden, dtype=FP16, device=device)
    ids = torch.randint(0, 50, (6,), device=device)
    places = random(20, hidden, dtype=FP16, device=device)
    at = torch.randint(0, 20, (6,), device=device, dtype=torch.int32)
    for scale, rows_of_places in ((1.0, places), (7.3, None), (3.1, places)):
        x, sums = embedding.embed(
            ids, table, scale=scale, position_table=rows_of_places, positions=at, centred=centred,
            out=torch.empty(6, hidden, dtype=FP16, device=device),
            sumsq=projections.sumsq_buffer(hidden, 6, device),
        )  # fmt: skip
        want, squares = reference.embed(
            ids, table, scale=scale, position_table=rows_of_places, positions=at.long(), centred=centred
        )
        assert torch.equal(x, want)
        assert error(sums[0], squares) < 1e-5


@pytest.mark.parametrize(("vocabulary", "config"), [(199, TINY), (203, None)])
def test_logits_after_a_layer_norm_with_bias_scale_and_soft_cap(
    vocabulary: int, config: GemmConfig | None, device: str, num_sms: int
) -> None:
    hidden = 96
    x = random(5, hidden, dtype=FP16, device=device) + 2
    norm, shift = torch.rand(hidden, device=device) + 0.5, torch.randn(hidden, device=device)
    head = random(vocabulary, hidden, dtype=FP16, device=device, scale=0.2)
    bias = random(vocabulary, dtype=FP16, device=device)
    picked = torch.tensor([4, 0, 2], device=device)
    sums = rows.row_sumsq(x, out=torch.empty(1, 5, device=device), centred=True)
    h = embedding.final_norm(
        x, sums, picked, norm, EPS, norm_bias=shift, centred=True, out=torch.empty(3, hidden, dtype=FP16, device=device)
    )
    logits = torch.full((3, -(-vocabulary // 4) * 4), float("nan"), device=device)[:, :vocabulary]
    gemm.matmul(h, head, logits, bias=bias, factor=0.5, softcap=3.0, **options(device, num_sms, config))
    want = reference.lm_head(
        x[picked].float(), sums[0, picked], norm, head.float(), EPS, norm_bias=shift, centred=True, bias=bias.float(),
        scale=0.5, softcap=3.0,
    )  # fmt: skip
    assert error(logits, want) < 4e-3
