"""Fields of other servers (`peer_fields.json`) work or are refused by name; unknown fields are reported."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import claude_code
import pytest
from stub import Script, Server, serving

from weft.server.api import other_fields
from weft.server.api.embeddings import EmbeddingBody
from weft.server.api.llama_cpp import LlamaBody
from weft.server.api.messages_protocol import CountTokensBody, MessagesBody
from weft.server.api.ollama_protocol import EmbedBody, GenerateBody, OllamaChatBody, Options
from weft.server.api.protocol import ChatBody, CompletionBody, DetokenizeBody, StreamOptions, TokenizeBody
from weft.server.api.responses.body import ResponseBody
from weft.server.api.scores import ClassifyBody, PoolingBody, RerankBody, ScoreBody
from weft.server.bodies import Body
from weft.server.tools.structured import JsonSchemaFormat, ResponseFormat, StructuredOutputs

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
RERANK, SCORE = "/v1/rerank", "/v1/score"
USER = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": USER},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 9},
    EMBEDDINGS: {"input": "hi"},
}
SCORED: dict[str, dict[str, Any]] = {RERANK: {"query": "a", "documents": ["b"]}, SCORE: {"text_1": "a", "text_2": "b"}}
"""For a model that scores."""
BODIES: dict[str, type[Body]] = {
    COMPLETIONS: CompletionBody,
    CHAT: ChatBody,
    RESPONSES: ResponseBody,
    MESSAGES: MessagesBody,
    EMBEDDINGS: EmbeddingBody,
    RERANK: RerankBody,
    SCORE: ScoreBody,
    "/classify": ClassifyBody,
    "/pooling": PoolingBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/completion": LlamaBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": GenerateBody,
    "/api/embed": EmbedBody,
    "options": Options,
    "structured_outputs": StructuredOutputs,
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
    "json_schema": JsonSchemaFormat,
}
PEERS: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "peer_fields.json").read_text())


def path_of(place: str, name: str) -> str:
    return name if place.startswith("/") else f"{place}.{name}"


def works(place: str, name: str) -> bool:
    """A body declares the field, or it is another name of a declared one, or the answer is the same without it."""
    body, path = BODIES[place], path_of(place, name)
    targets = other_fields.ALIASES.get(name, ())
    return name in body.attributes or path in other_fields.NO_EFFECT or any(t in body.attributes for t in targets)


@pytest.mark.parametrize(("server", "place"), [(server, place) for server, places in PEERS.items() for place in places])
async def test_every_field_of_other_servers_works_or_is_refused(server: str, place: str) -> None:
    names = PEERS[server][place].split()
    assert names
    for name in names:
        path = path_of(place, name)
        why = other_fields.refusal(BODIES[place], path, "a value that asks for something")
        assert works(place, name) or (why is not None and why.startswith(f"{path} is not supported")), name


async def test_the_tables_have_no_field_twice() -> None:
    names = [name for names in other_fields._GROUPS for name in names.split()]
    assert len(names) == len(set(names))
    assert not set(names) & (other_fields.NO_EFFECT | other_fields.ALIASES.keys())
    assert set(names) >= other_fields._HARMLESS.keys()
    for name, targets in other_fields.ALIASES.items():
        assert any(target in body.attributes for body in BODIES.values() for target in targets), name


PAGE = (Path(__file__).parents[2] / "docs" / "request-fields.md").read_text(encoding="utf-8")
LETTERS = {"C": CHAT, "P": COMPLETIONS, "R": RESPONSES, "M": MESSAGES, "E": EMBEDDINGS}


async def test_the_page_of_request_fields_is_right() -> None:
    working, refused = PAGE.split("## Stop patterns")
    rows = re.findall(r"^\| (`.*?) \| ([CPRME ]+) \|", working, re.M)
    assert len(rows) > 10
    for names, letters in rows:
        for name in re.findall(r"`(\w+)`", names):
            nested = name in StructuredOutputs.attributes and name != "regex" and name != "grammar"
            for place in ["structured_outputs"] if nested else [LETTERS[letter] for letter in letters.split()]:
                assert name in BODIES[place].attributes, (name, place)
    other_names = working[working.index("| other names |") :]
    assert all(f"`{name}`" in other_names for name in other_fields.ALIASES)
    listed = [name for cell in re.findall(r"^\| (`.*?) \|", refused, re.M) for name in re.findall(r"`(\w+)", cell)]
    assert len(listed) > 20
    assert set(listed) <= other_fields.REFUSED.keys()


REFUSED: dict[str, Any] = {
    "lora_request": "adapter", "input_ids": [1, 2], "custom_logit_processor": "x", "session_params": {"id": "a"},
    "return_hidden_states": True, "return_meta_info": True, "return_prompt_token_ids": True, "data_parallel_rank": 0,
    "extra_key": "x", "separate_reasoning": False, "stream_reasoning": False, "repetition_detection": {"max": 3},
    "vllm_xargs": {"a": 1}, "return_token_offsets": True, "return_prompt_text": True, "stream_interval": 4,
    "watermarking": {"key": 1}, "embed_dtype": "float16", "padding": "max_length", "repeat_penalty": 1.3,
    "dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.5, "mirostat": 2, "dynatemp_range": 0.5,
    "top_n_sigma": 1.0, "samplers": ["top_k"], "n_probs": 3, "cache_prompt": False, "options": {"temperature": 0},
    "format": "json", "kv_transfer_params": {"do_remote_decode": True}, "use_beam_search": True, "suffix": "end",
    "previous_input_messages": [{}], "enable_response_messages": True, "mcp_servers": [{}], "logits_processors": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("name", REFUSED)
async def test_a_field_that_would_change_the_answer_is_refused_by_name(server: Server, path: str, name: str) -> None:
    response = await server.post(path, {**LEAST[path], name: REFUSED[name]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(f"{name} is not supported")
    assert path == MESSAGES or (error["param"], error["code"]) == (name, "unsupported_field")
    assert server.engine.added == []


@pytest.mark.parametrize(
    ("path", "name", "value", "instead"),
    [
        (RESPONSES, "reasoning_effort", "low", "reasoning.effort"),
        (RESPONSES, "prompt", {"id": "pmpt_1"}, "instructions and input"),
        (MESSAGES, "structured_outputs", {"json": {}}, "output_config.format"),
        (MESSAGES, "stop_regex", "a", CHAT),
        (MESSAGES, "parallel_tool_calls", False, "disable_parallel_tool_use"),
        (MESSAGES, "include_reasoning", False, "use thinking"),
        (EMBEDDINGS, "structured_outputs", {"json": {}}, CHAT),
        (EMBEDDINGS, "temperature", 0.5, COMPLETIONS),
        (COMPLETIONS, "tools", [{}], CHAT),
        (COMPLETIONS, "top_logprobs", 3, CHAT),
        (RERANK, "temperature", 0.5, COMPLETIONS),
        (RERANK, "rank_fields", ["title"], "join the fields"),
        (RERANK, "truncation", True, "max_tokens_per_doc"),
        (RERANK, "text_1", "a", SCORE),
        (SCORE, "top_n", 3, RERANK),
        (CHAT, "query", "a", RERANK),
    ],
)
async def test_a_field_of_another_endpoint_is_refused_with_its_place(
    server: Server, path: str, name: str, value: Any, instead: str
) -> None:
    response = await server.post(path, {**{**LEAST, **SCORED}[path], name: value})
    assert response.status_code == 400, response.text
    assert instead in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_values_that_ask_for_nothing_pass(server: Server, path: str) -> None:
    asked = {
        "repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "cache_prompt": True, "top_n_sigma": -1,
        "dry_multiplier": 0.0, "use_beam_search": False, "lora_path": None, "kv_transfer_params": None,
        "spaces_between_special_tokens": True, "guided_decoding_backend": "xgrammar", "service_tier": "auto",
        "logits_processors": [], "stream_interval": 1,
    }  # fmt: skip
    response = await server.post(path, {**LEAST[path], **asked})
    assert response.status_code == 200, response.text
    assert other_fields.IGNORED_HEADER not in response.headers


@pytest.mark.parametrize(
    ("path", "alias", "value", "field", "taken"),
    [
        (CHAT, "max_new_tokens", 3, "max_tokens", 3),
        (COMPLETIONS, "max_completion_tokens", 3, "max_tokens", 3),
        (RESPONSES, "max_tokens", 3, "max_tokens", 3),
        (RESPONSES, "max_completion_tokens", 3, "max_tokens", 3),
    ],
)
async def test_other_names_of_a_field_work(
    server: Server, path: str, alias: str, value: Any, field: str, taken: Any
) -> None:
    response = await server.post(path, {**LEAST[path], alias: value})
    assert response.status_code == 200, response.text
    assert getattr(server.engine.added[-1].params, field) == taken


async def test_other_names_stop_and_name_requests(server: Server) -> None:
    server.engine.script = Script("hello world")
    response = await server.post(CHAT, {"messages": USER, "stop_sequences": [" w"], "rid": "mine"})
    assert response.json()["choices"][0]["message"]["content"] == "hello"
    assert response.headers["x-request-id"] == "mine"


async def test_an_invalid_value_is_named_as_the_client_wrote_it(server: Server) -> None:
    response = await server.post(CHAT, {"messages": USER, "max_new_tokens": "x"})
    assert response.json()["error"]["param"] == "max_new_tokens"


async def test_two_names_of_a_field_are_refused(server: Server) -> None:
    response = await server.post(CHAT, {"messages": USER, "max_new_tokens": 3, "max_tokens": 4})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_new_tokens"


UNKNOWN = {
    "frobnicate": 1,
    "stream_options": {"include_usage": True, "including_usage": 1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}, "strct": True}},
    "stream": True,
    "nothing": None,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}, "x_custom": 1}],
    "tool_choice": "none",
    "logit_bias": {"5": 1},
    "chat_template_kwargs": {"mood": 1},
}
NAMES = "frobnicate, messages[].custom, response_format.json_schema.strct, stream_options.including_usage"


@pytest.mark.parametrize("size", [2, 300_000])
async def test_unknown_fields_are_reported_in_a_header_and_once_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(other_fields, "_logged", set())
    monkeypatch.setattr(server.service.loaded.text, "_check_length", lambda *_: None)
    body = {"messages": [{"role": "user", "content": "a " * (size // 2), "custom": 1}], **UNKNOWN}
    body["truncate_prompt_tokens"] = 9
    with caplog.at_level(logging.WARNING, logger=other_fields.__name__):
        for _ in range(2):
            response = await server.post(CHAT, body)
            assert response.status_code == 200, response.text
            assert response.headers[other_fields.IGNORED_HEADER] == NAMES
    assert [record.getMessage() for record in caplog.records if record.name == other_fields.__name__] == [
        f"{CHAT} ignores the unknown field {name}" for name in NAMES.split(", ")
    ]


async def test_the_header_has_no_text_that_a_header_cannot_have(server: Server) -> None:
    body = {"prompt": "hi", "a\r\nset-cookie: x": 1, "é,": 1, "x" * 500: 1, **{f"y{i}": 1 for i in range(50)}}
    response = await server.post(COMPLETIONS, body)
    assert response.status_code == 200
    names = response.headers[other_fields.IGNORED_HEADER].split(", ")
    assert names[0] == "a??set-cookie: x"
    assert len(names) == other_fields.MAX_REPORTED
    assert max(map(len, names)) <= 100


@pytest.mark.parametrize("path", LEAST)
async def test_every_endpoint_reports_unknown_fields(server: Server, path: str) -> None:
    response = await server.post(path, {**LEAST[path], "frobnicate": 1})
    assert response.headers[other_fields.IGNORED_HEADER] == "frobnicate"
    response = await server.post(path, LEAST[path])
    assert other_fields.IGNORED_HEADER not in response.headers


async def test_strict_fields_refuse_unknown_fields() -> None:
    async with serving(strict_fields=True) as server:
        for path, least in LEAST.items():
            response = await server.post(path, {**least, "frobnicate": 1})
            assert response.status_code == 400
            assert "frobnicate" in response.json()["error"]["message"]
            assert (await server.post(path, {**least, "service_tier": "auto", "nothing": None})).status_code == 200
        response = await server.post(CHAT, {"messages": USER, "stream": True, "stream_options": {"including_usage": 1}})
        assert response.json()["error"]["param"] == "stream_options.including_usage"


async def test_requests_of_agents_and_returned_answers_have_no_unknown_field() -> None:
    codex = json.loads((Path(__file__).parent / "fixtures" / "codex.json").read_text())
    async with serving(strict_fields=True) as server:
        message = (await server.chat())["choices"][0]["message"]
        returned = {**message, "annotations": [], "audio": None, "function_call": None}
        await server.chat(messages=[*USER, returned, *USER])
        agents = [(MESSAGES, claude_code.request(claude_code.TRANSCRIPT, "00001"))]
        agents += [(RESPONSES, {**codex["request"], "input": turn}) for turn in codex["turns"]]
        assert len(agents) > 1
        for path, body in agents:
            assert "unknown" not in (await server.post(path, {**body, "model": "stub"})).text.lower()
