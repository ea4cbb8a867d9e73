"""The FP8 kernels of a layer of experts against their references, at any imbalance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import reference_fp8_experts as fp8_experts_reference

from weft.kernels.experts import fp8_experts, router
from weft.kernels.experts.fp8_experts import SPECIAL
from weft.kernels.formats import fp8
from weft.kernels.formats.fp8 import Fp8Rows, Fp8Weight
from weft.kernels.matmul import fp8_projections
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.reference import experts as experts_reference
from weft.kernels.reference import layer as reference
from weft.tools.kernels.fp8_operands import quantize_weight_blocks, row_values

pytestmark = pytest.mark.usefixtures("rounded")

EPS = 1e-5
FEW = GemmConfig(16, 128, 128, 4, 8, 2, swap=True)
SOME = GemmConfig(64, 128, 128, 3, 8, swap=True)
MANY = GemmConfig(128, 128, 128, 3, 8)


def error(got: Tensor, want: Tensor) -> float:
    """Relative error by norm; NaN never passes a comparison."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def live(tokens: int, device: str) -> Tensor:
    return torch.tensor([tokens], dtype=torch.int32, device=device)


def matrices(count: int, out: int, inner: int, blocked: bool, device: str) -> Fp8Weight:
    made = []
    for _ in range(count):
        w = torch.randn(out, inner, device=device) / inner**0.5
        own = (quantize_weight_blocks if blocked else fp8.quantize_weight)(w)
        made.append(own._replace(scale=fp8.by_row(own.scale, out)) if blocked else own)
    return Fp8Weight(*(torch.stack(parts) for parts in zip(*made, strict=True)))


def stream(room: int, hidden: int, device: str) -> tuple[Tensor, Tensor, Tensor, Fp8Rows]:
    """x with outlier channels, its partial sums of squares, a norm's weight and the operand made from both."""
    x = torch.randn(room, hidden, device=device) * 3
    x[:, 3] *= 20
    x = x.to(torch.bfloat16 if device == "cuda" else torch.float16)
    squares = x.float().square().sum(-1)
    norm = torch.rand(hidden, device=device) + 0.5
    return x, torch.stack((squares * 0.25, squares * 0.75)), norm, fp8.quantize_rows(x, norm)


def rows_of(h: Fp8Rows, at: Tensor) -> Fp8Rows:
    return Fp8Rows(h.values.view(torch.uint8)[at].view(fp8.E4M3), h.scale[:, at])


def check(
    tokens: int, room: int, hidden: int, inter: int, count: int, top: int, config: GemmConfig | None, device: str,
    num_sms: int, *, oai: bool = False, only: int | None = None, blocked: bool = False,
) -> tuple[Tensor, Fp8Rows]:  # fmt: skip
    """`tokens` of `room` rows through a layer of experts. only: the router sends all tokens to these first ones."""
    x, sumsq, _, operand = stream(room, hidden, device)
    # gate and up have their own blocks, whose rows then alternate
    halves = [matrices(count, inter, hidden, blocked, device) for _ in range(2)]
    gate_up = Fp8Weight(*(torch.stack(pair, 2).flatten(1, 2) for pair in zip(*halves, strict=True)))
    down = matrices(count, hidden, inter, blocked, device)
    biases: list[Tensor | None] = [None, None]
    if oai:
        biases = [torch.randn(count, n, device=device).to(x.dtype) for n in (2 * inter, hidden)]
    weight = torch.randn(count, hidden, device=device) / hidden**0.5
    bias = None if only is None else torch.where(torch.arange(count, device=device) < only, 40.0, 0.0)
    choice = router.choice_buffers(room, hidden, count, top, device)
    router.route(x, sumsq, weight, EPS, kind="top_softmax", top=top, normalise=True, bias=bias, out=choice,
                 num_tokens=live(tokens, device))  # fmt: skip
    space = fp8_experts.expert_space(room, hidden, inter, count, top, x.dtype, device)
    for rows in (space.rows, space.hidden):
        rows.values.view(torch.uint8).fill_(127)  # NaN
        rows.scale.fill_(float("nan"))
    space.outputs.fill_(float("nan"))
    space.factor.fill_(float("nan"))
    launch: dict[str, Any] = {
        "space": space, "num_sms": num_sms, "num_tokens": live(tokens, device), "config": config,
    }  # fmt: skip
    activation = "swiglu_oai" if oai else "silu"
    out, sums = torch.full_like(x, float("nan")), torch.full((2, room), float("nan"), device=device)
    following, next_norm = fp8_projections.rows_buffer(room, hidden, device), torch.rand(hidden, device=device) + 0.5
    h = fp8_experts.experts_gate_up(
        operand, sumsq, choice, gate_up, EPS, activation=activation, bias=biases[0], **launch
    )
    got, squares = fp8_experts.experts_residual(
        choice, down, x, bias=biases[1], out=out, sumsq=sums, quantized=following, next_norm=next_norm, **launch
    )
    assert got.data_ptr() == out.data_ptr()
    assert out[tokens:].isnan().all()
    if not tokens:
        return out[:0], following
    # the reference with the kernel's choice: near ties may go either way
    flat = choice.experts[:tokens].long().flatten()
    mine = experts_reference.Routing(
        choice.experts[:tokens].long(), choice.weights[:tokens], torch.argsort(flat, stable=True),
        torch.bincount(flat, minlength=count).tolist(),
    )  # fmt: skip
    if only is not None:
        assert sum(mine.counts[:only]) == tokens * top
    real = Fp8Rows(operand.values[:tokens], operand.scale[:, :tokens])
    want_h = fp8_experts_reference.experts_gate_up(
        real, sumsq.sum(0)[:tokens], mine, gate_up, EPS, activation=activation, bias=biases[0]
    )  # fmt: skip
    place = space.place[:tokens].long().flatten()[mine.order]
    here = rows_of(h, place)
    assert error(row_values(here), row_values(want_h)) < 0.02
    same = here.values.view(torch.uint8) == want_h.values.view(torch.uint8)
    assert float(same.float().mean()) > 0.98  # sums that were rounded the other way are one step off
    assert float((here.scale == want_h.scale).float().mean()) > 0.98
    # after it, from the kernel's hidden part: otherwise a value rounded the other way counts twice
    want, _, wanted = fp8_experts_reference.experts_residual(
        here, mine, down, x[:tokens], bias=biases[1], next_norm=next_norm
    )
    assert error(out[:tokens], want) < 3e-3
    assert error(squares[0, :tokens], out[:tokens].float().square().sum(-1)) < 1e-5
    left = Fp8Rows(following.values[:tokens], following.scale[:, :tokens])
    exact = fp8.quantize_rows(out[:tokens], next_norm)
    assert torch.equal(left.values.view(torch.uint8), exact.values.view(torch.uint8))
    assert torch.equal(left.scale, exact.scale)
    assert error(row_values(left), row_values(wanted)) < 0.02
    return out[:tokens], left


