"""Marks that models leave out or spell differently in every tool format, and calls without arguments."""

from __future__ import annotations

from typing import Any

import pytest
from tool_answers import JSON, MARKED, PYTHON, TAGS, TOOLS, parsed, read, several, splits_mark, tags, written

from weft.server.tools.families import TOOL_FORMATS

# -- missing marks


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
            content, calls, _ = read(name, pieces, TOOLS, "openai_gptoss" if name == "openai" else "", False, cut=cut)
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
