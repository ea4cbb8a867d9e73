"""The kernels of experts against their references: routers of all kinds, and the GEMMs at any imbalance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from weft.kernels.experts import experts, router
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.reference import experts as experts_reference
from weft.kernels.reference import layer as reference

EPS = 1e-5
TINY = GemmConfig(16, 64, 64, 3, 4, 2, 1, True, 2, 1)
SQUARE = GemmConfig(64, 64, 64, 3, 4, 8, 1, False, 1, 1)
TALL = GemmConfig(128, 128, 64, 4, 8, 8, 1, False, 1, 2)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def live(tokens: int, device: str) -> Tensor:
    return torch.tensor([tokens], dtype=torch.int32, device=device)


def routed(
    x: Tensor, weight: Tensor, kind: str, top: int, tokens: int, parts: int = 4, **options: Any
) -> tuple[router.Choice, experts_reference.Routing, Tensor]:  # fmt: skip
    """The choice for the first `tokens` rows of x, the reference's choice, and partial sums of squares of all rows."""
    sumsq = x.float().square().view(len(x), parts, -1).sum(-1).t().contiguous()
    out = router.choice_buffers(len(x), x.shape[1], len(weight), top, x.device)
    for tensor in out:
        tensor.fill_(77)
    got = router.route(
        x, sumsq, weight, EPS, kind=kind, top=top, out=out, num_tokens=live(tokens, str(x.device)), **options
    )
    want = experts_reference.route(x[:tokens], sumsq.sum(0)[:tokens], weight, EPS, kind=kind, top=top, **options)
    return got, want, sumsq


def data(tokens: int, hidden: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x = torch.randn(tokens, hidden, device=device).to(dtype) * 3
    return x, torch.randn(count, hidden, device=device) * 2 / hidden**0.5


ROUTERS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("softmax", 8, 2, {"normalise": True}),
    ("softmax", 6, 3, {"normalise": False, "scaling": 2.5}),
    ("top_softmax", 12, 4, {"normalise": True, "bias": True}),
    ("sigmoid", 16, 3, {"normalise": True, "choice_bias": True, "groups": 4, "top_groups": 2, "scaling": 1.5}),
    ("sigmoid", 8, 8, {"normalise": True}),
    ("softmax", 6, 2, {"normalise": False, "choice_bias": True, "groups": 3, "top_groups": 1}),
]


@pytest.mark.parametrize(("kind", "count", "top", "options"), ROUTERS)
def test_every_kind_of_router(kind: str, count: int, top: int, options: dict[str, Any], device: str) -> None:
    tokens, hidden = 70, 320
    x, weight = data(tokens, hidden, count, device)
    biases = {name: torch.randn(count, device=device) for name in ("bias", "choice_bias") if options.get(name)}
    got, want, _ = routed(x, weight, kind, top, 67, **{**options, **biases})
    assert torch.equal(got.experts[:67].long().sort()[0], want.experts.sort()[0])
    assert error(got.weights[:67].gather(1, got.experts[:67].long().argsort()), want.weights.gather(
        1, want.experts.argsort())) < 1e-5  # fmt: skip
    assert got.counts.sum(0).tolist() == want.counts
    # a token's place among those of its tile that use the same expert
    for first in range(0, 67, router.TILE):
        own = got.experts[first : min(67, first + router.TILE)]
        for e in range(count):
            taken = got.rank[first : first + len(own)][own == e]
            assert taken.tolist() == list(range(len(taken)))


def test_logits_without_numbers_choose_different_experts(device: str) -> None:
    x, weight = data(3, 64, 6, device)
    x[1] = float("nan")
    sumsq = x.float().square().sum(1)[None]
    out = router.choice_buffers(3, 64, 6, 4, device)
    router.route(x, sumsq, weight, EPS, kind="softmax", top=4, normalise=True, out=out)
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < 6 for row in out.experts.tolist())


@pytest.mark.parametrize("count", [128, 256])
@pytest.mark.usefixtures("large")
def test_many_experts_are_chosen_as_in_float32(count: int, device: str) -> None:
    x, weight = data(700, 2048, count, device)
    got, want, _ = routed(x, weight, "softmax", 8, 700, normalise=True)
    same = (got.experts.long().sort()[0] == want.experts.sort()[0]).all(1)
    assert same.float().mean() > 0.99
    assert error(got.weights.sort()[0][same], want.weights.sort()[0][same]) < 1e-4


