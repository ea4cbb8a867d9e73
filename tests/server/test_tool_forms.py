"""Forms of calls that models write although their format has another: fences, other keys, other versions' marks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_answers import JSON, PYTHON, TAGS, TOOLS, parsed, written

from weft.server.tools.parameter_types import as_json

READ = ("read", {"path": "a", "limit": 3})
OBJECT = '{"path": "a", "limit": 3}'
OTHER = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n%s\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
"""The form of DeepSeek V3, which its successors also write."""


@pytest.mark.parametrize("name", [name for name in JSON if not name.startswith("llama")])
@pytest.mark.parametrize(("before", "after"), [("```json\n", "\n```"), ("```\n", "```"), ("```json", "```")])
def test_json_of_a_call_may_stand_in_a_fence(name: str, before: str, after: str) -> None:
    whole = written(name, *READ)
    first = "{" if name == "hermes" else "[" if name in ("granite", "phi4_mini_json") else OBJECT
    start, end = whole.index(first), whole.rindex("]" if first == "[" else "}") + 1
    fenced = whole[:start].removesuffix("```json\n") + before + whole[start:end] + after
    assert parsed(name, fenced + whole[end:].removeprefix("\n```")) == ("", [READ], "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek_v31", OTHER % OBJECT),
        ("deepseek_v31", OTHER.replace("\n```json\n", "<｜tool▁sep｜>").replace("\n```", "") % OBJECT),
        ("deepseek_v32", written("deepseek_v32", *READ).replace("function_calls", "tool_calls")),
        ("minimax_m2", written("minimax_m2", *READ).replace("tool_call>", "tool_calls>")),
        ("hermes", f'<tool_call>{{{{{json.dumps("name")}: {json.dumps("read")}, "arguments": {OBJECT}}}}}</tool_call>'),
        *((name, written(name, *READ).replace("call:", ":")) for name in ("gemma4", "functiongemma")),
        *((name, written(name, *READ).replace("call:", "")) for name in ("gemma4", "functiongemma")),
        *(("hermes", written("hermes", *READ).replace("arguments", key)) for key in ("args", "input", "params")),
    ],
)
def test_marks_and_keys_of_other_versions_are_read(name: str, text: str) -> None:
    assert parsed(name, text) == ("", [READ], "")


def test_a_tool_may_be_named_like_deepseeks_type() -> None:
    text = written("deepseek_v31", "function", {"a": 1})
    assert parsed("deepseek_v31", text, tools={"function": {}})[1] == [("function", {"a": 1})]


@pytest.mark.parametrize("between", ["\n", "", ", "])
def test_one_pair_of_marks_may_surround_several_objects(between: str) -> None:
    objects = between.join(f'{{"name": "{name}", "arguments": {{}}}}' for name in ("read", "now"))
    text = f"<tool_call>\n{objects}\n</tool_call>"
    if between == ", ":  # not valid in either reading
        assert parsed("hermes", text)[1][0] == ("read", {})
        return
    assert parsed("hermes", text) == ("", [("read", {}), ("now", {})], "")
    other = text.replace('"now"', '"Ann"')  # no tool: data
    assert parsed("hermes", other)[1] == [("read", {})]


@pytest.mark.parametrize("name", PYTHON)
def test_pythons_sets_are_lists(name: str) -> None:
    values = "at={'a': {1, 'b, c'}, 'd': {}, 'e': {'f': {'g'}}}"
    text = written(name, "read", {"at": 1}).replace("at=1", values)
    assert parsed(name, text) == ("", [("read", {"at": {"a": [1, "b, c"], "d": {}, "e": {"f": ["g"]}}})], "")


INTEGER, NUMBER, OBJECTS = {"type": "integer"}, {"type": "number"}, {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (INTEGER, "+5", 5),
        (INTEGER, "007", 7),
        (INTEGER, "1_000", 1000),
        (INTEGER, '"5"', 5),
        (INTEGER, "five", "five"),
        (NUMBER, ".5", 0.5),
        (NUMBER, "5.", 5.0),
        (NUMBER, "nan", "nan"),
        (NUMBER, "Infinity", "Infinity"),
        ({"type": ["number", "string"]}, "+5", "+5"),
        ({"type": "boolean"}, "+5", "+5"),
        (OBJECTS, "{'a': (1, 2), 'b': {2, 1}}", {"a": [1, 2], "b": [1, 2]}),
        (OBJECTS, '```json\n{"a": 1}\n```', {"a": 1}),
        (OBJECTS, "```{'a': 1}```", {"a": 1}),
        (OBJECTS, '"{\\"a\\": 1}"', {"a": 1}),
        ({"type": "string"}, "```json\n{}\n```", "```json\n{}\n```"),
    ],
)
def test_values_of_types_other_than_string_have_several_spellings(schema: Any, text: str, value: Any) -> None:
    assert json.loads(as_json(text, schema, schema)) == value


@pytest.mark.parametrize("name", TAGS)
def test_numbers_between_tags_may_be_pythons(name: str) -> None:
    text = written(name, "read", {"limit": 77}).replace("77", "+77")
    assert parsed(name, text, tools=TOOLS) == ("", [("read", {"limit": 77})], "")
