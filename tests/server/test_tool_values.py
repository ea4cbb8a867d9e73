"""Values of calls in every tool format: their types, and text that contains the format's own marks. Every answer gives
the same result whole, character by character and in random pieces."""

from __future__ import annotations

from typing import Any

import pytest
from tool_answers import PYTHON, TAGS, TEXT, parsed, several, tags, written

from weft.server.tools.families import TOOL_FORMATS

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
