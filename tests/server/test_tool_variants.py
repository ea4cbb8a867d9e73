"""What models get wrong in every tool format: types behind references, arguments that contain the format's own marks,
missing marks, calls without arguments, calls inside reasoning, raw control characters, singular and plural marks. Every
answer gives the same result whole, character by character and in random pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.server.tools.families import REASONING_FORMATS, TOOL_FORMATS
from weft.server.tools.stream import Thought
from weft.server.tools.tool_parsers import answer_parser

TEXT = {"type": "string"}
TOOLS: dict[str, dict[str, Any]] = {
    "read": {"type": "object", "properties": {"path": TEXT, "limit": {"type": "integer"}, "at": {"type": "object"}}},
    "now": {"type": "object", "properties": {}},
}
TAGS = ("qwen3_coder", "qwen3_xml", "glm45", "minimax_m2", "deepseek_v32")
JSON = (
    "hermes", "llama3_json", "llama4_json", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2", "granite",
    "phi4_mini_json", "openai",
)  # fmt: skip
PYTHON = ("pythonic", "llama4_pythonic", "gemma")
MARKED = tuple(name for name, form in TOOL_FORMATS.items() if form.marked and name != "openai")
THINK = ("deepseek_r1", "qwen3", "mistral", "granite", "gemma4")  # the others are the same as one of these

Answer = tuple[str, list[tuple[str, Any]], str]


def parsed(
    name: str, text: str, *, tools: dict[str, Any] = TOOLS, thinks: str = "", inside: bool = False, seed: int = 0
) -> Answer:
    """Content, calls with parsed arguments, and reasoning of an answer, the same for all ways to split it."""
    rng = random.Random(seed)
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 6))))
    splits = [[text], list(text), [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]]
    thinks = "openai_gptoss" if name == "openai" else thinks
    results = [_read(name, pieces, tools, thinks, inside) for pieces in splits]
    results.append(_read(name, list(text), tools, thinks, inside, short=True))
    assert all(result == results[0] for result in results), text
    content, calls, reasoning = results[0]
    return content, [(called, json.loads(arguments)) for called, arguments in calls], reasoning


def _read(
    name: str, pieces: list[str], tools: dict[str, Any], thinks: str, inside: bool, *, short: bool = False,
    cut: bool = False,
) -> Any:  # fmt: skip
    """`short`: text that the parser need not see is not fed."""
    reasoning = REASONING_FORMATS[thinks] if thinks else None  # type: ignore[index]
    parser = answer_parser(TOOL_FORMATS[name], reasoning, tools, inside=inside)  # type: ignore[index]
    parts: list[Any] = []
    for piece in pieces:
        parts += [piece] if short and parser.passes(piece) else parser.feed(piece)
    parts += parser.flush(cut=cut)
    content = "".join(part for part in parts if isinstance(part, str))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    calls: list[list[str]] = []
    for part in parts:
        if not isinstance(part, str | Thought):
            if part.name is not None:
                calls.append([part.name, ""])
            calls[-1][1] += part.arguments
    return content, calls, thought


def written(name: str, tool: str, arguments: dict[str, Any]) -> str:
    return TOOL_FORMATS[name].write(tool, json.dumps(arguments, ensure_ascii=False))  # type: ignore[index]


def several(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls one after the other, as the model writes them."""
    texts = [written(name, tool, arguments) for tool, arguments in calls]
    between = {"llama3_json": "; ", "llama4_json": "; ", "gemma": "\n"}.get(name, "")
    if name == "pythonic":
        return "[" + ", ".join(text[1:-1] for text in texts) + "]"
    return between.join(texts)


# -- types


