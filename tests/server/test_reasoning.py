"""Thinking through the chat endpoint: separate from the answer, before calls and constraints, bounded, and passed back
to the template."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer
from stub import Script, Server, serving
from vocabularies import byte_level, wrapped

from weft.server.api.chat_message import ChatMessage
from weft.server.api.protocol import ChatBody
from weft.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

THOUGHT = "<think>\nHm, so.\n</think>\n\nhello world"
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _server() -> AsyncIterator[Server]:
    async with serving(reasoning_parser="qwen3", tool_call_parser="hermes") as server:
        yield server


@pytest.fixture
def server(_server: Server) -> Server:
    _server.engine.script = Script(THOUGHT)
    _server.engine.added.clear()
    return _server


async def streamed(server: Server, **body: Any) -> tuple[dict[str, str], list[dict[str, Any]], Any]:
    """All deltas joined by field, all chunks' choices, the usage."""
    messages = [{"role": "user", "content": "hi"}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await server.post("/v1/chat/completions", {"messages": messages, **options, **body})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    joined: dict[str, str] = {}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in choices:
        for name, text in choice["delta"].items():
            if isinstance(text, str):
                joined[name] = joined.get(name, "") + text
    return joined, choices, chunks[-1]["usage"]


async def test_thinking_is_separate_from_the_content(server: Server) -> None:
    answer = await server.chat()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == (
        "hello world",
        "Hm, so.",
        "Hm, so.",
    )
    tokenizer = server.service.loaded.tokenizer
    thought = len(tokenizer.encode("\nHm, so.\n", add_special_tokens=False))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


async def test_logprobs_have_an_entry_for_each_token_of_reasoning_and_content(server: Server) -> None:
    answer = await server.chat(logprobs=True)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert len(tokens) == answer["usage"]["completion_tokens"]
    assert "".join(token["token"] for token in tokens[:-1]) == THOUGHT


@pytest.mark.parametrize("burst", [1, 3, 50])
async def test_thinking_is_streamed_in_its_own_deltas(server: Server, burst: int) -> None:
    server.engine.script = Script(THOUGHT, burst=burst)
    joined, choices, usage = await streamed(server)
    assert joined == {
        "role": "assistant",
        "content": "hello world",
        "reasoning_content": "Hm, so.",
        "reasoning": "Hm, so.",
    }
    assert choices[-1]["finish_reason"] == "stop"
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_an_answer_without_thinking_is_plain(server: Server) -> None:
    server.engine.script = Script("hello world")
    message = (await server.chat())["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "hello world", "refusal": None}


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
async def test_thinking_may_be_omitted(server: Server, fields: dict[str, Any]) -> None:
    message = (await server.chat(**fields))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "hello world", "refusal": None}
    joined, _, _ = await streamed(server, **fields)
    assert joined == {"role": "assistant", "content": "hello world"}


async def test_a_prompt_may_start_the_thinking(server: Server) -> None:
    server.engine.script = Script("Hm.</think>hello")
    begun = [{"role": "user", "content": "hi<think>\n"}]
    message = (await server.chat(messages=begun, add_generation_prompt=False))["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("hello", "Hm.")
    message = (await server.chat())["choices"][0]["message"]
    assert message["content"] == "Hm.</think>hello"


async def test_calls_follow_thinking(server: Server) -> None:
    server.engine.script = Script(f"<think>I call <tool_call> now.</think>\n\n{CALL}")
    choice = (await server.chat(tools=[NOW]))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "I call <tool_call> now."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    joined, _, _ = await streamed(server, tools=[NOW], tool_choice="required")
    assert joined["reasoning"] == "I call <tool_call> now."
    assert joined["content"] == ""


@pytest.mark.parametrize("burst", [1, 50])
async def test_a_call_ends_reasoning_that_is_not_closed(server: Server, burst: int) -> None:
    server.engine.script = Script(f"I check.\n{CALL}", burst=burst)
    begun: dict[str, Any] = {"messages": [{"role": "user", "content": "hi<think>"}], "add_generation_prompt": False}
    choice = (await server.chat(tools=[NOW], **begun))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "I check.")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    response = await server.post("/v1/chat/completions", {"stream": True, "tools": [NOW], **begun})
    lines = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    deltas = [line["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "I check."
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["arguments"] for call in calls) == "{}"
    assert calls[0]["name"] == "now"
    assert lines[-1]["choices"][0]["finish_reason"] == "tool_calls"
    server.engine.script = Script(f"I check.\n{CALL}", burst=burst)
    assert (await server.chat(**begun))["choices"][0]["message"]["reasoning"] == f"I check.\n{CALL}"


def accepts(server: Server, text: str) -> bool:
    tokenizer = server.service.loaded.tokenizer
    grammar = server.engine.added[-1].params.grammar
    assert grammar is not None
    matcher, ids = LLMatcher(LLTokenizer(tokenizer.to_json()), grammar), tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"tools": [NOW], "tool_choice": "required"}, CALL),
        ({"tools": [{"type": "function", "function": {"name": "now", "strict": True}}]}, f"So:{CALL}"),
        ({"tools": [NOW], "response_format": {"type": "json_object"}}, CALL),
        ({"tools": [NOW], "response_format": {"type": "json_object"}}, '{"a": 1}'),
    ],
)
async def test_a_constraint_starts_after_the_thinking(server: Server, fields: dict[str, Any], good: str) -> None:
    await server.chat(**fields)
    assert accepts(server, good)
    assert accepts(server, f"<think>\nnot {{ this\n</think>\n\n{good}")
    assert not accepts(server, f"<think>\nnot this {good}")
    begun = [{"role": "user", "content": "hi<think>"}]
    await server.chat(messages=begun, add_generation_prompt=False, **fields)
    assert accepts(server, f"Hm</think>{good}")
    ended = [{"role": "user", "content": "hi<think></think>"}]
    await server.chat(messages=ended, add_generation_prompt=False, **fields)
    assert accepts(server, good)
    assert not accepts(server, f"<think>Hm</think>{good}")


