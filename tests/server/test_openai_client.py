"""The official client, unchanged, against a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from stub import Script, Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER: Any = [{"role": "user", "content": "hi"}]


def client(server: Server, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **options)


async def in_thread(function: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(function)


async def test_synchronous_calls(server: Server) -> None:
    def calls() -> None:
        with client(server) as api:
            assert [model.id for model in api.models.list()] == ["stub"]
            assert api.models.retrieve("stub").id == "stub"
            completion = api.completions.create(model="stub", prompt="hi", logprobs=1)
            assert completion.choices[0].text == "hello world"
            assert completion.usage is not None
            chat = api.chat.completions.create(model="stub", messages=USER, logprobs=True, top_logprobs=1)
            assert chat.choices[0].message.content == "hello world"
            assert chat.choices[0].logprobs is not None
            chunks = list(api.completions.create(model="stub", prompt="hi", stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == "hello world"

    await in_thread(calls)


async def test_asynchronous_streams(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        stream = await api.chat.completions.create(
            model="stub", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == "hello world"
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        async with api.chat.completions.stream(model="stub", messages=USER) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].message.content == "hello world"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError),
        ({"prompt": ""}, openai.BadRequestError),
        ({"prompt": [1] * 600}, openai.BadRequestError),
        ({"max_tokens": 10_000}, openai.BadRequestError),
        ({"temperature": "hot"}, openai.BadRequestError),
    ],
    ids=["unknown model", "empty prompt", "prompt too long", "max_tokens too large", "wrong type"],
)
async def test_errors_are_typed(server: Server, arguments: dict[str, Any], error: type[openai.APIStatusError]) -> None:
    def call() -> None:
        with client(server) as api, pytest.raises(error) as caught:
            api.completions.create(**{"model": "stub", "prompt": "hi", **arguments})
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["message"]
        assert caught.value.request_id

    await in_thread(call)


async def test_a_broken_stream_raises(server: Server) -> None:
    server.engine.script = Script("abc", delay=0.001, error="lost")
    from weft.engine.wire.messages import Finish

    server.engine.script.finish = Finish.ABORT

    def call() -> None:
        with client(server) as api, pytest.raises(openai.APIError, match="lost"):
            list(api.completions.create(model="stub", prompt="hi", stream=True))

    await in_thread(call)


async def test_wrong_key() -> None:
    async with serving(api_key=["secret"]) as server:

        def call() -> None:
            with client(server) as api, pytest.raises(openai.AuthenticationError):
                api.models.list()

        await in_thread(call)


async def test_overload_is_retried_after_its_hint() -> None:
    async with serving(max_queued_requests=0, max_num_seqs=1) as server:
        gate = asyncio.Event()
        server.engine.script = Script(gate=gate)
        blocker = asyncio.create_task(server.post("/v1/completions", {"prompt": "hi"}))
        await server.settle(lambda: server.engine.num_open == 1)

        def call() -> str:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=3) as api:
                return api.completions.create(model="stub", prompt="hi").choices[0].text

        waiting = asyncio.create_task(in_thread(call))
        await asyncio.sleep(0.3)
        gate.set()
        assert await waiting == "hello world"
        await blocker
