"""Recurrent states in plain torch: equal to transformers' functions, and the same bits however a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from weft.kernels.reference import states
from weft.kernels.reference.states import StateWork, plan_states

Tokens = dict[str, Tensor]  # What a layer computes from, `[T, ...]` each.
Layer = Callable[[Tokens, Tensor, StateWork], tuple[Tensor, Tensor]]
LENGTHS = (150, 1, 64, 3, 65, 2)
KERNEL = 4
CHANNELS = 16
"""a multiple of a processor's vectors, as in models: torch computes what is left over with another exp"""
HEADS, KEY_HEADS, KEY, VALUE = 6, 3, 16, 8
GROUPS, WIDTH, SIZE = 3, 8, 16  # Mamba-2


SEEDED = torch.Generator().manual_seed(5)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def delta_tokens(count: int) -> Tokens:
    q, k = (states.l2_norm(torch.randn(count, KEY_HEADS, KEY)) for _ in range(2))
    g, beta = states.delta_gates(
        torch.randn(count, HEADS), torch.randn(count, HEADS), torch.rand(HEADS).log(), torch.ones(HEADS)
    )
    return {"q": q, "k": k, "v": torch.randn(count, HEADS, VALUE), "g": g, "beta": beta}


def delta(tokens: Tokens, state: Tensor, work: StateWork) -> tuple[Tensor, Tensor]:
    return states.delta_rule_scan(**tokens, state=state, work=work)


A, D = -torch.rand(HEADS, generator=SEEDED) - 0.1, torch.rand(HEADS, generator=SEEDED)


def ssd_tokens(count: int) -> Tokens:
    dt = states.time_steps(torch.randn(count, HEADS), torch.zeros(HEADS))
    b, c = (torch.randn(count, GROUPS, SIZE) for _ in range(2))
    return {"x": torch.randn(count, HEADS, WIDTH), "dt": dt, "b": b, "c": c}


def ssd(tokens: Tokens, state: Tensor, work: StateWork) -> tuple[Tensor, Tensor]:
    return states.ssd_scan(**tokens, a=A, d=D, state=state, work=work)


WEIGHT, BIAS = torch.randn(CHANNELS, KERNEL, generator=SEEDED), torch.randn(CHANNELS, generator=SEEDED)


def conv_tokens(count: int) -> Tokens:
    return {"x": torch.randn(count, CHANNELS)}


def conv(tokens: Tokens, state: Tensor, work: StateWork) -> tuple[Tensor, Tensor]:
    return states.causal_conv(tokens["x"], WEIGHT, BIAS, state, work)


LAYERS: dict[str, tuple[Callable[[int], Tokens], Layer, tuple[int, ...]]] = {
    "conv": (conv_tokens, conv, (CHANNELS, KERNEL - 1)),
    "delta": (delta_tokens, delta, (HEADS, KEY, VALUE)),
    "ssd": (ssd_tokens, ssd, (HEADS, WIDTH, SIZE)),
}
parametrized = pytest.mark.parametrize(("make", "layer", "shape"), LAYERS.values(), ids=LAYERS)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("from_zero", [True, False])
def test_the_delta_rule_equals_transformers(from_zero: bool) -> None:
    state = torch.randn(len(LENGTHS), HEADS, KEY, VALUE) * (not from_zero)
    tokens = delta_tokens(sum(LENGTHS))
    y, after = delta(tokens, state, plan_states(np.array(LENGTHS), np.zeros(len(LENGTHS), np.int64)))
    for i, (at, length) in enumerate(zip(np.cumsum((0, *LENGTHS)), LENGTHS, strict=False)):
        own = [t[None, at : at + length] for t in tokens.values()]
        for function in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
            expected, last = function(*own, initial_state=state[i : i + 1], output_final_state=True)
            close(y[at : at + length], expected[0])
            close(after[i], last[0])


def test_a_step_of_the_delta_rule_equals_transformers() -> None:
    tokens, state = delta_tokens(5), torch.randn(5, HEADS, KEY, VALUE)
    expected, last = qwen.torch_recurrent_gated_delta_rule(
        *(t[:, None] for t in tokens.values()), initial_state=state, output_final_state=True
    )
    y, after = states.delta_rule_step(**tokens, state=state)
    close(y, expected[:, 0])
    close(after, last)


def test_mamba_2_equals_transformers() -> None:
    state = torch.randn(len(LENGTHS), HEADS, WIDTH, SIZE)
    tokens = ssd_tokens(sum(LENGTHS))
    y, after = ssd(tokens, state, plan_states(np.array(LENGTHS), np.zeros(len(LENGTHS), np.int64)))
    for i, (at, length) in enumerate(zip(np.cumsum((0, *LENGTHS)), LENGTHS, strict=False)):
        x, dt, b, c = (t[None, at : at + length] for t in tokens.values())
        expected, last = nemotron.mamba2_chunk_scan(
            x, dt, A, b, c, chunk_size=32, D=D, initial_states=state[i : i + 1], return_final_states=True
        )
        close(y[at : at + length], expected[0])
        close(after[i], last[0])


