"""`/v1/completions`: the answer for every form of request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from stub import Script, Server

from weft.engine.wire.messages import Finish
from weft.server.api import connection

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def events(server: Server, path: str = "/v1/completions", **body: Any) -> list[Any]:
    """The decoded events of a stream; "[DONE]" stays a string."""
    response = await server.post(path, {"prompt": "hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line if line == "[DONE]" else json.loads(line) for line in (line[6:] for line in lines)]


async def test_text_usage_and_finish_reason(server: Server) -> None:
    server.engine.script = Script("hello world", cached_tokens=1)
    body = await server.complete(max_tokens=50)
    assert body["object"] == "text_completion"
    assert body["model"] == "stub"
    assert body["id"].startswith("cmpl-")
    empty = dict.fromkeys(["logprobs", "stop_reason", "prompt_logprobs", "token_ids", "prompt_token_ids"])
    assert body["choices"] == [{"index": 0, "text": "hello world", "finish_reason": "stop", **empty}]
    output = len(server.engine.tokenizer.encode("hello world")) + 1
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": output,
        "total_tokens": 2 + output,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_the_default_is_16_tokens_or_the_remaining_context(server: Server) -> None:
    server.engine.script = Script("x" * 100)
    body = await server.complete()
    assert body["choices"][0]["text"] == "x" * 16
    assert body["choices"][0]["finish_reason"] == "length"
    body = await server.complete(prompt=[1] * 510)
    assert body["choices"][0]["text"] == "xx"


@pytest.mark.parametrize(
    "prompt", ["hello", ["hello"], [104, 105], [[104, 105]]], ids=["string", "strings", "ids", "lists of ids"]
)
async def test_every_form_of_prompt(server: Server, prompt: Any) -> None:
    await server.complete(prompt=prompt)
    expected = [104, 105] if prompt in ([104, 105], [[104, 105]]) else server.engine.tokenizer.encode("hello")
    assert server.engine.prompt() == expected


async def test_several_prompts_times_n_are_numbered_prompt_by_prompt(server: Server) -> None:
    server.engine.script = Script("hello", vary=True)
    body = await server.complete(prompt=["a", "b"], n=2, max_tokens=30)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in body["choices"]}) == 4
    a, b = server.engine.tokenizer.encode("a"), server.engine.tokenizer.encode("b")
    assert [server.engine.prompt(i) for i in range(4)] == [a, a, b, b]
    assert body["usage"]["prompt_tokens"] == 2


async def test_n_sequences_of_a_seeded_request_get_their_own_seeds(server: Server) -> None:
    await server.complete(n=3, seed=2**63 - 2)
    seeds = [request.params.seed for request in server.engine.added]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]


async def test_sampling_fields_reach_the_engine(server: Server) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "max_tokens": 9,
        "seed": 5,
        "ignore_eos": True,
    }
    await server.complete(**fields, logit_bias={"7": -100, "8": 3.5}, stop_token_ids=[3], priority=-2, cache_salt="me")
    request = server.engine.added[-1]
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert request.params.logit_bias == {7: -100.0, 8: 3.5}
    assert request.params.stop_token_ids == (3,)
    assert (request.priority, request.cache_salt) == (-2, "me")


async def test_nulls_are_defaults_and_unknown_fields_are_ignored(server: Server) -> None:
    names = ["n", "temperature", "top_p", "stop", "seed", "stream", "stream_options", "logit_bias", "suffix", "user"]
    body = await server.complete(
        **dict.fromkeys(names), model=None, guided_colors=[1], response_format={"type": "text"}
    )
    assert body["choices"][0]["text"] == "hello world"
    assert server.engine.added[-1].params.temperature == 1.0


async def test_a_missing_model_means_the_served_one(server: Server) -> None:
    response = await server.post("/v1/completions", {"prompt": "hi"})
    assert response.json()["model"] == "stub"


async def test_a_stop_string_across_tokens_cuts_text_ids_logprobs_and_usage_at_one_place(server: Server) -> None:
    tokenizer = server.engine.tokenizer
    server.engine.script = Script("abcSTOPdef", burst=3)
    for burst in (1, 3, 100):
        server.engine.script = Script("abcSTOPdef", burst=burst)
        body = await server.complete(stop=["STOP"], logprobs=0, return_token_ids=True, max_tokens=50)
        (choice,) = body["choices"]
        assert choice["text"] == "abc"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
        assert tokenizer.decode(choice["token_ids"]) == "abcSTOP"
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]


async def test_stop_string_aborts_the_engine(server: Server) -> None:
    server.engine.script = Script("abc. def", delay=0.001)
    await server.complete(stop=".", max_tokens=50)
    assert server.engine.aborted == [server.engine.added[-1].handle]


async def test_stop_string_can_be_included(server: Server) -> None:
    server.engine.script = Script("abc.def")
    body = await server.complete(stop=".", include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "abc."


async def test_half_a_stop_string_at_the_end_is_text(server: Server) -> None:
    server.engine.script = Script("abcST")
    body = await server.complete(stop=["STOP"])
    assert body["choices"][0]["text"] == "abcST"


async def test_stop_strings_count_from_min_tokens_on(server: Server) -> None:
    server.engine.script = Script("a.b.c.d")
    body = await server.complete(stop=".", min_tokens=3)
    assert body["choices"][0]["text"] == "a.b"


async def test_stop_token_ends_without_its_text(server: Server) -> None:
    server.engine.script = Script("ab!cd")
    (bang,) = server.engine.tokenizer.encode("!")
    body = await server.complete(stop_token_ids=[bang])
    assert body["choices"][0] == {
        "index": 0,
        "text": "ab",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": bang,
        "prompt_logprobs": None,
        "token_ids": None,
        "prompt_token_ids": None,
    }
    body = await server.complete(stop_token_ids=[bang], include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "ab!"


async def test_an_end_token_has_no_text_but_counts(server: Server) -> None:
    body = await server.complete(return_token_ids=True)
    assert body["choices"][0]["token_ids"][-1] == server.engine.eos
    assert body["choices"][0]["text"] == "hello world"


async def test_characters_of_several_tokens_are_whole(server: Server) -> None:
    server.engine.script = Script("naïve 你好 😀!")
    body = await server.complete(max_tokens=50)
    assert body["choices"][0]["text"] == "naïve 你好 😀!"
    texts = [e["choices"][0]["text"] for e in (await events(server, max_tokens=50))[:-1]]
    assert "".join(texts) == "naïve 你好 😀!"
    assert not any("\ufffd" in text for text in texts)


async def test_logprobs_are_parallel_and_hold_the_sampled_token(server: Server) -> None:
    server.engine.script = Script("ab")
    body = await server.complete(logprobs=2)
    scores = body["choices"][0]["logprobs"]
    assert scores["tokens"] == ["a", "b", "<|eos|>"]
    assert scores["token_logprobs"] == [-1.0] * 3
    assert scores["text_offset"] == [0, 1, 2]
    assert list(scores["top_logprobs"][1].items()) == [("a", -0.5), ("b", -1.0)]
    body = await server.complete(logprobs=0)
    assert body["choices"][0]["logprobs"]["top_logprobs"][1] == {"b": -1.0}
    body = await server.complete(logprobs=1)
    assert body["choices"][0]["logprobs"]["top_logprobs"][1] == {"a": -0.5, "b": -1.0}


async def test_echo_puts_the_prompt_first(server: Server) -> None:
    assert (await server.complete(prompt="héllo ", echo=True))["choices"][0]["text"] == "héllo hello world"
    ids = server.engine.tokenizer.encode("hello")
    assert (await server.complete(prompt=ids, echo=True))["choices"][0]["text"] == "hellohello world"


async def test_echo_with_logprobs_scores_prompt_and_output(server: Server) -> None:
    server.engine.script = Script("cd")
    body = await server.complete(prompt="ab", echo=True, logprobs=1, max_tokens=1)
    scores = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"] == "abc"
    assert scores["tokens"] == ["a", "b", "c"]
    assert scores["token_logprobs"] == [None, -1.0, -1.0]
    assert scores["top_logprobs"][0] is None
    assert scores["text_offset"] == [0, 1, 2]


async def test_scoring_generates_nothing(server: Server) -> None:
    body = await server.complete(prompt=["ab", "abc"], echo=True, logprobs=1, max_tokens=0)
    assert [choice["text"] for choice in body["choices"]] == ["ab", "abc"]
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [2, 3]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert body["usage"]["completion_tokens"] == 0
    body = await server.complete(prompt=[1] * 512, echo=True, max_tokens=0)
    assert body["usage"]["prompt_tokens"] == 512


async def test_prompt_logprobs_extension(server: Server) -> None:
    body = await server.complete(prompt="ab", prompt_logprobs=1)
    b = server.engine.tokenizer.encode("b")[0]
    first, second = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        str(b - 1): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        str(b): {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
    }


async def test_stream_has_one_event_per_delivery_and_no_preamble(server: Server) -> None:
    server.engine.script = Script("abc")
    *chunks, done = await events(server)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "c", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_stream_with_usage_ends_with_a_usage_chunk(server: Server) -> None:
    *chunks, last, done = await events(server, stream_options={"include_usage": True}, max_tokens=3)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_continuous_usage_counts_up(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _, _ = await events(server, stream_options=options, max_tokens=3)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


async def test_streams_of_several_choices_add_up_to_the_plain_answer(server: Server) -> None:
    server.engine.script = Script("hello wörld")
    body = {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 40, "return_token_ids": True}
    plain = (await server.complete(**body))["choices"]
    merged: dict[int, dict[str, Any]] = {}
    for chunk in (await events(server, **body))[:-1]:
        (choice,) = chunk["choices"]
        if choice["index"] not in merged:
            merged[choice["index"]] = choice
            continue
        whole = merged[choice["index"]]
        whole["text"] += choice["text"]
        whole["token_ids"] += choice["token_ids"]
        whole["finish_reason"] = choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            whole["logprobs"][name] += values
    assert [{**merged[i], "prompt_logprobs": None} for i in range(4)] == plain


async def test_bursts_arrive_as_one_event_at_a_slow_reader(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.RawWriter, "ready", lambda _: False)
    server.engine.script = Script("abcdef", burst=3, delay=0.001)
    *chunks, _ = await events(server)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["abc", "def", ""]


async def test_engine_error_is_a_500_before_the_first_byte(server: Server) -> None:
    server.engine.script = Script(finish=Finish.ABORT, error="out of pages")
    for stream in (False, True):
        server.engine.script = Script("a", burst=2, finish=Finish.ABORT, error="out of pages")
        response = await server.post("/v1/completions", {"prompt": "hi", "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "out of pages"


async def test_non_finite_logits_are_a_500_with_their_own_code(server: Server) -> None:
    for chat in (False, True):
        for stream in (False, True):
            server.engine.script = Script("a", burst=2, finish=Finish.NONFINITE, error="they are NaN")
            what = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
            path = "/v1/chat/completions" if chat else "/v1/completions"
            response = await server.post(path, {**what, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["type"]) == (500, "nonfinite_logits", "server_error")


async def test_later_non_finite_logits_end_a_stream_with_an_error_event(server: Server) -> None:
    server.engine.script = Script("abc", delay=0.001, finish=Finish.NONFINITE, error="they are NaN")
    got = await events(server)
    assert (got[0]["choices"][0]["text"], got[-1]["error"]["code"]) == ("a", "nonfinite_logits")


async def test_engine_error_in_a_stream_is_an_error_event_without_done(server: Server) -> None:
    server.engine.script = Script("abc", delay=0.001, finish=Finish.ABORT, error="out of pages")
    got = await events(server)
    assert got[-1]["error"]["message"] == "out of pages"
    assert got[0]["choices"][0]["text"] == "a"


async def test_after_an_error_event_the_connection_closes(server: Server) -> None:
    server.engine.script = Script("abc", delay=0.001, finish=Finish.ABORT, error="out of pages")
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "hi", "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    async with asyncio.timeout(240):
        answer = await reader.read()  # to the end of the connection
    writer.close()
    assert b"[DONE]" not in answer
    assert answer.endswith(b"0\r\n\r\n")
    assert b"out of pages" in answer


async def test_request_id_is_echoed_and_used(server: Server) -> None:
    response = await server.post("/v1/completions", {"prompt": "hi"}, headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "cmpl-abc-1"
    body = {"prompt": "hi", "request_id": "theirs"}
    assert (await server.post("/v1/completions", body, headers={"X-Request-Id": "abc-1"})).json()["id"] == "cmpl-abc-1"
    assert (await server.post("/v1/completions", body)).headers["x-request-id"] == "theirs"
    for bad in ("x" * 129, "a b"):
        response = await server.post("/v1/completions", {"prompt": "hi"}, headers={"X-Request-Id": bad})
        assert response.headers["x-request-id"] != bad
