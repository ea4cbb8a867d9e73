"""A turn's prompt starts with the previous one, to the token, in all shipped chat templates; templates that differ are
listed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any

import pytest
from chat_templates import TEMPLATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vocabularies import byte_level, wrapped

from weft.engine.demo import MODEL_PATH
from weft.server.api.chat_message import ChatMessage
from weft.server.api.protocol import ChatBody
from weft.server.errors import ApiError
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.messages import knows_tools, stable_prefix, write_out
from weft.server.tools.tool_parsers import UNKNOWN
from weft.server.tools.tools import Tool

KINDS = ("text", "calls", "thinking", "thinking and calls", "late system")
BREAKS = {
    "thinking": {"thinking and calls"},
    "gpt-oss": {"thinking and calls"},
    "mistral": {"calls", "thinking and calls"},
}
"""kinds of conversations that a template rewrites: the first two drop the thinking between calls after another question
(Qwen3, gpt-oss), the third has the tools before the last question (Mistral)"""

Round = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""the input, and the model's answer"""


@cache
def tokenizer_of(name: str) -> Tokenizer:
    if name == "demo":
        return Tokenizer.load(MODEL_PATH)
    return Tokenizer(wrapped(byte_level(), chat_template=TEMPLATES[name]))


def rounds(kind: str, words: Sequence[str]) -> list[Round]:
    """A conversation of this kind, one round for each of the words."""
    out: list[Round] = []
    serial = count()
    for i, word in enumerate(words):
        comes: list[dict[str, Any]] = [{"role": "user", "content": word}]
        thinks = {"reasoning_content": f"about {word}"} if kind.startswith("thinking") else {}
        if kind == "late system" and i % 2:
            comes.insert(0, {"role": "system", "content": f"from now on {word}"})
        if kind.endswith("calls"):
            call = {"name": "look", "arguments": json.dumps({"at": word, "n": i})}
            # ids of nine letters and digits, as Mistral requires
            made = {"id": f"call{next(serial):05d}", "type": "function", "function": call}
            out.append((comes, [{"role": "assistant", "content": None, "tool_calls": [made], **thinks}]))
            comes = [{"role": "tool", "tool_call_id": made["id"], "content": f"found {word}"}]
        out.append((comes, [{"role": "assistant", "content": f"It is {word}.", **thinks}]))
    return out


def prompt(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[Tool], *, to_answer: bool) -> str:
    """The prompt as the server renders it."""
    body = ChatBody.model_validate({"messages": messages, "tools": tools, "add_generation_prompt": to_answer})
    kept: Sequence[ChatMessage] = stable_prefix(body.messages, late_system=tokenizer.takes_late_system)
    template = tokenizer.chat_template or ""
    if knows_tools(tokenizer):
        return tokenizer.render_chat(kept, body.template_arguments(tools, template))
    kept = write_out(kept, tools, UNKNOWN, tokenizer.as_text)
    return tokenizer.render_chat(kept, body.template_arguments([], template))


def prompts(name: str, kind: str, words: Sequence[str]) -> Iterator[tuple[list[int], list[int]]]:
    """(the conversation up to a turn, the prompt of the turn after its answer) as tokens."""
    tokenizer = tokenizer_of(name)
    tools = [Tool.model_validate({"function": {"name": "look", "parameters": {"type": "object", "properties": {}}}})]
    offered = tools if kind.endswith("calls") else []
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": "Be brief."}] if name not in ("mistral", "gemma") else []
    )
    for comes, answer in rounds(kind, words):
        messages = [*messages, *comes]
        before = prompt(tokenizer, messages, offered, to_answer=False)
        messages = [*messages, *answer]
        follows: list[dict[str, Any]] = [{"role": "user", "content": "and then?"}]
        if answer[0].get("tool_calls"):
            follows = [{"role": "tool", "tool_call_id": answer[0]["tool_calls"][0]["id"], "content": "found"}]
        yield (
            tokenizer.encode(before, add_special_tokens=False),
            tokenizer.encode(
                prompt(tokenizer, [*messages, *follows], offered, to_answer=True), add_special_tokens=False
            ),
        )


def lasts(name: str, kind: str, words: Sequence[str]) -> bool | None:
    """None if the template refuses such conversations."""
    try:
        # the last token may merge with the text after it
        return all(after[: len(before) - 1] == before[:-1] for before, after in prompts(name, kind, words))
    except ApiError:
        return None


@pytest.mark.parametrize("name", ["demo", *TEMPLATES])
def test_which_templates_rewrite_earlier_turns(name: str) -> None:
    broken = {kind for kind in KINDS if lasts(name, kind, ["one", "two", "three"]) is False}
    assert broken == BREAKS.get(name, set())


WORD = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(words=st.lists(WORD, min_size=2, max_size=4), kind=st.sampled_from(KINDS))
@pytest.mark.parametrize("name", ["demo", *TEMPLATES])
def test_no_text_changes_the_tokens_of_an_earlier_turn(name: str, kind: str, words: list[str]) -> None:
    if kind not in BREAKS.get(name, ()):
        assert lasts(name, kind, words) is not False
