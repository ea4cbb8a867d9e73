"""Lark grammars of custom tools: a model's text inside a call follows them, with any escapes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from stub import Server
from test_tool_grammars import accepts, vocabulary

from weft.engine.errors import RequestError
from weft.engine.wire import grammar_text
from weft.server.tools.families import TOOL_FORMATS
from weft.server.tools.lark_in_json import in_json_string
from weft.server.tools.tools import Tool, call_of

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | delete | update
add: "*** Add File: " filename LF plus+
delete: "*** Delete File: " filename LF
update: "*** Update File: " filename LF change
filename: /(.+)/
plus: "+" /(.*)/ LF -> line
change: (context | line)+
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
SUM = """
start: term (("+" | "-") term)*  // a comment
term: NUMBER | "(" start ")" | call
call: NAME "(" [start ("," start)*] ")"
NAME: "a".."z"+
%import common (NUMBER, WS)
%ignore WS
"""
QUOTED = r"""start: "say"i " " /"([^"\\]|\\["\\n])*"/ ("\n" | "\t")? TAIL?
TAIL: /[\s]?[^a-z\n]\x41\/./
"""
TEXTS: list[tuple[str, list[str], list[str]]] = [
    (
        PATCH,
        [
            '*** Begin Patch\n*** Add File: a "b".py\n+x = "\\n"\t\n+\n*** End Patch\n',
            "*** Begin Patch\n*** Update File: é\n@@ f\n-a\\b\n+c\n*** Delete File: d\n*** End Patch",
        ],
        ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\n", "hello", ""],
    ),
    (SUM, ["1 + (2 - f(3.5,\n x()))", "a(1e5)", "f()"], ["1 +", "(1", "1 + )", "f(]"]),
    (QUOTED, ['say "a"', 'SAY "a\\n\\"b"\n', 'say "" 5A/"'], ["say a", 'say "a', 'say "\\x"', 'Say ""\t\t']),
    (r'start: /[^\x00-\x1f"]+/ | /\d{2}\.\w\W/ | "\\" /./s', ["abc é", '12.a"', "\\\n"], ['"', '1.a"']),
]  # fmt: skip


@pytest.mark.parametrize(("lark", "right", "wrong"), TEXTS)
def test_escaped_text_follows_the_grammar(lark: str, right: list[str], wrong: list[str]) -> None:
    plain, inside = grammar_text.lark(lark), grammar_text.lark(in_json_string(lark))
    for text in [*right, *wrong]:
        assert accepts(plain, text, False) is accepts(inside, json.dumps(text, ensure_ascii=False)[1:-1], False), text
    assert all(accepts(plain, text, False) for text in right)
    assert not any(accepts(plain, text, False) for text in wrong)


@pytest.mark.parametrize("lark", [PATCH, SUM, QUOTED])
def test_damaged_texts_are_detected_alike(lark: str) -> None:
    plain, inside = grammar_text.lark(lark), grammar_text.lark(in_json_string(lark))
    rng = random.Random(4)
    for text in next(right for given, right, _ in TEXTS if given == lark):
        for _ in range(10):
            at = rng.randrange(len(text))
            damaged = text[:at] + rng.choice(['"', "\\", "\n", "\t", "é", "a", "(", ""]) + text[at + 1 :]
            written = json.dumps(damaged, ensure_ascii=False)[1:-1]
            assert accepts(plain, damaged, False) is accepts(inside, written, False), damaged


@pytest.mark.parametrize(
    ("lark", "words"),
    [
        ("start: @other", "this cannot be followed inside a call: '@other"),
        ("start: <[5]>", "this cannot be followed inside a call: '<[5]>"),
        ('start: %json {"type": "object"}', "%json is not supported"),
        ("start: ~/a/", "negation"),
        (r"start: /a\b/", r"\b is not supported"),
        ("start: /^a/", "^ is not supported"),
        ("start: /a(?=b)/", "(? is not supported"),
        ("start: /a b/x", "the flag x"),
        (r"start: /\q/", r"\q is not supported"),
        ('start: "ab".."z"', "a range is between two characters"),
        ("%import common.NOPE", "%import common.NOPE is not known"),
        ("%import other.INT", "only terminals of common"),
        ("begin: /a/", "needs a rule named start"),
        ("start: a[capture]\na: /a/", "a[capture] is not supported"),
        (r'start: /[^,]+/ "," start | "\n"', "cannot tell the end of text with line breaks"),
    ],
)
def test_unsupported_grammars_are_named(lark: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        in_json_string(lark)
    assert words in str(refused.value)


def _tool(definition: str, syntax: str = "lark") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "apply", "format": form}}


JSON_FORMATS = [name for name in TOOL_FORMATS if '{"input"' in TOOL_FORMATS[name].write("apply", '{"input": "a"}')]
"""whose calls hold their arguments as JSON"""


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", JSON_FORMATS)
def test_calls_of_every_json_format_follow_the_grammar(name: str, special: bool) -> None:
    form, tool = TOOL_FORMATS[name], Tool.model_validate(_tool(PATCH))  # type: ignore[index]
    _, write = call_of([tool], form, vocabulary(special)[0], parallel=False)
    grammar = write()
    for text, fits in ((TEXTS[0][1][0], True), ("no patch", False)):
        call = form.write("apply", json.dumps({"input": text}, ensure_ascii=False))
        assert accepts(grammar, call.removesuffix("<|call|>"), special) is fits  # which ends the turn


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - set(JSON_FORMATS)))
def test_formats_without_json_follow_only_the_form_of_a_call(name: str) -> None:
    form, tool = TOOL_FORMATS[name], Tool.model_validate(_tool("start: <[5]>"))  # type: ignore[index]
    assert "weft_input" not in call_of([tool], form, vocabulary(False)[0], parallel=False)[1]()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_grammar_is_kept_when_the_model_may_choose(hermes: Server) -> None:
    lines = _tool(r'start: (/[^"\n]+/ "\n")+')
    for tool, good, bad in ((lines, "one\ntwo\n", "one"), (_tool("[a-c]+", "regex"), "abc", "d")):
        await hermes.chat(tools=[tool, {"type": "function", "function": {"name": "now"}}])
        grammar = hermes.engine.added[-1].params.grammar
        assert grammar is not None

        def called(text: str) -> str:
            return TOOL_FORMATS["hermes"].write("apply", json.dumps({"input": text}, ensure_ascii=False))

        assert accepts(grammar, "Let me see.", False)
        assert accepts(grammar, f"So: {called(good)}", False)
        assert not accepts(grammar, called(bad), False)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grammar_that_cannot_be_kept_is_reported_if_a_call_is_required(hermes: Server) -> None:
    tools = [_tool("start: <[5]>")]
    requested = {"messages": [{"role": "user", "content": "a"}], "tools": tools}
    response = await hermes.post("/v1/chat/completions", {**requested, "tool_choice": "required"})
    assert response.status_code == 400
    assert "inside a call" in response.json()["error"]["message"]
    assert (await hermes.post("/v1/chat/completions", requested)).status_code == 200
    assert hermes.engine.added[-1].params.grammar is None
