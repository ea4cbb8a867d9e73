"""The contract's table of request fields: the effect of each on the sequence that the engine receives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from stub import MAX_MODEL_LEN, Script, Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = ["/v1/completions", "/v1/chat/completions"]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}, "strict": True}}

# (fields, attribute of the engine's message or of its sampling parameters, value)
FIELDS: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "temperature", 1.0),
    ({"max_tokens": 7}, "max_tokens", 7),
    ({"min_tokens": 3, "max_tokens": 7}, "min_tokens", 3),
    ({"temperature": 0}, "temperature", 0.0),
    ({"temperature": 2}, "temperature", 2.0),
    ({"temperature": None}, "temperature", 1.0),
    ({"top_p": 0.25}, "top_p", 0.25),
    ({"top_k": -1}, "top_k", -1),
    ({"top_k": 40}, "top_k", 40),
    ({"min_p": 0.1}, "min_p", 0.1),
    ({"seed": -5}, "seed", -5),
    ({"seed": None}, "seed", None),
    ({"presence_penalty": -2}, "presence_penalty", -2.0),
    ({"frequency_penalty": 1.5}, "frequency_penalty", 1.5),
    ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
    ({"logit_bias": {"5": -100, "7": 1.5}}, "logit_bias", {5: -100.0, 7: 1.5}),
    ({"stop_token_ids": [3, 4]}, "stop_token_ids", (3, 4)),
    ({"ignore_eos": True}, "ignore_eos", True),
    ({"priority": -3}, "priority", -3),
    ({"cache_salt": "tenant"}, "cache_salt", "tenant"),
    ({"n": 1, "best_of": 1}, "max_tokens", None),
    (
        {"allowed_token_ids": None, "bad_words": [], "kv_transfer_params": None, "use_beam_search": False},
        "grammar",
        None,
    ),
    ({"user": "u", "unheard_of": {"a": [1]}, "metadata": {}, "store": False}, "temperature", 1.0),
    ({"response_format": {"type": "text"}}, "grammar", None),
    ({"tools": [], "tool_choice": None, "response_format": None, "stop": None, "logprobs": None}, "grammar", None),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "attribute", "value"), FIELDS, ids=lambda case: str(case)[:60])
async def test_each_field_reaches_the_engine(
    server: Server, path: str, stream: bool, fields: dict[str, Any], attribute: str, value: Any
) -> None:
    await ask(server, path, stream=stream, **fields)
    (added,) = server.engine.added
    if attribute == "max_tokens" and value is None:  # the default
        value = 16 if path == PATHS[0] else MAX_MODEL_LEN - len(server.engine.prompt())
    assert getattr(added if hasattr(added, attribute) else added.params, attribute) == value


async def ask(server: Server, path: str, *, stream: bool = False, **fields: Any) -> list[Any]:
    """The answer's JSON documents: the chunks of a stream, or the one body."""
    prompt = {"prompt": "hi"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "hi"}]}
    response = await server.post(path, {**prompt, "stream": stream, **fields})
    assert response.status_code == 200, response.text
    if not stream:
        return [response.json()]
    *events, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(documents: list[Any], index: int = 0) -> str:
    choices = [c for document in documents for c in document["choices"] if c["index"] == index]
    return "".join(c.get("text") or (c.get("delta") or c.get("message") or {}).get("content") or "" for c in choices)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", PATHS)
