"""What stands around engines is watched at a server: one stream, then more at a time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from fleets import profile
from sse_server import serving

from weft.deploy.fleet import around
from weft.deploy.fleet.around import LONG_PROMPT_TOKENS, PROMPT_TOKENS, STREAM_TOKENS, Seen, derive, mean
from weft.loadgen.errors import LoadError


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PAUSE_SECONDS", 0.0), ("FIRSTS", 3)):
        monkeypatch.setattr(around, name, value)


async def three(*_address: object) -> int:
    return 3


async def watched(*, shared: bool) -> tuple[Seen, Counter[tuple[int, int]]]:
    async with serving(itl=0.001) as stub:
        seen = await around._watch(stub.url, shared=shared, long_prompt=LONG_PROMPT_TOKENS, seconds=0.0)
    return seen, Counter((len(body["prompt"]), body["max_tokens"]) for body in stub.requests)


@pytest.mark.usefixtures("hurried")
def test_engines_that_share_cores_are_watched_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(around, "_engines", three)
    seen, asked = asyncio.run(watched(shared=True))
    assert (len(seen.between), len(seen.prompts)) == (3, 3)
    assert min(seen.first, *seen.between, *seen.prompts) > 0
    assert asked[PROMPT_TOKENS, around.FIRST_TOKENS] == 3
    assert asked[LONG_PROMPT_TOKENS, around.FIRST_TOKENS] == 3 * 3
    # One for each engine, and those that go on beside prompts.
    assert asked[PROMPT_TOKENS, STREAM_TOKENS] > 1 + 2 + 3


@pytest.mark.usefixtures("hurried")
def test_of_an_engine_with_its_own_device_only_a_lone_stream_is_watched() -> None:
    seen, asked = asyncio.run(watched(shared=False))
    assert (len(seen.between), seen.prompts) == (1, ())
    assert asked[PROMPT_TOKENS, STREAM_TOKENS] == 1
    assert derive(seen, profile()).side_by_side is None


@pytest.mark.usefixtures("hurried")
def test_a_server_that_does_not_tell_its_engines_is_named() -> None:
    with pytest.raises(LoadError, match="/health says 404"):
        asyncio.run(watched(shared=True))


@pytest.mark.usefixtures("hurried")
def test_answers_without_text_are_asked_for_again() -> None:
    async def ask() -> int:
        async with serving(itl=0.001, silent=(1, 2, 4)) as stub:
            await around._watch(stub.url, shared=False, long_prompt=LONG_PROMPT_TOKENS, seconds=0.0)
        return len(stub.requests)

    assert asyncio.run(ask()) == 1 + 3 + 3 + 1


def test_no_number_of_engines_is_quicker_than_fewer() -> None:
    one, other = (
        Seen(0.02, (0.010, 0.009, 0.018), (0.03, 0.03, 0.05)),
        Seen(0.04, (0.014, 0.015, 0.018), (0.03, 0.06, 0.05)),
    )
    both = mean((one, other))
    assert both.first == pytest.approx(0.03)
    beside = derive(both, profile(threads=1)).side_by_side
    assert beside is not None
    assert beside.decodes == pytest.approx((1, 1, 1.5))
    assert beside.prompts == pytest.approx((1, 1.5, 5 / 3))