REFERENCES: dict[str, Any] = {
    "Code": TEXT,
    "Chain": {"$ref": "#/$defs/Link"},
    "Link": {"allOf": [{"$ref": "#/$defs/Code"}]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Color": {"enum": ["1", "2"]},
    "a/b~c": TEXT,
    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
CASES: list[tuple[dict[str, Any], str, Any]] = [
    (TEXT, "123", "123"),
    ({"allOf": [TEXT]}, "123", "123"),
    ({"allOf": [{}, {"description": "d"}, {"allOf": [TEXT]}]}, "true", "true"),
    ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "123", "123"),
    ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "null", None),
    ({"oneOf": [{"$ref": "#/$defs/Chain"}]}, "1.5", "1.5"),
    ({"$ref": "#/$defs/Chain"}, "[1]", "[1]"),
    ({"$ref": "#/$defs/a~1b~0c"}, "1", "1"),
    ({"$ref": "#/$defs/a~1b%7E0c"}, "1", "1"),
    ({"$ref": "#/$defs/Loop"}, "1", 1),
    ({"$ref": "#/$defs/Loop", "type": "string"}, "1", "1"),
    ({"$ref": "#/$defs/Missing"}, "1", 1),
    ({"$ref": "#/properties/other"}, "1", "1"),
    ({"$ref": "#/$defs/Color"}, "1", "1"),
    ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
    ({"type": ["string", "null"]}, "12", "12"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["null", "integer"]}, "12", 12),
    ({"type": ["integer", "string"]}, "12", 12),
    ({"type": ["integer", "string"]}, "twelve", "twelve"),
    ({"type": ["integer", "string"], "enum": ["12", 13]}, "12", "12"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": "string", "nullable": True}, "12", "12"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, "auto"]}, "1", 1),
    ({"enum": [1, "auto"]}, "auto", "auto"),
    ({"enum": ["true", 1]}, "true", "true"),
    ({"const": "5"}, "5", "5"),
    ({"const": 5}, "5", 5),
    ({"anyOf": [{"const": "1"}, {"const": "2"}]}, "2", "2"),
    ({"anyOf": [{"type": "integer"}, TEXT]}, "5", 5),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1, 2]", [1, 2]),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "5", "5"),
    ({"type": "number"}, "5", 5),
    ({"type": "integer"}, "-5", -5),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "FALSE", False),
    ({"type": "object"}, '{"a": [1, {"b": "c"}]}', {"a": [1, {"b": "c"}]}),
    ({"type": "object"}, "{'a': None, 'b': True}", {"a": None, "b": True}),
    ({"type": "object"}, '{"a": "line 1\nline 2\t"}', {"a": "line 1\nline 2\t"}),
    ({"type": "array"}, "['x', 'y']", ["x", "y"]),
    ({"type": "array", "items": TEXT}, '["1", "2"]', ["1", "2"]),
    ({"anyOf": [{"type": "object"}, TEXT]}, "{'a': None}", "{'a': None}"),
    ({"type": "object"}, "no object", "no object"),
    ({}, "5", 5),
    ({}, "five", "five"),
]


def tags(name: str, *pairs: tuple[str, str], tool: str = "read") -> str:
    """A call with these texts as values."""
    form: Any = TOOL_FORMATS[name]  # type: ignore[index]
    pad = "\n" if form.padded else ""
    inner = "".join(f"{form.key[0]}{k}{form.key[1]}{form.value[0]}{pad}{v}{pad}{form.value[1]}\n" for k, v in pairs)
    end = f"\n{form.section[1]}" if form.section[1] else ""
    return f"{form.section[0]}{form.call[0]}{tool}{form.name_end}\n{inner}{form.call[1]}{end}"


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize(("schema", "text", "value"), CASES)
def test_text_between_tags_has_the_type_of_the_schema(name: str, schema: dict[str, Any], text: str, value: Any) -> None:
    for root in (
        {"properties": {"a": schema, "other": TEXT}},
        {"allOf": [{"properties": {"a": schema}}], "properties": {"other": TEXT}},
        {"$ref": "#/$defs/Arguments", "properties": {"other": TEXT}},
        {"anyOf": [{"properties": {"a": schema}}], "properties": {"other": TEXT}},
        {"patternProperties": {"^a$": schema}, "properties": {"other": TEXT}},
        {"additionalProperties": schema, "properties": {"other": TEXT}},
    ):
        tool = {**root, "$defs": {**REFERENCES, "Arguments": {"properties": {"a": schema}}}}
        assert parsed(name, tags(name, ("a", text)), tools={"read": tool}) == ("", [("read", {"a": value})], ""), tool