class TestAnswers:
    """Fields that affect the answer, in every shape of it."""

    async def test_stop_strings(self, server: Server, path: str, stream: bool) -> None:
        for include, expected in ((False, "hello "), (True, "hello wor")):
            fields = {"stop": ["wor", "zzz"], "include_stop_str_in_output": include}
            documents = await ask(server, path, stream=stream, **fields)
            assert text_of(documents) == expected
            last = documents[-1]["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", "wor")

    async def test_stop_tokens(self, server: Server, path: str, stream: bool) -> None:
        (token,) = server.engine.tokenizer.encode(" world")
        last = (await ask(server, path, stream=stream, stop_token_ids=[token]))[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", token)

    async def test_length(self, server: Server, path: str, stream: bool) -> None:
        last = (await ask(server, path, stream=stream, max_tokens=1))[-1]["choices"][0]
        assert last["finish_reason"] == "length"

    async def test_several_sequences_have_their_own_seeds_and_texts(
        self, server: Server, path: str, stream: bool
    ) -> None:
        server.engine.script = Script("hello", vary=True)
        documents = await ask(server, path, stream=stream, n=3, best_of=3, seed=2**63 - 1)
        assert len({text_of(documents, index) for index in range(3)}) == 3
        assert len({added.params.seed for added in server.engine.added}) == 3
        first, *rest = server.engine.added
        assert [added.leader for added in rest] == [first.handle] * 2
        assert first.leader == -1

    async def test_token_ids(self, server: Server, path: str, stream: bool) -> None:
        documents = await ask(server, path, stream=stream, return_token_ids=True)
        ids = [i for document in documents for c in document["choices"] for i in c.get("token_ids") or ()]
        assert ids == [*server.engine.tokenizer.encode("hello world"), server.engine.eos]
        where = documents[0] if path == PATHS[1] else documents[0]["choices"][0]
        assert where["prompt_token_ids"] == server.engine.prompt()

    async def test_log_probabilities(self, server: Server, path: str, stream: bool) -> None:
        chat = path == PATHS[1]
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
        documents = await ask(server, path, stream=stream, **fields)
        entries = [c["logprobs"] for document in documents for c in document["choices"] if c["logprobs"]]
        ids = [*server.engine.tokenizer.encode("hello world"), server.engine.eos]
        if chat:
            content = [token for entry in entries for token in entry["content"]]
            assert len(content) == len(ids)
            assert all(token["logprob"] in [top["logprob"] for top in token["top_logprobs"]] for token in content)
        else:
            assert sum(len(entry["tokens"]) for entry in entries) == len(ids)
            for entry in entries:
                tops = zip(entry["token_logprobs"], entry["top_logprobs"], strict=True)
                assert all(value in top.values() for value, top in tops)

    async def test_tokens_named_by_their_ids(self, server: Server, path: str, stream: bool) -> None:
        fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if path == PATHS[1] else {"logprobs": 2}
        documents = await ask(server, path, stream=stream, return_tokens_as_token_ids=True, **fields)
        logprobs = [c["logprobs"] for document in documents for c in document["choices"] if c["logprobs"]]
        if path == PATHS[1]:
            names = [entry["token"] for part in logprobs for entry in part["content"]]
            tops = [{top["token"] for top in entry["top_logprobs"]} for part in logprobs for entry in part["content"]]
        else:
            names = [name for part in logprobs for name in part["tokens"]]
            tops = [set(top) for part in logprobs for top in part["top_logprobs"]]
        ids = [*server.engine.tokenizer.encode("hello world"), server.engine.eos]
        assert names == [f"token_id:{i}" for i in ids]
        assert tops == [{f"token_id:{i}", f"token_id:{i - 1}"} for i in ids]

    async def test_special_tokens_are_text_on_request_except_the_end_token(
        self, server: Server, path: str, stream: bool
    ) -> None:
        server.engine.script = Script("a<|user|>b")
        expected = {
            (True, False): "ab",
            (True, True): "ab",
            (False, False): "a<|user|>b",
            (False, True): "a<|user|>b<|eos|>",
        }
        for (skip, include), text in expected.items():
            fields = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
            assert text_of(await ask(server, path, stream=stream, **fields)) == text

    async def test_an_id_in_the_body(self, server: Server, path: str, stream: bool) -> None:
        (first, *_) = await ask(server, path, stream=stream, request_id="mine-1")
        assert first["id"].endswith("-mine-1")

    async def test_usage(self, server: Server, path: str, stream: bool) -> None:
        server.engine.script = Script(cached_tokens=2)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        usage = (await ask(server, path, stream=stream, **options))[-1]["usage"]
        prompt = len(server.engine.prompt())
        assert usage == {
            "prompt_tokens": prompt,
            "completion_tokens": 3,
            "total_tokens": prompt + 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        }

    async def test_structured_output_is_one_grammar_for_all(self, server: Server, path: str, stream: bool) -> None:
        await ask(server, path, stream=stream, response_format=SCHEMA, n=2)
        (grammar,) = {added.params.grammar for added in server.engine.added}
        assert "integer" in grammar


async def test_streamed_completions_have_no_event_without_a_token(server: Server) -> None:
    server.engine.script = Script("a 😀 你好 b")
    chunks = await ask(server, PATHS[0], stream=True, return_token_ids=True, stop=["zz"])
    assert all(len(chunk["choices"][0]["token_ids"]) >= 1 for chunk in chunks)


async def test_continuous_usage_counts_up(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path in PATHS:
        chunks = await ask(server, path, stream=True, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[-1], chunks[-1]["choices"]) == (3, [])


@pytest.mark.parametrize("path", PATHS)
async def test_long_prompts_are_cut_on_request(server: Server, path: str) -> None:
    tokenizer = server.engine.tokenizer
    text = "x".join(map(str, range(300)))
    if path == PATHS[0]:
        prompt: dict[str, Any] = {"prompt": text}
        whole = tokenizer.encode(text)
    else:
        prompt = {"messages": [{"role": "user", "content": text}]}
        whole = tokenizer.encode(f"<|bos|><|user|>{text}<|assistant|>")
    for fields, expected in [
        ({"truncate_prompt_tokens": 5}, whole[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, whole[:5]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 12}, whole[-(MAX_MODEL_LEN - 12) :]),
        ({"truncate_prompt_tokens": -1}, whole[-(MAX_MODEL_LEN - 1) :]),
    ]:
        await ask(server, path, **prompt, **fields)
        assert server.engine.prompt() == expected
    endless = {"prompt": "y" * 10**6} if path == PATHS[0] else {"messages": [{"role": "user", "content": "y" * 10**6}]}
    await ask(server, path, **endless, truncate_prompt_tokens=7)
    assert len(server.engine.prompt()) == 7
    short = await ask(server, path, truncate_prompt_tokens=400)
    assert short[0]["usage"]["prompt_tokens"] < 10


async def test_cut_prompts_are_echoed_as_cut(server: Server) -> None:
    ids = server.engine.tokenizer.encode("abcdef")
    for prompt in ("abcdef", ids):
        (body,) = await ask(server, PATHS[0], prompt=prompt, echo=True, truncate_prompt_tokens=2, max_tokens=1)
        assert text_of([body]) == "efhello"


@pytest.mark.parametrize("path", PATHS)
async def test_allowed_tokens_and_bad_words_combine_with_everything(server: Server, path: str) -> None:
    x, y = server.engine.tokenizer.encode("xy")
    for more in ({}, {"response_format": {"type": "json_object"}}, {"guided_regex": "[xy]+"}):
        await ask(server, path, allowed_token_ids=[x, y, x], bad_words=["xyx", 'a"/'], **more)
        params = server.engine.added[-1].params
        assert (params.allowed_token_ids, params.bad_words) == ((x, y), ("xyx", 'a"/'))
        assert (params.grammar is not None) == bool(more)
    await ask(server, path, allowed_token_ids=[x])
    assert server.engine.added[-1].params.allowed_token_ids == (x,)


async def test_scoring_a_prompt_generates_nothing(server: Server) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    (body,) = await ask(server, PATHS[0], prompt=prompts, echo=True, logprobs=1, max_tokens=0)
    assert [len(c["logprobs"]["token_logprobs"]) for c in body["choices"]] == [3, 2]
    assert [c["logprobs"]["token_logprobs"][0] for c in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 0
