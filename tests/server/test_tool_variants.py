"""Further mistakes of models in every tool format: calls inside reasoning, JSON to repair, and random damage."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_answers import JSON, MARKED, TAGS, THINK, TOOLS, parsed, read, several, splits_mark, tags, written

from weft.server.tools.families import REASONING_FORMATS, TOOL_FORMATS

# -- calls inside reasoning


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "openai"])
@pytest.mark.parametrize("thinks", THINK)
def test_a_call_inside_open_reasoning_is_a_call(name: str, thinks: str) -> None:
    reasoning = REASONING_FORMATS[thinks]  # type: ignore[index]
    calls = [("read", {"path": "x"}), ("now", {})]
    text = several(name, *calls)
    for before in ("I will read it.\n", "I will read it. ", "I list [1] {a} first.\n\n"):
        message = before.strip()
        assert parsed(name, before + text, thinks=thinks, inside=True) == ("", calls, message)
        assert parsed(name, reasoning.begin + before + text, thinks=thinks) == ("", calls, message)
    assert parsed(name, f"Hm.{reasoning.end}\n{text}", thinks=thinks, inside=True) == ("", calls, "Hm.")
    text = written(name, "read", {"path": "x"})
    for at in range(text.rindex("x") + 1, len(text)):
        if not splits_mark(name, text, at):
            assert parsed(name, f"Hm.\n{text[:at]}", thinks=thinks, inside=True)[1:] == (calls[:1], "Hm."), text[:at]


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("thinks", THINK)
def test_a_whole_call_ends_reasoning_that_is_closed_later(name: str, thinks: str) -> None:
    reasoning, text = REASONING_FORMATS[thinks], written(name, "read", {"path": "x"})  # type: ignore[index]
    answer = f"Hm.\n{text}\n{reasoning.end}\n\nDone."
    assert parsed(name, answer, thinks=thinks, inside=True) == ("Done.", [("read", {"path": "x"})], "Hm.")


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "openai"])
@pytest.mark.parametrize("thinks", THINK)
def test_marks_inside_closed_reasoning_are_text(name: str, thinks: str) -> None:
    form, reasoning = TOOL_FORMATS[name], REASONING_FORMATS[thinks]  # type: ignore[index]
    whole = written(name, "read", {"path": "x"})
    thoughts = [f"I use {mark} now." for mark in (*form.opens, *form.markers)]
    thoughts += [f"So {whole[:at]}" for at in range(1, whole.index("x"))]
    thoughts.append(f"So {whole.replace('read', 'unknown')} no.")
    for thought in thoughts:
        if thought.rstrip() != thought:
            continue
        answer = f"{thought}\n{reasoning.end}\n\n{whole}"
        assert parsed(name, answer, thinks=thinks, inside=True) == ("", [("read", {"path": "x"})], thought), answer
        open = f"I use {form.opens[0]}"
        assert parsed(name, open, thinks=thinks, inside=True) == ("", [], open)


def test_a_harmony_call_may_follow_reasoning_without_an_end() -> None:
    call = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
    for between in ("", "<|end|>", "<|start|>assistant", "<|end|><|start|>assistant"):
        text = f'<|channel|>analysis<|message|>Hm.{between}{call}{{"path": "a <|call|> b"}}<|call|>'
        assert parsed("openai", text) == ("", [("read", {"path": "a <|call|> b"})], "Hm.")


# -- strings of JSON


RAW = [
    ("line 1\nline 2\tend\r", "line 1\nline 2\tend\r"),
    ("a\x00b\x1fc\x7f", "a\x00b\x1fc\x7f"),
    ("C:\\dir\\q", "C:\\dir\\q"),
    ("\\d+\\.\\s", "\\d+\\.\\s"),
    ("\\u12 \\uzz \\u", "\\u12 \\uzz \\u"),
    ("it\\'s", "it's"),
    ("\\x41\\\n", "\\x41\\\n"),
    ('\\"quoted\\" \\\\ \\/ \\b\\f\\n\\r\\t \\u00e9', '"quoted" \\ / \b\f\n\r\t é'),
]


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize(("raw", "value"), RAW)
def test_strings_of_json_are_repaired(name: str, raw: str, value: str) -> None:
    text = written(name, "read", {"path": "X", "limit": 3, "at": {"y": ["X"]}}).replace("X", raw)
    assert parsed(name, text)[:2] == ("", [("read", {"path": value, "limit": 3, "at": {"y": [value]}})]), text


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ('{"path": "x", "limit": 3,}', {"path": "x", "limit": 3}),
        ('{"path": "x" "limit": 3}', {"path": "x", "limit": 3}),
        ("{'path': 'a \"b\"', 'limit': None, 'at': True}", {"path": 'a "b"', "limit": None, "at": True}),
        ('{"at": [1, 2, ], "limit": NaN}', {"at": [1, 2], "limit": None}),
        ('{"at": [-1.5e3, 0, 10, 1E-2, 3-4, 1.], "limit": -0.5}', {"at": [-1500, 0, 10, 0.01, 3, 1.0], "limit": -0.5}),
        ('"{\\"path\\": \\"x\\"}"', {"path": "x"}),
        ('"{\\"path\\": \\"a\\nb\\"}"', {"path": "a\nb"}),
    ],
)
def test_other_faults_of_json_are_repaired(name: str, raw: str, value: dict[str, Any]) -> None:
    text = written(name, "read", {}).replace("{}", raw)
    assert parsed(name, text)[:2] == ("", [("read", value)]), text


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("surplus", ["}", "}}", " }", "\n}\n"])
def test_surplus_closing_brackets_are_no_text(name: str, surplus: str) -> None:
    text = written(name, "read", {"at": {"y": 2}}).replace("2}}", f"2}}}}{surplus}")
    assert parsed(name, text) == ("", [("read", {"at": {"y": 2}})], ""), text
    if name in ("hermes", "kimi_k2", "mistral", "deepseek_v3", "deepseek_v31"):
        assert parsed(name, text + text)[:2] == ("", [("read", {"at": {"y": 2}})] * 2), text


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "granite", "phi4_mini_json"])
def test_the_object_of_a_call_may_be_in_single_quotes(name: str) -> None:
    text = written(name, "read", {"path": "x"}).replace('"', "'")
    assert parsed(name, text) == ("", [("read", {"path": "x"})], ""), text


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "granite", "phi4_mini_json"])
def test_the_object_of_a_call_may_be_openais(name: str) -> None:
    own = written("granite" if name == "mistral" else name, "read", {"path": "x"})
    own = own.replace("<|tool_call|>", "[TOOL_CALLS]") if name == "mistral" else own
    object = own[own.index("{") : own.rindex("}") + 1]
    for head in ('{"type": "function", ', '{"id": "1", ', "{"):
        for inner in (object, object.replace(': {"path": "x"}', ': "{\\"path\\": \\"x\\"}"')):
            text = own.replace(object, f'{head}"function": {inner}}}')
            assert parsed(name, text) == ("", [("read", {"path": "x"})], ""), text
            assert parsed(name, text.replace("}}}", "}}"))[1] == [("read", {"path": "x"})], text


def test_llama_calls_may_stand_in_a_list() -> None:
    one = written("llama3_json", "read", {"path": "x"})
    for tag in ("", "<|python_tag|>"):
        assert parsed("llama3_json", f"{tag}[{one}]") == ("", [("read", {"path": "x"})], "")
        assert parsed("llama3_json", f"{tag}[\n{one},\n{one}\n]") == ("", [("read", {"path": "x"})] * 2, "")
    for text in ('[{"name": "Ann", "age": 3}]', "[1, 2]", "[[1], {}]", "[", '[{"name": "read"'):
        assert parsed("llama3_json", text)[0] == (text if "read" not in text else "")


def test_harmony_arguments_may_stand_in_a_fence() -> None:
    own = written("openai", "read", {"path": "```"})
    for fence in ("```json\n", "```\n"):
        text = own.replace("<|message|>", f"<|message|>{fence}").replace("<|call|>", "\n```<|call|>")
        assert parsed("openai", text) == ("", [("read", {"path": "```"})], "")
    text = read("openai", [own.replace('{"path": "```"}', "```\nls\n```")], TOOLS, "openai_gptoss", False)
    assert text == ("", [["read", "```\nls\n```"]], ""), "what is no JSON is passed on unchanged"


def test_a_deepseek_call_may_lack_its_type() -> None:
    text = written("deepseek_v31", "read", {"path": "x"})
    assert parsed("deepseek_v3", text) == ("", [("read", {"path": "x"})], "")


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("{'y': None, 'z': true}", {"y": None, "z": True}),
        ('{"y": "a\\d",}', {"y": "a\\d"}),
        ("{y: [1, 2]}", {"y": [1, 2]}),
        ("{'y': ('a',)}", {"y": ["a"]}),
        ("{y} or {z}", "{y} or {z}"),
    ],
)
def test_objects_between_tags_are_repaired(raw: str, value: Any) -> None:
    for name in TAGS:
        assert parsed(name, tags(name, ("at", raw))) == ("", [("read", {"at": value})], ""), raw
    text = tags("deepseek_v32", ("at", raw)).replace('name="at"', 'name="at" string="false"')
    assert parsed("deepseek_v32", text) == ("", [("read", {"at": value})], ""), text


def test_a_tag_that_contradicts_the_schema_does_not_count() -> None:
    for key, raw, flag, value in (
        ("path", "12", "false", "12"),
        ("limit", "3", "true", 3),
        ("other", "3", "true", "3"),
    ):
        text = tags("deepseek_v32", (key, raw)).replace(f'name="{key}"', f'name="{key}" string="{flag}"')
        assert parsed("deepseek_v32", text) == ("", [("read", {key: value})], ""), text


@pytest.mark.parametrize("quote", ['"', "'"])
def test_names_in_tags_may_be_quoted(quote: str) -> None:
    for name in ("qwen3_coder", "glm45"):
        text = tags(name, ("path", "x"), ("limit", "3"))
        for each in ("read", "path", "limit"):
            text = text.replace(each, f"{quote}{each}{quote}")
        assert parsed(name, text) == ("", [("read", {"path": "x", "limit": 3})], ""), text


def test_python_numbers_are_numbers() -> None:
    for text, value in ((".5", 0.5), ("5.", 5.0), ("+1", 1), ("-.5e1", -5.0), ("1_000", 1000), ("1e999", None)):
        assert parsed("pythonic", f"[read(limit={text})]")[1] == [("read", {"limit": value or text})], text


def test_the_mark_after_granites_response_is_no_text() -> None:
    for name in ("granite", "llama3_json"):
        for more, calls in (("", []), (written(name, "now", {}), [("now", {})])):
            if name == "granite" or not more:
                answer = f"<think>Hm.</think><response>Done.{more}</response>"
                assert parsed(name, answer, thinks="granite") == ("Done.", calls, "Hm.")


@given(st.sampled_from(JSON), st.text(st.sampled_from("ab\n\t\x01\\\"'u0{}[],: é😀"), max_size=30), st.integers(0, 99))
@settings(deadline=None, max_examples=200)
def test_any_text_in_a_string_gives_valid_json(name: str, raw: str, seed: int) -> None:
    text = written(name, "read", {"path": "X"}).replace("X", raw)
    parsed(name, text, seed=seed)


# -- anything


def damaged(name: str, rng: random.Random) -> str:
    """Calls with marks put in and text taken out."""
    form: Any = TOOL_FORMATS[name]  # type: ignore[index]
    own = [*form.opens, *form.markers]
    whole = [written(name, "read", {"path": "x", "limit": 3}), written(name, "now", {})]
    text = "".join(rng.choice(whole if rng.random() < 0.5 else own) for _ in range(rng.randint(1, 5)))
    for _ in range(rng.randint(0, 3)):
        at = rng.randint(0, len(text))
        text = text[:at] + rng.choice(["", *own, "}", '"', "\\", "\n", "x"]) + text[at + rng.randint(0, 6) :]
    return text


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "openai"])
def test_no_damage_gives_invalid_json_or_depends_on_the_split(name: str) -> None:
    rng = random.Random(name)
    for seed in range(60):
        text, thinks = damaged(name, rng), rng.choice(["", *THINK])
        if thinks and rng.random() < 0.4:
            at = rng.randint(0, len(text))
            text = text[:at] + REASONING_FORMATS[thinks].end + text[at:]  # type: ignore[index]
        parsed(name, text, thinks=thinks, inside=bool(thinks) and rng.random() < 0.5, seed=seed)
