"""Conversations are rendered into prompts as by `transformers`, to the character, for templates of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TEMPLATES
from pydantic import ValidationError
from vocabularies import byte_level, wrapped

from weft.server.api.chat_message import ChatMessage
from weft.server.api.protocol import ChatBody
from weft.server.errors import ApiError
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.messages import stable_prefix

WEATHER = {
    "type": "function",
    "function": {
        "description": "Weather of a city, in °C & <words>",  # in another order than ours
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "a 'city'", "default": None},
                "unit": {"type": "string", "enum": ["c", "f", None]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
        "x-own": {"hint": [1, 2.5, True]},
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}


def _call(name: str, arguments: dict[str, Any], call_id: str = "abcdef123") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


USER = {"role": "user", "content": "Wie ist das Wetter in Zürich? 'quoted' & <b> 北京\n"}
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [_call("weather", {"city": "Zürich", "n": [1, None]})]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": '{"t": 21.5, "wind": "süd"}'}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, {"role": "assistant", "content": "Sunny. "}, {"role": "user", "content": "And\n\nnow?"}],
    "answer": [USER, {"role": "assistant", "content": " It is "}],
    "call": [USER, CALLING, RESULT],
    "two calls": [
        SYSTEM, USER,
        {**CALLING, "tool_calls": [*CALLING["tool_calls"], _call("time", {}, "123456789")]},
        RESULT, {**RESULT, "tool_call_id": "123456789", "content": "12:30"},
        {"role": "assistant", "content": "Half past twelve."}, {"role": "user", "content": "Thanks"},
    ],
    "thought": [
        USER, {"role": "assistant", "reasoning_content": "\nLet me think.\n", "content": "21 degrees"},
        {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "<think>\nyes\n</think>\n\nYes."},
        {"role": "user", "content": "Why?"}, {**CALLING, "reasoning_content": "A call is needed."}, RESULT,
    ],
    "long": [USER, {"role": "assistant", "content": "a"}] * 5,
    "wrong order": [{"role": "assistant", "content": "Hi"}, USER, USER],
    "result first": [RESULT],
}  # fmt: skip

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"tools": [WEATHER, TIME]},
    {"chat_template_kwargs": {"enable_thinking": False, "date_string": "1 May 2026"}},
    {"reasoning_effort": "high", "chat_template_kwargs": {"controls": {"length": "long"}}},
    {"documents": [{"title": "A", "text": "first"}, {"title": "B", "text": "second"}]},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
]


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    body = ChatBody.model_validate({"messages": messages, **options})
    body.check_template()
    return tokenizer.render_chat(body.messages, body.template_arguments())


def _by_transformers(hf: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    options = {"add_generation_prompt": True, **options}
    options |= options.pop("chat_template_kwargs", {})
    # calls have their arguments as objects there
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text: str = hf.apply_chat_template(copied, tokenize=False, **options)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_equals_that_of_transformers(name: str) -> None:
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=TEMPLATES[name]))
    made = refused = 0
    for which, messages in CONVERSATIONS.items():
        for options in ARGUMENTS:
            try:
                want = _by_transformers(tokenizer._hf, messages, options)
            except Exception:  # a conversation that a template refuses
                with pytest.raises(ApiError) as error:
                    _rendered(tokenizer, messages, options)
                assert error.value.status == 400
                refused += 1
                continue
            assert _rendered(tokenizer, messages, options) == want, (which, options)
            made += 1
    assert made >= 20, (made, refused)


def test_null_content_is_distinguished_from_empty_if_the_template_does() -> None:
    """Other templates would write "None", or fail: for them it is empty."""
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": CALLING["tool_calls"]}, RESULT]
    bare = [USER, {"role": "assistant", "tool_calls": CALLING["tool_calls"]}, RESULT]
    for name, template in TEMPLATES.items():
        tokenizer = Tokenizer(wrapped(byte_level(), chat_template=template))
        if name == "gemma":  # has no results
            continue
        if name == "deepseek":  # transformers omits null, and the template fails
            arguments = CALLING["tool_calls"][0]["function"]["arguments"].replace("\\u00fc", "ü")
            call = f"<call>function<sep>weather\n```json\n{arguments}\n```</call>"
            want = f"<|bos|><User>{USER['content']}{call}<out>{RESULT['content']}</out>"
        else:
            want = _by_transformers(tokenizer._hf, [USER, {**messages[1], "content": ""}, RESULT], {})
        assert _rendered(tokenizer, messages, {}) == _rendered(tokenizer, bare, {}) == want
        assert "None" not in want


def test_reasoning_has_two_names() -> None:
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=TEMPLATES["thinking"]))
    answer = {"role": "assistant", "content": "4"}
    texts = [
        _rendered(tokenizer, [USER, {**answer, field: "2 + 2"}], {"add_generation_prompt": False})
        for field in ("reasoning_content", "reasoning")
    ]
    assert texts[0] == texts[1]
    assert "<think>\n2 + 2\n</think>" in texts[0]


EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SOME = "{% for m in messages if m.role in ('user', 'bot') %}{{ m.content | trim }}.{% endfor %}"
RAISES = "{% for m in messages if m.role != 'user' %}{{ raise_exception('who is ' + m.role + '?') }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role", "rendered"),
    [
        (EACH, "critic", "[user]hi[critic]be <|bos|>"),
        (EACH, "function", "[user]hi[tool]be <|bos|>"),  # OpenAI's former name
        (SOME, "bot", "hi.be <|bos|>."),
        (SOME, "critic", "The chat template leaves out messages with the role critic."),
        (SOME, "system", "hi."),
        (RAISES, "critic", "The chat template rejects these messages: who is critic?"),
    ],
)
def test_a_template_may_render_other_roles(template: str, role: str, rendered: str) -> None:
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=template))
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": "be <|bos|>"}]
    if rendered.startswith("The "):
        with pytest.raises(ApiError) as error:
            _rendered(tokenizer, messages, {})
        assert rendered in error.value.message
        assert (error.value.status, error.value.param) == (400, "messages")
        return
    text = _rendered(tokenizer, messages, {})
    assert tokenizer.without_seams(text) == rendered
    assert tokenizer.token_id("<|bos|>") not in tokenizer.encode(text)  # a control token only if the server writes it


@pytest.mark.parametrize("role", ["", "<|user|>", "a b", "ü", "a" * 65, None, 3])
def test_roles_are_short_names(role: Any) -> None:
    with pytest.raises(ValidationError, match="role"):
        ChatMessage.model_validate({"role": role, "content": "a"})


NAMED = {
    "default": "plain{{ messages[0].content }}",
    "tool_use": "tools{{ tools | length }}",
    "rag": "rag{{ documents }}",
}


def _saved(folder: Path, form: str) -> Path:
    """A tokenizer with templates in one of the forms of model directories."""
    template: Any = NAMED if form in ("list", "folder") else NAMED["default"]
    wrapped(byte_level(), chat_template=None if form == "file" else template).save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    if form == "list":
        for file in folder.rglob("*.jinja"):
            file.unlink()
        config["chat_template"] = [{"name": name, "template": text} for name, text in NAMED.items()]
    elif form == "entry":
        (folder / "chat_template.jinja").unlink()
        config["chat_template"] = template
    elif form == "file":
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", ["list", "folder", "entry", "file"])
def test_templates_are_found_in_every_location(tmp_path: Path, form: str) -> None:
    tokenizer = Tokenizer.load(_saved(tmp_path, form))
    messages = [{"role": "user", "content": "!"}]
    assert _rendered(tokenizer, messages, {}) == "plain!"
    if form in ("list", "folder"):
        assert set(tokenizer.template_names) == set(NAMED)
        assert _rendered(tokenizer, messages, {"tools": [TIME]}) == "tools1"
        named = {"chat_template": "rag", "documents": [{"text": "x"}]}
        assert _rendered(tokenizer, messages, named) == "rag[{'text': 'x'}]"
    with pytest.raises(ApiError, match="only the model's own can be used"):
        _rendered(tokenizer, messages, {"chat_template": "{{ 7 * 7 }}"})


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_system_message_in_the_middle_changes_nothing_before_it(name: str) -> None:
    tokenizer = Tokenizer(wrapped(byte_level(), chat_template=TEMPLATES[name]))

    def prompt(*turns: tuple[str, str], **options: Any) -> str:
        messages = [ChatMessage.model_validate({"role": role, "content": content}) for role, content in turns]
        kept = stable_prefix(messages, late_system=tokenizer.takes_late_system)
        return tokenizer.render_chat(kept, {"add_generation_prompt": False, **options})

    later = [("user", "one"), ("assistant", "two"), ("system", "three"), ("user", "four")]
    text = prompt(*later)
    assert text.startswith(prompt(later[0]))
    assert text.index("one") < text.index("two") < text.index("three") < text.index("four")
    again = prompt(*later, ("assistant", "five"), ("user", "six"))
    assert again.startswith(text[: text.index("four") + 4])
