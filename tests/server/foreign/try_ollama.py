"""Ollama's Python package: its chats, prompts, tools, schemas, embeddings and lists of models."""

from __future__ import annotations

import asyncio
import json

import ollama
from trial import QUESTION, URL, add, run, tries

client = ollama.Client(URL)
MESSAGES = [{"role": "user", "content": QUESTION}]
EXACT = {"temperature": 0, "num_predict": 60}


@tries("chat", "plain")
def plain() -> None:
    answer = client.chat("demo", MESSAGES, options=EXACT)
    assert "42" in (answer.message.content or "")
    assert answer.done
    assert answer.done_reason == "stop"
    assert answer.eval_count
    assert answer.total_duration


@tries("chat", "streamed")
def streamed() -> None:
    parts = list(client.chat("demo:latest", MESSAGES, stream=True, options=EXACT))
    assert "42" in "".join(part.message.content or "" for part in parts)
    assert [part.done for part in parts][-2:] == [False, True]


@tries("chat", "async, streamed")
def asynchronous() -> None:
    async def text() -> str:
        parts = await ollama.AsyncClient(URL).chat("demo", MESSAGES, stream=True, options=EXACT)
        return "".join([part.message.content or "" async for part in parts])

    assert "42" in asyncio.run(text())


@tries("chat", "tools and results")
def tools() -> None:
    messages: list[object] = [*MESSAGES]
    answer = client.chat("demo", messages, tools=[add], options=EXACT)
    (call,) = answer.message.tool_calls or ()
    assert call.function.name == "add"
    assert sum(map(float, call.function.arguments.values())) == 42
    messages += [answer.message, {"role": "tool", "tool_name": "add", "content": "42"}]
    final = client.chat("demo", messages, tools=[add], options=EXACT)
    assert "42" in (final.message.content or "")


@tries("chat", "schema")
def schema() -> None:
    form = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}
    answer = client.chat("demo", MESSAGES, format=form, options=EXACT)
    assert json.loads(answer.message.content or "")["kind"] in ("cat", "dog")


@tries("chat", "logprobs")
def logprobs() -> None:
    answer = client.chat("demo", MESSAGES, logprobs=True, top_logprobs=2, options=EXACT)
    assert answer.logprobs
    assert len(answer.logprobs[0].top_logprobs or ()) == 2


@tries("generate", "plain, streamed, raw")
def generated() -> None:
    assert "42" in (client.generate("demo", QUESTION, options=EXACT).response or "")
    parts = list(client.generate("demo", QUESTION, stream=True, options=EXACT))
    assert "42" in "".join(part.response or "" for part in parts)
    assert client.generate("demo", "1 2 3", raw=True, options={"num_predict": 4}).eval_count == 4
    assert client.generate("demo", keep_alive="5m").done_reason == "load"


@tries("embed", "several texts, one text")
def embedded() -> None:
    vectors = client.embed("demo", ["a b", "c"], dimensions=8).embeddings
    assert [len(vector) for vector in vectors] == [8, 8]
    assert client.embeddings("demo", "a b").embedding


@tries("models", "list, ps, show")
def models() -> None:
    assert [model.model for model in client.list().models] == ["demo"]
    assert [model.model for model in client.ps().models] == ["demo"]
    shown = client.show("demo")
    assert "completion" in (shown.capabilities or ())
    assert shown.modelinfo


@tries("chat", "errors")
def errors() -> None:
    for body, status, word in (
        ({"model": "nobody", "messages": MESSAGES}, 404, "nobody"),
        ({"model": "demo", "messages": [{**MESSAGES[0], "images": ["aGVsbG8="]}]}, 400, "images"),
        ({"model": "demo", "messages": MESSAGES, "options": {"num_gpu": 2}}, 400, "options.num_gpu"),
        ({"model": "demo", "messages": MESSAGES, "stream": True, "think": True}, 400, "think"),
    ):
        refusal = None
        try:
            list(client.chat(**body))  # type: ignore[call-overload]
        except ollama.ResponseError as error:
            refusal = error
        assert refusal is not None, word
        assert refusal.status_code == status
        assert word in refusal.error


run()
