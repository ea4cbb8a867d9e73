"""A burst of background responses stops at the limit, although each request waits before it begins."""

from __future__ import annotations

import asyncio

import pytest
from stub import Script, serving

from weft.server.api.responses import background as background_module

PATH = "/v1/responses"


@pytest.mark.asyncio
async def test_a_burst_of_background_responses_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "MAX_RUNS", 5)
    async with serving() as server:
        gate = asyncio.Event()
        server.engine.script = Script(gate=gate)
        body = {"input": "hi", "background": True}
        answers = await asyncio.gather(*(server.post(PATH, body) for _ in range(40)))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(answers) - len(refused) == 5
        assert {(each.status_code, each.json()["error"]["code"]) for each in refused} == {(503, "background_full")}
        assert all(int(each.headers["retry-after"]) > 0 for each in refused)
        gate.set()
        await server.settle(lambda: not server.front.config.app.state.background._runs)  # type: ignore[union-attr]
        assert (await server.post(PATH, body)).status_code == 200


@pytest.mark.asyncio
async def test_a_background_response_that_cannot_begin_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_module, "MAX_RUNS", 1)
    async with serving(responses_max_mib=0.001) as server:
        for body, status in (
            (
                {
                    "input": "hi",
                    "temperature": 0,
                    "text": {"format": {"type": "json_schema", "name": "a", "schema": 1}},
                },
                400,
            ),
            ({"input": "x" * 5000, "max_output_tokens": 1, "truncation": "auto"}, 400),
            ({"input": "hi " * 60, "instructions": "y" * 200, "metadata": {"a": "z" * 500, "b": "z" * 500}}, 413),
            ({"input": "hi"}, 200),
        ):
            assert (await server.post(PATH, {**body, "background": True})).status_code == status, body