@pytest.mark.parametrize(
    "fields", [{"max_thinking_tokens": 7}, {"thinking_token_budget": 7}, {"reasoning": {"max_tokens": 7}}]
)
async def test_a_budget_ends_the_thinking(server: Server, fields: dict[str, Any]) -> None:
    await server.chat(**fields)
    thinking = server.engine.added[-1].params.thinking
    tokenizer = server.service.loaded.tokenizer
    assert thinking is not None
    assert thinking.budget == 7
    marks = [tokenizer.decode(ids) for ids in (thinking.begin, thinking.end, thinking.force)]
    assert marks == ["<think>", "</think>", "\n</think>\n\n"]
    begun = [{"role": "user", "content": "hi<think>"}]
    await server.chat(messages=begun, add_generation_prompt=False, **fields)
    assert server.engine.added[-1].params.thinking == type(thinking)(7, (), thinking.end, thinking.force)
    ended = [{"role": "user", "content": "hi<think></think>"}]
    await server.chat(messages=ended, add_generation_prompt=False, **fields)
    assert server.engine.added[-1].params.thinking is None


async def test_without_a_parser_thinking_stays_in_the_text() -> None:
    async with serving(reasoning_parser="none") as server:
        server.engine.script = Script(THOUGHT)
        answer = await server.chat(max_thinking_tokens=5)
        assert answer["choices"][0]["message"]["content"] == THOUGHT
        assert "completion_tokens_details" not in answer["usage"]
        assert server.engine.added[-1].params.thinking is None


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        ("{{ enable_thinking }}", {"enable_thinking": False}, {"enable_thinking": False}),
        ("{{ thinking }}", {"enable_thinking": True}, {"thinking": True}),
        (
            "{{ thinking }}",
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "thinking": True},
        ),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ("{{ thinking }}", {"reasoning_effort": "high"}, {"thinking": True, "reasoning_effort": "high"}),
        ("<|channel|>{{ reasoning_effort }}", {"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}),
        ("", {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ("{{ enable_thinking }}", {"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ("", {"enable_thinking": False}, {}),
        (
            "{{ enable_thinking }}",
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "reasoning_effort": "none"},
        ),
    ],
)  # fmt: skip
async def test_each_template_gets_its_own_option(
    template: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})
    body.check()
    reported = body.template_arguments(None, template)
    assert {name: reported[name] for name in reported if "thinking" in name or "effort" in name} == expected


SHOW = "{% for m in messages %}{{ m.role }}:"
PARTS = (
    SHOW + "{% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}"
    "{% if block['type'] == 'thinking' %}[THINK]{{ block['thinking'] }}[/THINK]{% else %}{{ block['text'] }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (SHOW + "{{ m.reasoning_content }}|{{ m.content }};{% endfor %}", "assistant:Hm.|Yes;"),
        (SHOW + "{{ m.thinking }}|{{ m.content }};{% endfor %}", "assistant:Hm.|Yes;"),
        (SHOW + "{{ m['reasoning'] }}|{{ m.content }};{% endfor %}", "assistant:Hm.|Yes;"),
        (PARTS, "assistant:[THINK]Hm.[/THINK]Yes;"),
    ],
)
async def test_earlier_thinking_is_placed_where_the_template_expects_it(template: str, expected: str) -> None:
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=template))
    for sent in (
        {"content": "Yes", "reasoning_content": "Hm."},
        {"content": "Yes", "reasoning": "Hm."},
        {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, "Yes"]},
    ):
        message = ChatMessage.model_validate({"role": "assistant", **sent})
        assert tokenizer.render_chat([message], {}) == expected
