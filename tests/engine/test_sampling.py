"""Sampling fields follow the HTTP contract, and a request's draw depends only on its seed and index."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from weft.engine.errors import RequestError
from weft.engine.runner.iteration.batch import PROMPT_LOGPROB_ROWS, uniform_draw
from weft.engine.wire.sampling import SamplingParams
from weft.kernels.reference import sampling

VOCAB = 50


def _draw_many(logits: torch.Tensor, draws: int, **params: float) -> torch.Tensor:
    """Frequencies of tokens over evenly spread uniforms: the exact distribution, up to 1/draws."""
    uniform = (torch.arange(draws) + 0.5) / draws
    rows = {
        "temperature": torch.full((draws,), params.get("temperature", 1.0)),
        "top_k": torch.full((draws,), int(params.get("top_k", 0)), dtype=torch.int32),
        "top_p": torch.full((draws,), params.get("top_p", 1.0)),
        "min_p": torch.full((draws,), params.get("min_p", 0.0)),
    }
    tokens = sampling.sample(logits.expand(draws, -1).clone(), **rows, uniform=uniform)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.5}, []),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"top_k": 9, "top_p": 0.8, "temperature": 1.3}, [TopKLogitsWarper(9), TopPLogitsWarper(0.8)]),
    ],
)
def test_distribution_equals_that_of_transformers(params: dict, warpers: list) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    expected = logits / params.get("temperature", 1.0)
    for warper in warpers:
        expected = warper(torch.zeros(1, 0, dtype=torch.int64), expected)
    got = _draw_many(logits[0], 20_000, **params)
    assert (got - expected.softmax(-1)[0]).abs().max() < 1e-3


def test_temperature_zero_is_the_best_token() -> None:
    logits = torch.randn(8, VOCAB)
    zero, one = torch.zeros(8), torch.ones(8)
    tokens = sampling.sample(logits, zero, zero.int(), one, zero, torch.full((8,), 0.999))
    assert (tokens == logits.argmax(-1)).all()


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, 4), -torch.inf)
    logits[0, 2] = 0.0
    for u in (1e-7, 0.5, 0.9999999):
        one, zero = torch.ones(1), torch.zeros(1)
        assert sampling.sample(logits, one, zero.int(), one, zero, torch.tensor([u])).item() == 2


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits = torch.randn(1, VOCAB)
    prompt, output = torch.tensor([[3, 7]]), torch.tensor([[7, 9, 9]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.cat((prompt, output), 1), logits.clone())
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    seen[0, prompt[0]] = True
    counts = torch.bincount(output[0], minlength=VOCAB)[None]
    zero = torch.zeros(1)
    assert torch.allclose(sampling.apply_penalties(logits, seen, counts, zero, zero, torch.tensor([1.7])), expected)
    additive = sampling.apply_penalties(logits, seen, counts, torch.tensor([0.5]), torch.tensor([0.25]), torch.ones(1))
    assert torch.allclose(additive[0, 9], logits[0, 9] - 0.5 - 2 * 0.25)
    assert torch.allclose(additive[0, 3], logits[0, 3])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 2))
@settings(max_examples=200, deadline=None)
def test_draws_lie_inside_the_unit_interval(seed: int, index: int) -> None:
    u = uniform_draw(np.array([seed], np.uint64), np.array([index], np.int32))
    assert u.dtype == np.float32
    assert 0.0 < u[0] < 1.0


def test_draws_are_uniform_and_uncorrelated() -> None:
    u = uniform_draw(np.full(100_000, 5, np.uint64), np.arange(100_000, dtype=np.int32))
    assert abs(u.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
    neighbours = uniform_draw(np.arange(100_000, dtype=np.uint64), np.zeros(100_000, np.int32))
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.01


def test_the_same_seed_gives_the_same_tokens_with_any_neighbours(tiny_model) -> None:
    alone = Harness(tiny_model("yi"), page_size=8, num_pages=64)
    alone.add([5, 6, 7], temperature=1.0, seed=42, max_tokens=20)
    alone.run()
    crowd = Harness(tiny_model("yi"), page_size=8, num_pages=64, max_num_batched_tokens=5)
    for i in range(9):
        crowd.add([5 + i, 9], temperature=1.5, seed=i, max_tokens=15)
    handle = crowd.add([5, 6, 7], temperature=1.0, seed=42, max_tokens=20)
    crowd.run()
    assert crowd.tokens[handle] == alone.tokens[0]


def test_seeded_tokens_and_penalties_survive_preemption(tiny_model) -> None:
    def run(num_pages: int) -> Harness:
        harness = Harness(tiny_model("yi"), page_size=4, num_pages=num_pages, max_num_batched_tokens=32)
        harness.expect_short_outputs()
        for i in range(8):
            harness.add(
                np.arange(3, 9 + i),
                temperature=1.0,
                seed=i,
                max_tokens=30,
                repetition_penalty=1.3,
                frequency_penalty=0.4,
            )
        harness.run()
        return harness

    roomy, tight = run(200), run(24)
    assert roomy.engine.scheduler.preemptions == 0
    assert tight.engine.scheduler.preemptions > 0
    assert tight.tokens == roomy.tokens


def test_logit_bias_min_tokens_and_stop_tokens(tiny_model) -> None:
    harness = Harness(tiny_model("yi"), page_size=8, num_pages=64)
    forced = harness.add([5], logit_bias={77: 100.0}, max_tokens=5, **GREEDY)
    stopped = harness.add([5], logit_bias={77: 100.0}, stop_token_ids=(77,), max_tokens=5, **GREEDY)
    late = harness.add([5], logit_bias={77: 100.0}, stop_token_ids=(77,), min_tokens=3, max_tokens=9, **GREEDY)
    banned = harness.add([5], max_tokens=4, **GREEDY)
    harness.run()
    assert harness.tokens[forced] == [77] * 5
    assert harness.tokens[stopped] == [77]
    assert harness.tokens[late][3:] == [77]
    assert 77 not in harness.tokens[late][:3]
    again = harness.add([5], max_tokens=4, logit_bias={harness.tokens[banned][0]: -100.0}, **GREEDY)
    harness.run()
    assert harness.tokens[again][0] != harness.tokens[banned][0]


def test_logprobs_are_the_models_own_and_contain_the_sampled_token(tiny_model) -> None:
    path = tiny_model("llama3.1")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = np.arange(3, 40)
    harness = Harness(path, page_size=8, num_pages=64, max_num_batched_tokens=10)
    handle = harness.add(prompt, temperature=1.2, seed=1, logprobs=5, max_tokens=8, ignore_eos=True, top_k=3)
    harness.run()
    tokens = harness.tokens[handle]
    with torch.inference_mode():
        ids = torch.tensor([*prompt.tolist(), *tokens])[None]
        expected = model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    for token, row, entry in zip(tokens, expected, harness.logprobs[handle], strict=True):
        assert entry.ids[0] == token
        assert entry.values[0] == pytest.approx(row[token].item(), abs=1e-3)
        best = row.topk(5)
        assert list(entry.values[1:]) == pytest.approx(best.values.tolist(), abs=1e-3)
        assert entry.rank == int((row > row[token]).sum()) + 1
        if token in entry.ids[1:]:
            assert entry.values[entry.ids[1:].index(token) + 1] == entry.values[0]


def test_logprobs_of_requested_tokens_follow_the_best_ones(tiny_model) -> None:
    path = tiny_model("llama3.1")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = np.arange(3, 40)
    harness = Harness(path, page_size=8, num_pages=64, max_num_batched_tokens=64)
    requested = {"a": (7, 150, 7), "b": (), "c": tuple(range(50, 170))}
    options = {"temperature": 1.2, "max_tokens": 4, "ignore_eos": True}
    handles = {
        name: harness.add(prompt, seed=i, logprobs=i, logprob_token_ids=ids, **options)
        for i, (name, ids) in enumerate(requested.items())
    }
    harness.run()
    for i, (name, wanted) in enumerate(requested.items()):
        tokens = harness.tokens[handles[name]]
        with torch.inference_mode():
            ids = torch.tensor([*prompt.tolist(), *tokens])[None]
            expected = model(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        for token, row, entry in zip(tokens, expected, harness.logprobs[handles[name]], strict=True):
            assert (entry.ids[0], len(entry.ids), entry.ids[1 + i :]) == (token, 1 + i + len(wanted), wanted)
            assert list(entry.values) == pytest.approx(row[list(entry.ids)].tolist(), abs=1e-3)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_logprobs_are_returned_once_for_every_position_despite_preemption(tiny_model, max_tokens: int) -> None:
    path = tiny_model("llama3.1")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 199, int(n)) for n in (1, 2, 30, 61)]
    harness = Harness(path, page_size=4, num_pages=40, max_num_batched_tokens=7)
    harness.expect_short_outputs()
    for prompt in prompts:
        harness.add(prompt, max_tokens=max_tokens, prompt_logprobs=2, **GREEDY)
    harness.add(np.arange(3, 30), max_tokens=60, priority=-1, ignore_eos=True, **GREEDY)
    harness.run(lambda step: harness.engine.scheduler._preempt_one() if step in (4, 9) else None)
    for handle, prompt in enumerate(prompts):
        with torch.inference_mode():
            rows = model(torch.from_numpy(prompt)[None]).logits[0].log_softmax(-1)
        entries = harness.prompt_logprobs[handle]
        assert [e.ids[0] for e in entries] == prompt[1:].tolist()
        assert [e.values[0] for e in entries] == pytest.approx(
            [rows[i, t].item() for i, t in enumerate(prompt[1:])], abs=1e-3
        )
        assert len(harness.tokens[handle]) == max_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -2),
        ("min_p", 1.1),
        ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("nan")}),
        ("seed", 2**63),
        ("stop_token_ids", tuple(range(129))),
        ("logprob_token_ids", (1,)),
    ],
)
def test_values_out_of_range_name_their_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field


def test_prompt_scores_never_hold_the_logits_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    demo = Harness("demo", max_num_batched_tokens=1024)
    scores = sampling.logprobs_of

    def watch(logits: torch.Tensor, *rest: object) -> object:
        rows.append(logits.shape[0])
        return scores(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "logprobs_of", watch)
    handle = demo.add(np.arange(3, 1503) % 2000 + 6, max_tokens=0, prompt_logprobs=1)
    demo.run()
    assert len(demo.prompt_logprobs[handle]) == 1499
    assert sum(rows) == 1499
    assert max(rows) <= PROMPT_LOGPROB_ROWS