def check(
    tokens: int, room: int, hidden: int, inter: int, count: int, top: int, config: GemmConfig | None, device: str,
    num_sms: int, *, oai: bool = False, only: int | None = None,
) -> Tensor:  # fmt: skip
    """`tokens` of `room` rows through a layer of experts. only: the router sends all tokens to these first ones."""
    x, weight = data(room, hidden, count, device)
    dtype = x.dtype
    gate_up = (torch.randn(count, 2 * inter, hidden, device=device) / hidden**0.5).to(dtype)
    down = (torch.randn(count, hidden, inter, device=device) / inter**0.5).to(dtype)
    biases: list[Tensor | None] = [None, None]
    if oai:
        biases = [torch.randn(count, n, device=device).to(dtype) for n in (2 * inter, hidden)]
    options: dict[str, Any] = {"normalise": True}
    if only is not None:
        options["bias"] = torch.where(torch.arange(count, device=device) < only, 40.0, 0.0)
    choice, routing, sumsq = routed(x, weight, "top_softmax", top, tokens, **options)
    activation = "swiglu_oai" if oai else "silu"
    space = experts.expert_space(room, hidden, inter, count, top, dtype, device)
    space.rows.fill_(float("nan"))
    space.hidden.fill_(float("nan"))
    launch: dict[str, Any] = {
        "space": space, "num_sms": num_sms, "num_tokens": live(tokens, device), "config": config,
    }  # fmt: skip
    out, sums = torch.full_like(x, float("nan")), torch.full((2, room), float("nan"), device=device)
    experts.experts_gate_up(x, sumsq, choice, gate_up, EPS, activation=activation, bias=biases[0], **launch)
    got, squares = experts.experts_residual(choice, down, x, bias=biases[1], out=out, sumsq=sums, **launch)
    assert got.data_ptr() == out.data_ptr()
    assert out[tokens:].isnan().all()
    if not tokens:
        return out[:0]
    # The reference in float32, with the kernel's choice: near ties may go either way.
    flat = choice.experts[:tokens].long().flatten()
    mine = experts_reference.Routing(
        choice.experts[:tokens].long(), choice.weights[:tokens], torch.argsort(flat, stable=True),
        torch.bincount(flat, minlength=count).tolist(),
    )  # fmt: skip
    real = x[:tokens].float()
    h = experts_reference.experts_gate_up(
        real, sumsq.sum(0)[:tokens], mine, gate_up.float(), EPS, activation=activation,
        bias=None if biases[0] is None else biases[0].float(),
    )  # fmt: skip
    want, _ = experts_reference.experts_residual(
        h, mine, down.float(), real, bias=None if biases[1] is None else biases[1].float()
    )
    if only is not None:
        assert sum(mine.counts[:only]) == sum(routing.counts) == tokens * top
    assert error(out[:tokens], want) < 6e-3
    assert error(squares[0, :tokens], out[:tokens].float().square().sum(-1)) < 1e-5
    return out[:tokens]


@pytest.mark.parametrize(
    ("tokens", "room", "count", "top", "oai", "only"),
    [
        (40, 64, 4, 2, False, None),
        (1, 1, 8, 2, True, None),  # experts without a token
        (37, 40, 6, 3, True, 3),  # all tokens on as many experts as each takes
        (0, 16, 4, 2, False, None),
        (35, 40, 5, 1, False, 1),  # all on one
    ],
)
def test_a_layer_of_experts(
    tokens: int, room: int, count: int, top: int, oai: bool, only: int | None, device: str, num_sms: int
) -> None:
    check(tokens, room, 128, 96, count, top, TINY, device, num_sms, oai=oai, only=only)


def test_tall_tiles_give_the_same(device: str, num_sms: int) -> None:
    check(150, 150, 128, 64, 3, 2, SQUARE, device, num_sms)


@pytest.mark.parametrize("config", [TINY, SQUARE, TALL, SPECIAL, SPECIAL._replace(stages=3), None])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inter", "count", "top", "oai", "only"),
    [
        (1, 2048, 768, 128, 8, False, None),
        (17, 2048, 768, 128, 8, False, None),
        (333, 2048, 768, 128, 8, False, None),
        (2048, 2048, 768, 64, 8, False, None),
        (700, 1024, 3584, 8, 2, False, None),
        (700, 1024, 3584, 8, 2, False, 2),
        (300, 2880, 2880, 8, 4, True, None),
        (129, 2880, 2880, 8, 4, True, 4),
        (65, 448, 1096, 5, 1, False, 1),
    ],
)
@pytest.mark.usefixtures("large")
def test_layers_of_experts(
    tokens: int, hidden: int, inter: int, count: int, top: int, oai: bool, only: int | None, config: GemmConfig | None,
    device: str, num_sms: int,
) -> None:  # fmt: skip
    check(tokens, tokens + 9, hidden, inter, count, top, config, device, num_sms, oai=oai, only=only)


@pytest.mark.usefixtures("large")
def test_a_row_is_the_same_to_the_bit_for_any_tiles_and_neighbours(device: str, num_sms: int) -> None:
    outs = []
    for config in (TINY, TALL, SPECIAL, SPECIAL._replace(stages=3, group=2)):
        torch.manual_seed(3)
        outs.append(check(500, 500, 1024, 768, 16, 4, config, device, num_sms))
    for other in outs[1:]:
        assert torch.equal(outs[0], other)
    torch.manual_seed(3)
    assert torch.equal(check(70, 500, 1024, 768, 16, 4, SPECIAL, device, num_sms), outs[0][:70])


def test_the_gate_of_a_shared_expert(device: str) -> None:
    x, gate = data(5, 192, 1, device)
    h = torch.randn(5, 80, device=device).to(x.dtype)
    sumsq = x.float().square().view(5, 3, -1).sum(-1).t().contiguous()
    want = h.float() * torch.sigmoid(reference.normed(x.float(), sumsq.sum(0), EPS) @ gate.t())
    got = experts.gate_shared(x, sumsq, gate.to(x.dtype), EPS, out=h.clone())
    assert error(got, want) < 4e-3
