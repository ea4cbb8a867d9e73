"""The overhead around engines is measured at a server: one stream, then several in parallel."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from fleets import profile
from sse_server import serving

from weft.deploy.fleet.profile import Features, Limits
from weft.loadgen.errors import LoadError
from weft.tools.fleet import overhead
from weft.tools.fleet.overhead import FIRST_TOKENS, SHARES, STREAM_TOKENS, Observations, derive, together

LIMITS = Limits(16, 400, 8, 256, 1024)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAUSE_SECONDS", 0.0), ("FIRSTS", 3)):
        monkeypatch.setattr(overhead, name, value)


async def three(*_address: object) -> int:
    return 3


async def watched(*, shared: bool) -> tuple[Observations, Counter[int], list[int]]:
    async with serving(itl=0.001) as stub:
        seen = await overhead._watch(stub.url, shared=shared, lengths=overhead._lengths(LIMITS), seconds=0.0)
    requested = [body for body in stub.requests if body["max_tokens"] in (FIRST_TOKENS, STREAM_TOKENS)]
    return seen, Counter(body["max_tokens"] for body in requested), [len(body["prompt"]) for body in requested]


@pytest.mark.usefixtures("hurried")
def test_engines_that_share_cores_are_watched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_engines", three)
    seen, requested, lengths = asyncio.run(watched(shared=True))
    assert ([len(shares) for shares in seen.between], [len(f) for f in seen.firsts]) == ([SHARES] * 3, [3] * 3)
    assert min(*np.mean(seen.between, axis=1), *(s for f in seen.firsts for _, s in f)) > 0
    assert requested[FIRST_TOKENS] == 3 * 3
    # One for each engine, and those that run during prompts.
    assert requested[STREAM_TOKENS] > 1 + 2 + 3
    assert len(set(lengths)) > 0.9 * len(lengths)
    assert set(seen.silent) == {0}


@pytest.mark.usefixtures("hurried")
def test_for_an_engine_with_its_own_device_only_a_single_stream_is_watched() -> None:
    seen, requested, _ = asyncio.run(watched(shared=False))
    assert (len(seen.between), len(seen.firsts)) == (1, 1)
    assert requested == {STREAM_TOKENS: 1, FIRST_TOKENS: 3}
    assert derive(seen, profile()).side_by_side is None


@pytest.mark.usefixtures("hurried")
def test_a_server_that_does_not_report_its_engines_is_named() -> None:
    with pytest.raises(LoadError, match="/health says 404"):
        asyncio.run(watched(shared=True))


@pytest.mark.usefixtures("hurried")
def test_answers_without_text_are_repeated_and_counted() -> None:
    async def ask() -> tuple[int, Observations]:
        async with serving(itl=0.001, silent=(1, 2, 4)) as stub:
            seen = await overhead._watch(stub.url, shared=False, lengths=overhead._lengths(LIMITS), seconds=0.0)
        return len(stub.requests), seen

    requests, seen = asyncio.run(ask())
    assert requests == 1 + 1 + 3 + 3
    assert seen.silent == (STREAM_TOKENS, STREAM_TOKENS, 0)


def test_prompts_have_all_lengths_that_an_iteration_takes() -> None:
    taken = list(islice(overhead._lengths(LIMITS), 100))
    low, high = overhead.PROMPT_TOKENS
    assert low <= min(taken) < low + 20
    assert high - 20 < max(taken) <= high
    assert np.mean(taken) == pytest.approx((low + high) / 2, rel=0.05)
    assert len(set(taken)) == 100
    assert max(islice(overhead._lengths(Limits(16, 400, 8, 64, 1024)), 100)) <= 64
    assert set(islice(overhead._lengths(Limits(16, 400, 8, 8, 1024)), 9)) == {8}


def test_equal_shares_keep_the_mean_for_any_number_of_values() -> None:
    for n in (1, 3, 20, 47):
        values = np.random.default_rng(n).exponential(1.0, n)
        shares = overhead._shares(values)
        assert len(shares) == SHARES
        assert np.mean(shares) == pytest.approx(np.mean(values))
        assert np.diff(shares).min() > -1e-9
        assert shares[-1] == pytest.approx(max(values)) or n > SHARES


def test_more_engines_are_never_quicker() -> None:
    made = profile(threads=1)
    alone = 1e3 * made.seconds(Features(32, 0, 0, 0, 1))

    def seen(between: tuple[float, ...], first: tuple[float, ...]) -> Observations:
        return Observations(
            tuple((b - 0.001, b + 0.001) for b in between), tuple(((32, f - 0.002), (32, f + 0.002)) for f in first)
        )

    both = together((seen((0.010, 0.009, 0.018), (0.03, 0.03, 0.05)), seen((0.014, 0.015, 0.018), (0.03, 0.06, 0.05))))
    assert [len(firsts) for firsts in both.firsts] == [4, 4, 4]
    found = derive(both, made)
    assert found.gap_ms + found.request_ms + found.answer_ms + alone == pytest.approx(30.0)
    contention = found.side_by_side
    assert contention is not None
    assert contention.decodes == pytest.approx((1, 1, 1.5))
    assert contention.prompts == pytest.approx((1, 1.5, 5 / 3))
    for slower, spread in (
        (contention.decodes, contention.decodes_spread),
        (contention.prompts, contention.prompts_spread),
    ):
        assert np.mean(spread, axis=1) == pytest.approx([1.0] * 3)
        # None is quicker than on its own.
        assert np.array(slower)[:, None] * spread == pytest.approx(np.maximum(np.array(slower)[:, None] * spread, 1.0))
    assert contention.prompts_spread[0] == pytest.approx([1.0] * SHARES)
    assert contention.prompts_spread[1][-1] > 1.2
