"""Fields of vLLM and SGLang work here: each by its effect, on every endpoint that has it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer
from stub import MAX_MODEL_LEN, Script, Server, serving, state_of

from weft.server.text.tokenizer import Truncation
from weft.server.tools.structured import closed

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
USER = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": USER}, RESPONSES: {"input": "hi"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EMPTY_SCHEMA: dict[str, Any] = {"name": "n", "schema": SCHEMA, "strict": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _thinking() -> AsyncIterator[Server]:
    async with serving(reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture
def thinking(_thinking: Server) -> Server:
    """A server whose model thinks."""
    _thinking.engine.script = Script()
    _thinking.engine.added.clear()
    return _thinking


async def answer_of(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    response = await server.post(path, {**LEAST[path], **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def text_of(server: Server, path: str, **fields: Any) -> str:
    """The text of an answer, which is the same when streamed."""
    plain = _text(await answer_of(server, path, **fields))
    response = await server.post(path, {**LEAST[path], **fields, "stream": True})
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    events = [json.loads(line) for line in lines]
    if path == RESPONSES:
        streamed = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    else:
        choices = [choice for event in events for choice in event["choices"]]
        streamed = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    assert streamed == plain
    return plain


def _text(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def accepts(server: Server, text: str) -> bool:
    """The grammar of the newest request allows a text."""
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None
    matcher, tokenizer = LLMatcher(LLTokenizer("byte"), grammar), LLTokenizer("byte")
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


# -- structured outputs


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "[a-c]+"}},
        {"structured_outputs": {"choice": ["abc", "d"]}},
        {"structured_outputs": {"grammar": 'root ::= "abc"'}},
        {"guided_regex": "[a-c]+"},
        {"guided_choice": ["abc"]},
        {"guided_grammar": 'root ::= "abc"'},
        {"regex": "[a-c]+"},
        {"ebnf": 'root ::= "abc"'},
    ],
)
async def test_constraints_bind_every_endpoint(server: Server, path: str, fields: dict[str, Any]) -> None:
    await answer_of(server, path, **fields)
    assert accepts(server, "abc")
    assert not accepts(server, "xyz")


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
        {"response_format": {"type": "json_schema", "json_schema": EMPTY_SCHEMA}},
    ],
)
async def test_json_schemas_bind_every_endpoint(server: Server, path: str, fields: dict[str, Any]) -> None:
    await answer_of(server, path, **fields)
    assert accepts(server, '{"a": 1}')
    assert not accepts(server, '{"a": "x"}')


async def test_two_formats_of_a_response_are_refused(server: Server) -> None:
    form = {"type": "json_object"}
    response = await server.post(RESPONSES, {"input": "hi", "text": {"format": form}, "response_format": form})
    assert response.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "guided_json"])
async def test_an_invalid_constraint_of_a_response_is_named(server: Server, field: str) -> None:
    schema = {"type": "nonsense"}
    value = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "structured_outputs": {"json": schema},
        "guided_json": schema,
    }[field]
    response = await server.post(RESPONSES, {"input": "hi", field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


NO_SPACE, ONE_SPACE, TABS = '{"a":1}', '{"a": 1}', '{\t"a":\t1\t}'


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, {NO_SPACE, ONE_SPACE}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, {NO_SPACE}),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, {NO_SPACE}),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"\t?"}}, {NO_SPACE, TABS}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": r"\t?"}, {NO_SPACE, TABS}),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": EMPTY_SCHEMA},
                "structured_outputs": {"disable_any_whitespace": True},
            },
            {NO_SPACE},
        ),
        ({"response_format": {"type": "json_object"}, "guided_whitespace_pattern": r"\t?"}, {NO_SPACE, TABS}),
    ],
)
async def test_the_whitespace_of_json_is_as_asked(
    server: Server, path: str, fields: dict[str, Any], allowed: set[str]
) -> None:
    await answer_of(server, path, **fields)
    assert {text for text in (NO_SPACE, ONE_SPACE, TABS) if accepts(server, text)} == allowed


async def test_additional_properties_are_forbidden_where_the_schema_says_nothing(server: Server) -> None:
    schema = {"type": "object", "properties": {"b": SCHEMA}, "required": ["b"]}
    await answer_of(server, CHAT, structured_outputs={"json": schema})
    assert accepts(server, '{"b": {"a": 1, "c": 2}, "d": 3}')
    await answer_of(server, CHAT, structured_outputs={"json": schema, "disable_additional_properties": True})
    assert accepts(server, '{"b": {"a": 1}}')
    assert not accepts(server, '{"b": {"a": 1, "c": 2}}')
    assert not accepts(server, '{"b": {"a": 1}, "d": 3}')


async def test_a_closed_schema_keeps_what_is_no_schema() -> None:
    schema = {
        "properties": {"properties": {"enum": [{"properties": {}}]}, "x": {"items": [{"properties": {"y": True}}]}},
        "additionalProperties": True,
    }
    assert closed(schema) == {
        "properties": {
            "properties": {"enum": [{"properties": {}}]},
            "x": {"items": [{"properties": {"y": True}, "additionalProperties": False}]},
        },
        "additionalProperties": True,
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "("}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": 5}}, "structured_outputs.whitespace_pattern"),
        ({"guided_whitespace_pattern": r"\s*"}, "guided_whitespace_pattern"),
    ],
)
async def test_switches_of_json_without_json_are_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    response = await server.post(CHAT, {"messages": USER, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# -- stops


@pytest.mark.parametrize("path", LEAST)
async def test_a_match_of_a_stop_pattern_ends_the_text(server: Server, path: str) -> None:
    server.engine.script = Script("call 555-1234 now")
    assert await text_of(server, path, stop_regex=r"\d{3}-") == "call "
    assert await text_of(server, path, stop_regex=["x+", r"\d{3}-"], include_stop_str_in_output=True) == "call 555-"
    assert await text_of(server, path, stop_regex=r"\d+ now", stop=["34"]) == "call 555-12"
    assert await text_of(server, path, stop_regex="zzz") == "call 555-1234 now"


async def test_the_reason_is_the_pattern(server: Server) -> None:
    server.engine.script = Script("abc")
    (choice,) = (await answer_of(server, CHAT, stop_regex="b+", n=1))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "b+")


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize(
    "pattern", ["(", "a*", "(?=a)b", r"(a)\1", "^a", r"\bx", "a{1000}", "(a{50}){50}", 5, [""], ["a", 5], "a" * 2000]
)
async def test_a_stop_pattern_that_cannot_work_is_refused(server: Server, path: str, pattern: Any) -> None:
    response = await server.post(path, {**LEAST[path], "stop_regex": pattern})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stop_regex"), response.text


@pytest.mark.parametrize("path", LEAST)
async def test_sixty_four_stop_strings(server: Server, path: str) -> None:
    server.engine.script = Script("hello world")
    assert await text_of(server, path, stop=["zzz"] * 63 + ["wor"]) == "hello "


async def test_the_stop_string_and_special_tokens_of_a_response_are_shown(server: Server) -> None:
    server.engine.script = Script(ids=server.engine.tokenizer.encode("a<|user|>b", add_special_tokens=False))
    assert await text_of(server, RESPONSES) == "ab"
    assert await text_of(server, RESPONSES, skip_special_tokens=False, ignore_eos=True) == "a<|user|>b"
    server.engine.script = Script("hello world")
    assert await text_of(server, RESPONSES, stop="wor", include_stop_str_in_output=True) == "hello wor"


# -- log-probabilities


async def test_logit_bias_of_a_response(server: Server) -> None:
    await answer_of(server, RESPONSES, logit_bias={"5": 2, "7": -1.5})
    assert server.engine.added[-1].params.logit_bias == {5: 2.0, 7: -1.5}
    response = await server.post(RESPONSES, {"input": "hi", "logit_bias": {"x": 2}})
    assert response.json()["error"]["param"] == "logit_bias"


@pytest.mark.parametrize("top", [1, 2])
async def test_a_response_has_at_most_as_many_logprobs_as_asked(server: Server, top: int) -> None:
    answer = await answer_of(server, RESPONSES, top_logprobs=top)
    (part,) = answer["output"][0]["content"]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {top}


async def test_logprobs_of_requested_tokens(server: Server) -> None:
    server.engine.script = Script("h")
    sampled = server.engine.tokenizer.encode("h", add_special_tokens=False)[0]
    asked = {"logprob_token_ids": [9, 11, 9], "return_tokens_as_token_ids": True}
    chat = await answer_of(server, CHAT, logprobs=True, top_logprobs=5, **asked)
    params = server.engine.added[-1].params
    assert (params.logprobs, params.logprob_token_ids) == (0, (9, 11))
    first = chat["choices"][0]["logprobs"]["content"][0]
    assert [entry["token"] for entry in first["top_logprobs"]] == ["token_id:9", "token_id:11", f"token_id:{sampled}"]
    completion = await answer_of(server, COMPLETIONS, logprobs=5, **asked)
    best = completion["choices"][0]["logprobs"]["top_logprobs"][0]
    assert set(best) == {"token_id:9", "token_id:11", f"token_id:{sampled}"}
    response = await answer_of(server, RESPONSES, top_logprobs=1, logprob_token_ids=[9, 11])
    assert len(response["output"][0]["content"][0]["logprobs"][0]["top_logprobs"]) == 3


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"logprob_token_ids": [1]}),
        (COMPLETIONS, {"logprob_token_ids": [99999]}),
        (COMPLETIONS, {"logprob_token_ids": list(range(129))}),
        (RESPONSES, {"logprob_token_ids": [99999]}),
        (CHAT, {"logprob_token_ids": ["x"], "logprobs": True}),
    ],
)
async def test_impossible_requested_tokens_are_refused(server: Server, path: str, fields: dict[str, Any]) -> None:
    response = await server.post(path, {**LEAST[path], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprob_token_ids"), response.text


# -- other deviations


@pytest.mark.parametrize("n", [1, 2])
async def test_the_role_chunk_counts_no_token_and_the_others_count_up(server: Server, n: int) -> None:
    server.engine.script = Script("abcd")
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await server.post(CHAT, {"messages": USER, "stream": True, "stream_options": options, "n": n})
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert chunks[0]["usage"]["total_tokens"] == chunks[0]["usage"]["prompt_tokens"]
    content = [
        count for chunk, count in zip(chunks[:-1], counts, strict=False) if "role" not in chunk["choices"][0]["delta"]
    ]
    assert content == list(range(1, 1 + 5 * n))


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63, 2.0**63, -(2.0**70), 2.0**54])
async def test_a_seed_beyond_64_bits_or_of_unclear_value_is_refused(server: Server, path: str, seed: float) -> None:
    response = await server.post(path, {**LEAST[path], "seed": seed})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "seed"), response.text


async def test_the_least_and_greatest_seeds_are_exact(server: Server) -> None:
    for seed in (-(2**63), 2**63 - 1):
        await answer_of(server, COMPLETIONS, seed=seed)
        assert server.engine.added[-1].params.seed == seed


# -- templates and thinking


@pytest.fixture
def template(server: Server) -> Any:
    """Sets the chat template."""
    hf = server.engine.tokenizer._hf
    own = hf.chat_template
    yield lambda text: setattr(hf, "chat_template", own + text)
    hf.chat_template = own


def prompt_of(server: Server) -> str:
    return str(server.engine.tokenizer._hf.decode(server.engine.prompt()))


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"thinking": True}, "True"),
        ({"thinking": False}, "False"),
        ({"thinking": {"type": "enabled"}}, "True"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "adaptive"}}, "none"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": True}, "True"),
        ({}, "none"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_thinking_switches_the_template(
    server: Server, template: Any, path: str, fields: dict[str, Any], shown: str
) -> None:
    template("{{ enable_thinking | default('none') }}")
    await answer_of(server, path, **fields)
    assert prompt_of(server).endswith(shown)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": True, "enable_thinking": False},
        {"thinking": {"type": "disabled"}, "enable_thinking": True},
        {"thinking": "yes"},
        {"thinking": {"type": "some"}},
    ],
)
async def test_unclear_thinking_is_refused(server: Server, fields: dict[str, Any]) -> None:
    response = await server.post(CHAT, {"messages": USER, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("thinking")


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"thinking_token_budget": 7},
        {"max_thinking_tokens": 7},
        {"thinking_budget_tokens": 7},
    ],
)
async def test_thinking_has_a_budget_under_every_name(thinking: Server, fields: dict[str, Any]) -> None:
    await answer_of(thinking, CHAT, **fields)
    limit = thinking.engine.added[-1].params.thinking
    assert limit is not None
    assert limit.budget == 7


async def test_completions_and_responses_have_a_thinking_budget(thinking: Server) -> None:
    for path in (COMPLETIONS, RESPONSES):
        await answer_of(thinking, path, thinking_token_budget=7)
        limit = thinking.engine.added[-1].params.thinking
        assert limit is not None
        assert limit.budget == 7
        assert limit.begin  # the prompt does not think yet
        await answer_of(thinking, path)
        assert thinking.engine.added[-1].params.thinking is None
    response = await thinking.post(COMPLETIONS, {"prompt": "hi", "thinking_token_budget": "zzz"})
    assert response.json()["error"]["param"] == "thinking_token_budget"


async def test_messages_have_template_variables(server: Server, template: Any) -> None:
    template("{{ mood }}")
    body = {"messages": USER, "max_tokens": 2, "chat_template_kwargs": {"mood": "glad"}}
    assert (await server.post(MESSAGES, body)).status_code == 200
    assert prompt_of(server).endswith("glad")
    counted = await server.post(f"{MESSAGES}/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    assert counted.json()["input_tokens"] == len(server.engine.prompt())
    response = await server.post(MESSAGES, {**body, "chat_template_kwargs": "glad"})
    assert response.status_code == 400
    assert "chat_template_kwargs" in response.json()["error"]["message"]


async def test_continue_final_message_needs_nothing_else(server: Server) -> None:
    messages = [*USER, {"role": "assistant", "content": "I say"}]
    await answer_of(server, CHAT, messages=messages, continue_final_message=True)
    assert prompt_of(server).endswith("I say")
    tokens = (await server.post("/tokenize", {"messages": messages, "continue_final_message": True})).json()["tokens"]
    assert tokens == server.engine.prompt()


async def test_tokenize_leaves_out_tools_that_must_not_be_called(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": USER, "tools": [tool]}
    counts = [
        (await server.post("/tokenize", {**body, **more})).json()["count"] for more in ({}, {"tool_choice": "none"})
    ]
    assert counts[0] > counts[1] == (await server.post("/tokenize", {"messages": USER})).json()["count"]


# -- embeddings


async def embedded(server: Server, **fields: Any) -> tuple[list[int], np.ndarray]:
    """The prompt of an embedding, and the embedding."""
    response = await server.post(EMBEDDINGS, fields)
    assert response.status_code == 200, response.text
    return server.engine.prompt(), np.array(response.json()["data"][0]["embedding"])


async def test_inputs_of_embeddings_are_truncated(server: Server) -> None:
    text = "abcdefghij" * 100
    ids = server.engine.tokenizer.encode(text)
    assert (await server.post(EMBEDDINGS, {"input": text})).status_code == 400
    assert (await embedded(server, input=text, truncate_prompt_tokens=9))[0] == ids[:9]
    assert (await embedded(server, input=text, truncate_prompt_tokens=9, truncation_side="left"))[0] == ids[-9:]
    assert (await embedded(server, input=text, truncate_prompt_tokens=-1))[0] == ids[:MAX_MODEL_LEN]
    assert (await embedded(server, input=ids, truncate_prompt_tokens=9, truncation_side="left"))[0] == ids[-9:]
    assert (await embedded(server, input="abc", truncate_prompt_tokens=900))[0] == ids[:3]
    for field, value in (("truncate_prompt_tokens", -2), ("truncation_side", "middle"), ("truncate_prompt_tokens", 0)):
        response = await server.post(EMBEDDINGS, {"input": text, field: value})
        assert response.status_code == 400


async def test_truncation_keeps_the_end_token_that_embeddings_need() -> None:
    assert Truncation(3, "right").ids([1, 2, 3, 4, 9], None, [9]) == [1, 2, 9]
    assert Truncation(3, "right").ids([1, 2, 3, 4, 5], None, [9]) == [1, 2, 3]
    assert Truncation(1, "right").ids([1, 2, 8, 9], None, [8, 9]) == [9]
    assert Truncation(3, "left").ids([1, 2, 3, 4, 9], 1, [9]) == [1, 4, 9]


async def test_messages_are_embedded_as_the_template_writes_them(server: Server) -> None:
    prompt, _ = await embedded(server, messages=USER)
    assert server.engine.tokenizer._hf.decode(prompt) == "<|bos|><|user|>hi"
    prompt, vector = await embedded(server, messages=USER, add_generation_prompt=True)
    assert server.engine.tokenizer._hf.decode(prompt) == "<|bos|><|user|>hi<|assistant|>"
    state = state_of(prompt)
    np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-6)
    prompt, _ = await embedded(server, messages=USER, truncate_prompt_tokens=2, truncation_side="left")
    assert len(prompt) == 2
    for fields in ({"messages": USER, "input": "a"}, {}, {"messages": []}, {"messages": USER, "prompt_name": "q"}):
        assert (await server.post(EMBEDDINGS, fields)).status_code == 400


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
async def test_embeddings_keep_their_length_if_asked(server: Server, name: str) -> None:
    prompt, vector = await embedded(server, input="abc", **{name: False})
    np.testing.assert_allclose(vector, state_of(prompt), atol=1e-6)
    _, vector = await embedded(server, input="abc", dimensions=4, **{name: True})
    np.testing.assert_allclose(vector, state_of(prompt)[:4] / np.linalg.norm(state_of(prompt)[:4]), atol=1e-6)