def test_a_step_of_mamba_2_equals_transformers() -> None:
    state, dt, dt_bias = torch.randn(5, HEADS, WIDTH, SIZE), torch.randn(5, HEADS), torch.randn(HEADS)
    tokens = ssd_tokens(5) | {"dt": states.time_steps(dt, dt_bias)}
    after = state.clone()
    expected = nemotron.mamba2_selective_state_update(
        after, tokens["x"], dt[..., None].expand(-1, -1, WIDTH), A[:, None, None].expand(-1, WIDTH, SIZE), tokens["b"],
        tokens["c"], D[:, None].expand(-1, WIDTH), dt_bias=dt_bias[:, None].expand(-1, WIDTH), dt_softplus=True,
    )  # fmt: skip
    y, own = states.ssd_step(**tokens, a=A, d=D, state=state)
    close(y, expected)
    close(own, after)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_convolution_equals_transformers(activation: str | None) -> None:
    """Including requests shorter than the convolution."""
    x, state = torch.randn(sum(LENGTHS), CHANNELS), torch.randn(len(LENGTHS), CHANNELS, KERNEL - 1)
    work = plan_states(np.array(LENGTHS), np.zeros(len(LENGTHS), np.int64))
    y, after = states.causal_conv(x, WEIGHT, BIAS, state, work, activation=activation)
    for i, (at, length) in enumerate(zip(np.cumsum((0, *LENGTHS)), LENGTHS, strict=False)):
        line = torch.cat((state[i], x[at : at + length].T), -1)
        expected = F.conv1d(line[None], WEIGHT[:, None], BIAS, groups=CHANNELS)[0].T
        close(y[at : at + length], F.silu(expected) if activation else expected)
        assert torch.equal(after[i], line[:, 1 - KERNEL :])


def test_the_gated_norm_equals_transformers() -> None:
    x, z, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    head = qwen.Qwen3NextRMSNormGated(8)
    head.weight.data = weight[:8]
    expected = head(x.view(-1, 8), z.view(-1, 8)).view(5, 24)
    close(states.gated_norm(x, z, weight[:8], 1e-6, groups=3, norm_first=True), expected)
    after = nemotron.NemotronHRMSNormGated(24, 8)
    after.weight.data = weight
    close(states.gated_norm(x, z, weight, 1e-6, groups=3, norm_first=False), after(x, z))
    before = FalconH1RMSNormGated(24, n_groups=3)
    before.weight.data = weight
    close(states.gated_norm(x, z, weight, 1e-6, groups=3, norm_first=True), before(x, z))


@parametrized
def test_cuts_at_blocks_and_other_requests_change_no_bit(
    make: Callable[[int], Tokens], layer: Layer, shape: tuple[int, ...]
) -> None:
    """One request of 200 tokens alone in one piece, and in three pieces next to other requests."""
    tokens, state = make(200), torch.randn(1, *shape)
    y, after = layer(tokens, state, plan_states(np.array([200]), np.array([0])))
    carried = state
    for begin, end in ((0, 64), (64, 192), (192, 200)):
        others = make(70)
        mixed = {name: torch.cat((others[name][:67], t[begin:end], others[name][67:])) for name, t in tokens.items()}
        work = plan_states(np.array([67, end - begin, 3]), np.array([5, begin, 0]))
        part, ends = layer(mixed, torch.cat((torch.randn(1, *shape), carried, torch.randn(1, *shape))), work)
        assert torch.equal(part[67 : 67 + end - begin], y[begin:end])
        carried = ends[1:2]
    assert torch.equal(carried, after)


@parametrized
def test_a_checkpoint_is_the_state_there_and_changes_no_bit(
    make: Callable[[int], Tokens], layer: Layer, shape: tuple[int, ...]
) -> None:
    tokens, state, first = make(330), torch.randn(3, *shape), np.array([16, 0, 48])
    lengths, rows, ends = np.array([176, 1, 153]), np.array([0, 0, 0, 1, 2, 2]), np.array([48, 80, 176, 1, 16, 144])
    plain, last = layer(tokens, state, plan_states(lengths, first))
    y, after = layer(tokens, state, plan_states(lengths, first, rows, ends))
    assert torch.equal(y, plain)
    assert torch.equal(after[:3], last)
    starts = np.cumsum(lengths) - lengths
    for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
        own = {name: t[starts[row] : starts[row] + end] for name, t in tokens.items()}
        _, expected = layer(own, state[row : row + 1], plan_states(np.array([end]), first[row : row + 1]))
        if (first[row] + end) % states.BLOCK and end > 1:
            close(after[3 + i], expected[0], 1e-6)
        else:
            assert torch.equal(after[3 + i], expected[0])


@parametrized
def test_steps_lead_to_the_state_of_a_scan(make: Callable[[int], Tokens], layer: Layer, shape: tuple[int, ...]) -> None:
    tokens, state = make(70), torch.randn(1, *shape)
    y, after = layer(tokens, state, plan_states(np.array([70]), np.array([0])))
    step = {
        "conv": lambda now, state: conv(now, state, plan_states(np.array([1]), np.array([0]))),
        "delta": lambda now, state: states.delta_rule_step(**now, state=state),
        "ssd": lambda now, state: states.ssd_step(**now, a=A, d=D, state=state),
    }[next(name for name, of in LAYERS.items() if of[1] is layer)]
    for t in range(70):
        part, state = step({name: x[t : t + 1] for name, x in tokens.items()}, state)
        assert (part[0] - y[t]).abs().max() <= 1e-5 * y.abs().max()
    close(state, after)


def test_nothing_at_all_is_no_work() -> None:
    none = np.zeros(0, np.int64)
    for make, layer, shape in LAYERS.values():
        y, after = layer(make(0), torch.zeros(0, *shape), plan_states(none, none))
        assert not y.numel()
        assert not after.numel()