@pytest.mark.parametrize("name", ["functiongemma", "gemma4"])
def test_bare_numbers_and_words_are_strings_where_the_schema_allows_nothing_else(name: str) -> None:
    nullable = {"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}
    properties = {
        "a": {"allOf": [TEXT]},
        "b": nullable,
        "c": {"$ref": "#/$defs/Code"},
        "d": {"type": "integer"},
        "e": {},
        "f": nullable,
    }
    tools = {"read": {"properties": properties, "$defs": {"Code": TEXT}}}
    text = written(name, "read", {"a": 12345, "b": None, "c": True, "d": 5, "e": 6, "f": 1.5})
    expected = {"a": "12345", "b": None, "c": "true", "d": 5, "e": 6, "f": "1.5"}
    assert parsed(name, text, tools=tools) == ("", [("read", expected)], "")


# -- own marks in values


def marks_of(name: str) -> list[str]:
    form: Any = TOOL_FORMATS[name]  # type: ignore[index]
    return [mark for mark in (*form.key, *form.value, *form.call, *form.section) if len(mark) > 2]


@pytest.mark.parametrize("name", TAGS)
def test_a_value_may_contain_the_marks_of_its_format(name: str) -> None:
    form: Any = TOOL_FORMATS[name]  # type: ignore[index]
    inner = [f"see {mark} here" for mark in marks_of(name)]
    inner += [f"{mark}\nline" for mark in (form.value[1], form.call[1])]
    inner += [
        "a\n" + tags(name, ("path", "b"), ("limit", "2")) + "\nc",
        tags(name, ("other", "b")) + tags(name, tool="now") + "\nc",
        f"{form.key[0]}other{form.key[1]}{form.value[0]}x{form.value[1]} y",
        f"{form.value[1]} {form.value[1]} and {form.call[1]} end",
        f"print('{form.call[1]}')",
    ]
    for text in inner:
        for before in ((), (("at", "{}"),)):
            expected = {**({"at": {}} if before else {}), "path": text}
            for after in ((), (("limit", "3"),)):
                one = tags(name, *before, ("path", text), *after)
                wanted = ("read", expected | ({"limit": 3} if after else {}))
                assert parsed(name, one) == ("", [wanted], ""), one
                assert parsed(name, f"Hm.\n{one}") == ("Hm.", [wanted], ""), one
                both = f"{one}\n{tags(name, tool='now')}\n{one}"
                assert parsed(name, both) == ("", [wanted, ("now", {}), wanted], ""), both


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name not in TAGS])
def test_a_string_may_contain_the_marks_of_its_format(name: str) -> None:
    form = TOOL_FORMATS[name]  # type: ignore[index]
    quotes = ("<escape>", '<|"|>')
    marks = [mark for mark in (*form.markers, written(name, "now", {}), '"', "'", "}", "]", ")") if mark not in quotes]
    for mark in (*marks, *(f"{quote}x" for quote in quotes)):
        arguments = {"path": f"see {mark} here", "limit": 3}
        text = several(name, ("read", arguments), ("now", {}))
        assert parsed(name, text) == ("", [("read", arguments), ("now", {})], ""), text


@pytest.mark.parametrize("name", PYTHON)
def test_a_quote_inside_a_python_string_is_text(name: str) -> None:
    text = written(name, "read", {"path": "X"}).replace('"X"', "'it's 'so' here'")
    assert parsed(name, text) == ("", [("read", {"path": "it's 'so' here"})], "")
    text = written(name, "read", {"path": "X"}).replace('"X"', "r'a\\b'")
    assert parsed(name, text) == ("", [("read", {"path": "a\\b"})], "")


# -- missing marks