@pytest.mark.parametrize(
    ("tokens", "room", "count", "top", "oai", "only", "blocked"),
    [
        (20, 24, 4, 2, False, None, False),
        (1, 1, 8, 2, True, None, True),  # experts without a token
        (13, 16, 6, 3, True, 3, False),  # all tokens on as many experts as each takes
        (0, 16, 4, 2, False, None, False),
        (19, 20, 5, 1, False, 1, True),  # all on one
    ],
)
def test_a_layer_of_experts(
    tokens: int, room: int, count: int, top: int, oai: bool, only: int | None, blocked: bool, device: str, num_sms: int
) -> None:
    """Widths of a block and a half: after an expert's features come the next one's."""
    check(tokens, room, 192, 80, count, top, FEW, device, num_sms, oai=oai, only=only, blocked=blocked)


def test_tall_tiles_give_the_same(device: str, num_sms: int) -> None:
    check(70, 72, 128, 64, 2, 1, MANY, device, num_sms)


@pytest.mark.parametrize("blocked", [False, True], ids=["channels", "blocks"])
@pytest.mark.parametrize(
    "config", [FEW, SOME, MANY, SPECIAL, SPECIAL._replace(features=128), None],
    ids=["few", "some", "many", "special", "narrow", "chosen"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("tokens", "hidden", "inter", "count", "top", "oai", "only"),
    [
        (1, 2048, 768, 128, 8, False, None),
        (17, 2048, 768, 128, 8, False, None),
        (333, 2048, 768, 128, 8, False, None),
        (2048, 2048, 768, 64, 8, False, None),
        (700, 1024, 3584, 8, 2, False, 2),
        (300, 2880, 2880, 8, 4, True, None),
        (129, 2880, 2880, 8, 4, True, 4),
        (65, 448, 1104, 5, 1, False, 1),
    ],
)
@pytest.mark.usefixtures("large")
def test_layers_of_experts(
    tokens: int, hidden: int, inter: int, count: int, top: int, oai: bool, only: int | None, config: GemmConfig | None,
    blocked: bool, device: str, num_sms: int,
) -> None:  # fmt: skip
    if blocked and config is not None and config.special:
        config = config._replace(features=128)
    check(
        tokens, tokens + 9, hidden, inter, count, top, config, device, num_sms, oai=oai, only=only, blocked=blocked
    )  # fmt: skip


@pytest.mark.usefixtures("large")
def test_a_row_is_the_same_to_the_bit_for_any_neighbours(device: str, num_sms: int) -> None:
    for config in (FEW, SPECIAL):
        torch.manual_seed(3)
        whole, left = check(500, 500, 1024, 768, 16, 4, config, device, num_sms)
        torch.manual_seed(3)
        some, own = check(70, 500, 1024, 768, 16, 4, config, device, num_sms)
        assert torch.equal(some, whole[:70])
        assert torch.equal(own.scale, left.scale[:, :70])


@pytest.mark.parametrize("inter", [80, 272])
def test_the_gate_of_a_shared_expert(inter: int, device: str) -> None:
    x, sumsq, _, _ = stream(5, 192, device)
    gate = torch.randn(1, 192, device=device).to(x.dtype) / 14
    h = fp8.quantize_rows(torch.randn(5, inter, device=device))
    want = fp8_experts_reference.gate_shared(h, x, sumsq.sum(0), gate, EPS)
    got = fp8_experts.gate_shared(
        x, sumsq, gate, EPS, out=Fp8Rows(h.values, h.scale.clone()), num_tokens=live(4, device)
    )
    assert error(got.scale[:, :4], want.scale[:, :4]) < 1e-5
    assert torch.equal(got.scale[:, 4], h.scale[:, 4])
    hidden = row_values(h) * torch.sigmoid(reference.normed(x.float(), sumsq.sum(0), EPS) @ gate.float().t())
    assert error(row_values(want), hidden) < 1e-5
