"""Refused requests: the right status, the error body, the field at fault, and before the engine receives them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from stub import Server, serving

from weft.server.errors import translate

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert len(body["error"]["message"]) < 500
    return body["error"]


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


COMMON = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 2.5}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"priority": "high"}, "priority"),
    ({"user": 7}, "user"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "schema": {"type": "object"}}}, "response_format"),
    ({"response_format": {"type": "json_object", "triggers": ["x"]}}, "response_format"),
    ({"response_format": {**schema_format({"type": "object"}), "schema": {"type": "array"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"type": "nonsense"})}, "response_format"),
    ({"response_format": schema_format({"not": {}})}, "response_format"),
    ({"response_format": schema_format({"$ref": "http://127.0.0.1/secret"})}, "response_format"),
    ({"response_format": schema_format({"$ref": "file:///etc/passwd"})}, "response_format"),
    ({"response_format": schema_format([])}, "response_format.json_schema.schema"),
    ({"response_format": schema_format({"enum": ["x" * 70_000]})}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a*", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logits_processors": ["numpy.exp"]}, "logits_processors"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": "x"}, "bad_words"),
    ({"allowed_token_ids": [1] * 5000}, "allowed_token_ids"),
    ({"allowed_token_ids": ["1"]}, "allowed_token_ids"),
    ({"bad_words": ["x" * 1000] * 20}, "bad_words"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": {"type": 5}}, "guided_json"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "structured_outputs"),
]
OF_COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": [2**64]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ({"suffix": "the end"}, "suffix"),
    ({"truncate_prompt_tokens": 0}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]
OF_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "a wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages[].prefix"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "42"}]}, "messages"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tools": [tool("f")] * 129}, "tools"),
    ({"tools": [tool("f")]}, "tools"),
    ({"tools": [tool("f")], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [tool("f", type="nonsense")], "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice"),
    (
        {"tools": [tool("f")], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"name": "g"}]}}},
        "tool_choice",
    ),
    ({"tools": [{"type": "custom"}]}, "tools[0]"),
    ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]}, "tools[0]"),
    ({"tools": [tool("f")], "tool_choice": 5}, "tool_choice"),
    ({"tools": [tool("f")], "tool_choice": [[]]}, "tool_choice"),
    ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"modalities": "audio"}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"function_call": "auto"}, "function_call"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs"),
    ({"documents": ["text"]}, "documents[0]"),
    ({"messages": USER * 8193}, "messages"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]


@pytest.mark.parametrize(("extra", "param"), COMMON + OF_COMPLETIONS, ids=str)
async def test_bad_completion_fields(server: Server, extra: dict[str, Any], param: str) -> None:
    error = error_of(await server.post(COMPLETIONS, {"prompt": "hi", **extra}), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert server.engine.added == []


@pytest.mark.parametrize(("extra", "param"), COMMON + OF_CHAT, ids=str)
async def test_bad_chat_fields(server: Server, extra: dict[str, Any], param: str) -> None:
    error = error_of(await server.post(CHAT, {"messages": USER, **extra}), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert server.engine.added == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a", 5]}, "prompt"),
        (CHAT, {"messages": USER, "thinking_token_budget": -1}, "thinking_token_budget"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2**18}, {}]}, "messages[1].role"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": 5}]},
         "tools[0].parameters"),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/v1/messages", {"max_tokens": 9, "messages": USER, "system": [{"type": "text"}]}, "system[0].text"),
        ("/v1/messages",
         {"max_tokens": 9, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a",
          "name": "f", "input": 5}]}]},
         "messages[0].content[0].input"),
    ],
)  # fmt: skip
async def test_an_errors_path_matches_the_body(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    response = await server.post(path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(f"{param}: ")
    assert error.get("param", param) == param


async def test_unknown_model_is_404_with_param(server: Server) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": USER}), ("/tokenize", {"prompt": "hi"})):
        error = error_of(await server.post(path, {**body, "model": "gpt-9"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    error_of(await server.http.get("/v1/models/gpt-9"), 404)


async def test_long_values_are_not_echoed(server: Server) -> None:
    error = error_of(await server.post(COMPLETIONS, {"prompt": "hi", "model": "m" * 10_000}), 404)
    assert "m" * 150 in error["message"]
    assert "m" * 201 not in error["message"]


@pytest.mark.parametrize("prompt", [[False], [None], [{}], [0.0], [0, False]])
async def test_a_prompt_of_another_kind_is_not_called_empty(server: Server, prompt: list[object]) -> None:
    error = error_of(await server.post(COMPLETIONS, {"prompt": prompt}), 400)
    assert "must be a string, a list of strings" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_output_beyond_the_context_name_the_numbers(server: Server, stream: bool) -> None:
    body = {"prompt": [1] * 500, "max_tokens": 13, "stream": stream}
    error = error_of(await server.post(COMPLETIONS, body), 400)
    assert error["code"] == "context_length_exceeded"
    for number in ("512", "513", "500", "13"):
        assert number in error["message"]
    error = error_of(await server.post(COMPLETIONS, {"prompt": [1] * 512, "stream": stream}), 400)
    assert error["code"] == "context_length_exceeded"
    content = [{"role": "user", "content": "x" * 600}]
    error = error_of(await server.post(CHAT, {"messages": content, "stream": stream}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_text_that_can_never_fit_is_refused_untokenized(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.tokenizer, "encode", lambda *_, **__: pytest.fail("was tokenized"))
    error = error_of(await server.post(COMPLETIONS, {"prompt": "x" * 100_000}), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"hi"',
        b"null",
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": Infinity}',
        b'{"prompt": "hi", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
    ],
    ids=lambda body: body[:40].decode(errors="replace"),
)
async def test_bodies_that_are_not_a_json_object(server: Server, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error_of(await server.http.post(COMPLETIONS, content=body, headers=headers), 400)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_json_that_does_not_parse_is_reported_as_such(server: Server, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    error = error_of(await server.http.post(path, content=b'{"a":', headers=headers), 400)
    assert error["code"] == "invalid_json"
    assert error["message"].startswith("The body is not valid JSON")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
async def test_wrong_content_type(server: Server, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    error = error_of(await server.http.post(COMPLETIONS, content=b'{"prompt":"hi"}', headers=headers), 400)
    assert error["code"] == "wrong_content_type"


async def test_content_type_with_parameters_is_fine(server: Server) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    response = await server.http.post(COMPLETIONS, content=b'{"prompt":"hi"}', headers=headers)
    assert response.status_code == 200


async def test_unknown_paths_and_methods(server: Server) -> None:
    error_of(await server.http.get("/nothing/here"), 404)
    error_of(await server.http.get(COMPLETIONS), 405)
    error_of(await server.http.post("/admin/reset_prefix_cache"), 404)


async def test_missing_chat_template() -> None:
    async with serving() as server:
        server.engine.tokenizer._hf.chat_template = None
        error = error_of(await server.post(CHAT, {"messages": USER}), 400)
        assert error["code"] == "no_chat_template"


async def test_a_broken_chat_template_is_not_the_clients_fault() -> None:
    async with serving() as server:
        server.engine.tokenizer._template_fault = "line 2: unexpected '}'"
        error = error_of(await server.post(CHAT, {"messages": USER}), 500)
        assert error["code"] == "broken_chat_template"
        assert (await server.post(COMPLETIONS, {"prompt": "hi"})).status_code == 200


async def test_a_large_body_is_413_by_its_length_and_while_it_streams_in() -> None:
    async with serving(max_body_mib=0.5) as server:
        big = b'{"prompt": "' + b"x" * 2**20 + b'"}'
        headers = {"Content-Type": "application/json"}
        error_of(await server.http.post(COMPLETIONS, content=big, headers=headers), 413)

        async def chunks() -> Any:
            for at in range(0, len(big), 2**16):
                yield big[at : at + 2**16]

        error_of(await server.http.post(COMPLETIONS, content=chunks(), headers=headers), 413)
        assert (await server.http.get("/health")).status_code == 200


async def test_a_server_error_is_a_500_with_the_error_body(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.loaded.text, "encode", lambda *_, **__: 1 / 0)
    error = error_of(await server.post(COMPLETIONS, {"prompt": "hi"}), 500)
    assert error["message"] == "Internal server error."


async def test_text_may_have_the_type_of_an_answers_part(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as http:
        body = {"messages": USER, "modalities": ["text"], "audio": None, "max_tokens": 2}
        assert (await http.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("where", "body", "param"),
    [
        (("prompt", "str"), {"prompt": [1.5]}, "prompt"),
        (("messages", 0, "content"), {"input": "hi"}, "messages[0].content"),  # made of another field
        (("content", "list", 0, "text", "mark"), {"content": [{"text": "a", "mark": 1}]}, "content[0].mark"),
        (("content", 0, "text", "text"), {"content": [{"text": 5}]}, "content[0].text"),
        (("messages", 7, "content"), {"messages": [{"content": 5}]}, "messages"),
        (("messages", 0, "mark", "ttl"), {"messages": [{"parts": [{}, {"mark": {"ttl": 1}}]}]},
         "messages[0].parts[1].mark.ttl"),
        (("messages", 0, "mark"), {"messages": [{"parts": [{"mark": 1}, {"mark": 2}]}]}, "messages[0].parts.mark"),
    ],
)  # fmt: skip
async def test_an_errors_path_is_one_of_the_body(where: Any, body: Any, param: str) -> None:
    wrong = {"type": "literal_error", "loc": ("body", *where), "msg": "Input should be another"}
    assert translate(RequestValidationError([wrong], body=body)).param == param