def splits_mark(name: str, text: str, at: int) -> bool:
    marks = (*TOOL_FORMATS[name].markers, "print(")  # type: ignore[index]
    return any(text[:at].endswith(m[:k]) and text[at - k :].startswith(m) for m in marks for k in range(1, len(m)))


def lacking(name: str) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Answers in which marks are missing, and their calls."""
    form: Any = TOOL_FORMATS[name]  # type: ignore[index]
    whole = tags(name, ("path", "x"), ("limit", "3"))
    both, one, now = ("read", {"path": "x", "limit": 3}), ("read", {"path": "x"}), ("now", {})
    last = tags(name, ("path", "x"))
    end = form.value[1]
    cases = [
        (whole.replace(end, "", 1), [both]),
        (whole.replace(end, ""), [both]),
        (f"{tags(name, tool='now')}\n{whole.replace(end, '', 1)}\n{last}", [now, both, one]),
        (last.replace(end, ""), [one]),
        (f"{last.replace(end, '')}\n{whole}", [one, both]),
        (whole.replace(form.call[1], ""), [both]),
        (f"{last.replace(form.call[1], '')}\n{whole}", [one, both]),
        (last.replace(form.call[1], "").replace(end, ""), [one]),
    ]
    if form.section[1]:
        cases += [
            (whole.replace(form.section[1], ""), [both]),
            (f"{last.replace(form.section[1], '')}\n{whole}", [one, both]),
            (whole.replace(form.section[1], "").replace(form.call[1], ""), [both]),
            (last.replace(form.section[1], "").replace(form.call[1], "").replace(end, ""), [one]),
            (f"{last.replace(form.section[1], '').replace(form.call[1], '').replace(end, '')}{whole}", [one, both]),
            (tags(name, tool="now").replace(form.call[1], ""), [now]),
        ]
    if form.key[1] != ">" and form.value[0]:
        cases += [(whole.replace(form.key[1], "\n", 1), [both]), (whole.replace(form.value[0], "", 1), [both])]
    return cases


@pytest.mark.parametrize("name", TAGS)
def test_missing_tags_are_added(name: str) -> None:
    for text, calls in lacking(name):
        assert parsed(name, text) == ("", calls, ""), text
        assert parsed(name, f"Hm. {text}") == ("Hm.", calls, ""), text


@pytest.mark.parametrize("name", TAGS)
def test_a_call_without_a_closed_value_ends_before_text(name: str) -> None:
    form: Any = TOOL_FORMATS[name]  # type: ignore[index]
    text = tags(name, ("path", "x")).replace(form.value[1], "")
    content, calls, _ = parsed(name, f"{text}\nDone.")
    assert (content.strip(), calls) == ("Done.", [("read", {"path": "x"})])
    content, calls, _ = parsed(name, f"{tags(name, ('path', 'x'))}\nDone.")
    assert (content.strip(), calls) == ("Done.", [("read", {"path": "x"})])


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name not in TAGS])
def test_missing_brackets_and_marks_are_added(name: str) -> None:
    arguments = {"path": "x", "at": {"y": [1, {"z": 2}]}}
    text = written(name, "read", arguments)
    least = max(text.rindex("2"), text.rindex("y")) + 1
    for at in range(least, len(text) + 1):
        if splits_mark(name, text, at):
            continue
        assert parsed(name, text[:at])[1] == [("read", arguments)], text[:at]


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name in JSON or name not in (*TAGS, *PYTHON)])
@pytest.mark.parametrize("missing", ["}", "}}", "}]}}"])
def test_brackets_that_are_missing_before_a_mark_are_added(name: str, missing: str) -> None:
    arguments = {"path": "x", "at": {"y": [{"z": 2}]}}
    text = several(name, ("read", arguments), ("read", arguments)).replace(", ", ",")
    first = text.index("}]}}")
    damaged = text[:first] + text[first:].replace("}]}}", "}]}}"[len(missing) :], 1)
    form = TOOL_FORMATS[name]  # type: ignore[index]
    if form.markup is None or (form.markup[1] is None and name != "mistral"):
        damaged = damaged[: text.index("}]}}")] + "}]}}"[len(missing) :]
    calls = parsed(name, damaged)[1]
    assert calls[0] == ("read", arguments), damaged


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("cut", [True, False])
def test_a_mark_that_the_answers_end_cuts_is_no_text(name: str, cut: bool) -> None:
    text = written(name, "read", {"path": "x", "limit": 3})
    for at in range(1, len(text)):
        for pieces in ([text[:at]], list(text[:at])):
            content, calls, _ = _read(name, pieces, TOOLS, "openai_gptoss" if name == "openai" else "", False, cut=cut)
            assert not calls or not content.strip(), text[:at]


# -- no arguments


def empty(name: str) -> list[str]:
    """Calls of `now` without arguments in all spellings."""
    nothing = ("", " ", "\n", "{}", "{ }", "{\n}", "null", '""', '"{}"', '"null"', " null ", "[]")
    begin = {
        "mistral": "[TOOL_CALLS]now[ARGS]",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n",
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>",
        "openai": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
    }
    end = {
        "deepseek_v3": "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31": "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "kimi_k2": "<|tool_call_end|><|tool_calls_section_end|>",
        "openai": "<|call|>",
    }
    if name in begin:
        out = [f"{begin[name]}{one}{end.get(name, '')}" for one in nothing]
        out += [begin[name], f"{begin[name]}{{}}", f"{begin[name]}null"]
        out += ["<|channel|>commentary to=functions.now<|call|>"] if name == "openai" else []
        own = TOOL_FORMATS[name].write("now", "{}")  # type: ignore[index]
        if name == "kimi_k2":
            out += [own.replace("<|tool_call_argument_begin|>{}", ""), own.replace("functions.now:0", "now")]
        if name == "deepseek_v31":
            out += [own.replace("<｜tool▁sep｜>{}", "")]
        if name == "deepseek_v3":
            out += [own.replace("\n```json\n{}\n```", ""), own.replace("```json\n{}\n```", ""), own.replace("{}\n", "")]
        if name == "mistral":
            out += [
                "[TOOL_CALLS]now",
                "[TOOL_CALLS]now{}",
                '[TOOL_CALLS][{"name": "now"}]',
                '[TOOL_CALLS]{"name": "now"}',
            ]
        return out
    if name in JSON:
        own, key = TOOL_FORMATS[name].write("now", "X"), "parameters" if "llama" in name else "arguments"  # type: ignore[index]
        return [own.replace(f', "{key}": X', ""), *(own.replace("X", one) for one in nothing if one.strip())]
    if name in PYTHON:
        own = TOOL_FORMATS[name].write("now", "{}")  # type: ignore[index]
        return [own, *(own.replace("()", f"({one})") for one in (" ", "\n", "None", "null", "{}", "''", '""'))]
    if name in TAGS:
        form: Any = TOOL_FORMATS[name]  # type: ignore[index]
        own = tags(name, tool="now")
        head = f"{form.call[0]}now{form.name_end}"
        out = [
            own,
            own.replace("\n", ""),
            *(own.replace(head, f"{head}\n{one}") for one in ("{}", "null", '""', "{ }")),
        ]
        return (
            out
            if not form.name_end
            else [*out, own.replace(head, f"{head[:-1]}/>"), own.replace(head, f"{head[:-1]} />")]
        )
    own = TOOL_FORMATS[name].write("now", "{}")  # type: ignore[index]
    return [own, own.replace("{}", ""), own.replace("{}", "{ }"), own.replace("{}", "{\n}")]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_without_arguments_has_an_empty_object(name: str) -> None:
    for text in empty(name):
        content, calls, _ = parsed(name, text)
        assert (content.strip(), calls) == ("", [("now", {})]), text
        if name in MARKED and not text.endswith(("now", "]", ">")):
            continue
        if name in MARKED:
            more = several(name, ("read", {"path": "x"}))
            assert parsed(name, f"Hm.{text}{more}")[:2] == ("Hm.", [("now", {}), ("read", {"path": "x"})]), text + more


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[now]"),
        ("pythonic", "[ now ]\n"),
        ("llama4_pythonic", "[now]"),
        ("llama4_pythonic", "<|python_start|>[now]<|python_end|>"),
        ("llama4_pythonic", "<|python_start|>now<|python_end|>"),
        ("gemma", "```tool_code\nnow\n```"),
        ("gemma", "```tool_code\n[now]\n```"),
        ("gemma", "```tool_code\nprint(now)\n```"),
    ],
)
def test_a_name_alone_is_a_call_where_only_calls_stand(name: str, text: str) -> None:
    assert parsed(name, text) == ("", [("now", {})], "")


def test_names_in_a_list_are_calls_up_to_its_end() -> None:
    calls = [("now", {}), ("read", {"path": "x"}), ("now", {})]
    assert parsed("pythonic", "[now, read(path='x'), now]") == ("", calls, "")
    for text in ("[now](http://a)", "[now]: a link", "[now, then]", "[now is late]", "[unknown]", "[now", "[now] and"):
        assert parsed("pythonic", text) == (text, [], "")


@pytest.mark.parametrize("name", ["functiongemma", "gemma4"])
@pytest.mark.parametrize("nothing", ["null", " null", "None", "{null}", "{ None }", "()", "( )", "[]", '""', '{""}'])
def test_gemmas_calls_without_arguments_may_spell_them(name: str, nothing: str) -> None:
    text = written(name, "now", {}).replace("{}", nothing)
    assert parsed(name, text + text) == ("", [("now", {})] * 2, "")


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
    text = _read("openai", [own.replace('{"path": "```"}', "```\nls\n```")], TOOLS, "openai_gptoss", False)
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


# -- singular and plural


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("kimi_k2", [("calls_section", "call_section")]),
        ("hermes", [("<tool_call>", "<tool_calls>"), ("</tool_call>", "</tool_calls>")]),
        ("granite", [("<|tool_call|>", "<|tool_calls|>")]),
        ("phi4_mini_json", [("tool_call|", "tool_calls|")]),
        ("mistral", [("[TOOL_CALLS]", "[TOOL_CALL]")]),
        ("minimax_m2", [("minimax:tool_call>", "minimax:tool_calls>")]),
        ("deepseek_v32", [("function_calls>", "function_call>")]),
        ("qwen3_coder", [("tool_call>", "tool_calls>")]),
        ("functiongemma", [("function_call>", "function_calls>")]),
        ("deepseek_v31", [("calls▁begin", "call▁begin"), ("calls▁end", "call▁end")]),
        ("deepseek_v3", [("calls▁begin", "call▁begin"), ("calls▁end", "call▁end")]),
    ],
)
def test_singular_and_plural_marks_are_the_same(name: str, pairs: list[tuple[str, str]]) -> None:
    text = written(name, "read", {"path": "x"})
    for left in (1, 2):  # all marks, or only the first one
        other = text
        for own, changed in pairs:
            other = other.replace(own, changed, -1 if left == 1 else 1)
        assert other != text
        assert parsed(name, f"Hm.{other}") == ("Hm.", [("read", {"path": "x"})], ""), other


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3", "deepseek_v31"])
def test_a_section_without_calls_is_no_text(name: str) -> None:
    form: Any = TOOL_FORMATS[name]  # type: ignore[index]
    assert parsed(name, f"Hm.{form.section[0]}\n{form.section[1]}") == ("Hm.", [], "")


def test_one_mark_may_surround_several_calls() -> None:
    calls = [("read", {"path": "x"}), ("now", {})]
    for name, begin, end in (
        ("hermes", "<tool_calls>\n", "\n</tool_calls>"),
        ("glm45", "<tool_calls>", "</tool_calls>"),
    ):
        assert parsed(name, f"{begin}{several(name, *calls)}{end}") == ("", calls, "")


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
