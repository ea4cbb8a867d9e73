"""Answers of models of each family, and the text, thinking and calls in them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Transcript(NamedTuple):
    tools: str
    """name of the tool format; empty: none"""
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as passed on)"""
    reasoning: str = ""
    thinks: str = ""
    """name of the reasoning format; empty: none"""
    inside: bool = False
    """the prompt ends in the middle of thinking"""
    cut: bool = False
    """the answer was cut off, so that calls stay incomplete"""


TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"type": "object"},
            "unit": {"type": ["string", "null"]},
            "scale": {"enum": ["C", "F"]},
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
    "say": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}

A = '{"city": "Zürich", "days": 3, "place": {"lat": 47.4, "at": [1, {"x": "}]"}]}}'
B = '{"text": "say \\"é ] } </tool_call> \\\\ \\n [/TOOL_CALLS]\\u2028😀"}'
CALL_A, CALL_B = ("get_weather", A), ("say", B)


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


OBJECTS = [
    Transcript("hermes", "just text", "just text"),
    Transcript("hermes", "a <tool_cal of text \n", "a <tool_cal of text \n"),
    Transcript("hermes", "Hm.\n" + _hermes(*CALL_A), "Hm.", (CALL_A,)),
    Transcript("hermes", f"{_hermes(*CALL_A)}\n{_hermes(*CALL_B)}\n", "", (CALL_A, CALL_B)),
    Transcript("hermes", f'<tool_call>{{"arguments": {B}, "name": "say"}}</tool_call>', "", (CALL_B,)),
    Transcript("hermes", f"{_hermes(*CALL_A)}\nDone.\n", "\nDone.\n", (CALL_A,)),
    Transcript("hermes", '<tool_call>{"name": "now"}</tool_call>', "", (("now", "{}"),)),
    Transcript(
        "hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", (("now", '{"a": 1}'),)
    ),
    Transcript(
        "hermes", '<tool_call>{"name": "say", "arguments": {"text": "cut o', "", (("say", '{"text": "cut o'),), cut=True
    ),
    Transcript("hermes", "<tool_call>no object</tool_call>", "<tool_call>no object</tool_call>"),
    Transcript("hermes", '<tool_call>{"nam', '<tool_call>{"nam'),
    Transcript("hermes", '<tool_call>{"name": 5}</tool_call>x', '<tool_call>{"name": 5}</tool_call>x'),
    Transcript("hermes", '<tool_call>{"name": "now", "arguments": {}, oops}</tool_call>', "oops}", (("now", "{}"),)),
    Transcript("hermes", '{"name": "now", "arguments": {}}', '{"name": "now", "arguments": {}}'),
    Transcript(
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {A}}}, {{"name": "say", "arguments": {B}}}]',
        "",
        (CALL_A, CALL_B),
    ),
    Transcript("granite", f'<tool_call>[{{"name": "say", "arguments": {B}}}] ', "", (CALL_B,)),
    Transcript(
        "granite", '<|tool_call|>[{"name": "now", "arguments": {}}, {"foo": 1}]', ', {"foo": 1}]', (("now", "{}"),)
    ),
    Transcript("phi4_mini_json", f'<|tool_call|>[{{"name": "say", "arguments": {B}}}]<|/tool_call|>', "", (CALL_B,)),
    Transcript("phi4_mini_json", f'functools[{{"name": "say", "arguments": {B}}}]', "", (CALL_B,)),
    Transcript("phi4_mini_json", "I import functools and", "I import functools and"),
    Transcript("llama3_json", f'{{"name": "get_weather", "parameters": {A}}}', "", (CALL_A,)),
    Transcript("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {A}}}', "", (CALL_A,)),
    Transcript(
        "llama3_json",
        f'\n{{"type": "function", "name": "get_weather", "parameters": {A}}}; {{"name": "say", "parameters": {B}}}\n',
        "",
        (CALL_A, CALL_B),
    ),
    Transcript("llama3_json", '{"name": "Alice", "age": 7}', '{"name": "Alice", "age": 7}'),
    Transcript("llama3_json", '{"age": 7} and more', '{"age": 7} and more'),
    Transcript("llama3_json", '{"age"', '{"age"'),
    Transcript("llama3_json", '{"name": "now", "parameters": {}} more', " more", (("now", "{}"),)),
    Transcript(
        "llama3_json", 'Text first {"name": "now", "parameters": {}}', 'Text first {"name": "now", "parameters": {}}'
    ),
    Transcript("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    Transcript("llama3_json", " <|python", " <|python"),
]

D3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
NAMED = [
    Transcript("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {A}}}]', "", (CALL_A,)),
    Transcript(
        "mistral",
        f'ok[TOOL_CALLS][{{"name": "get_weather", "arguments": {A}}}, {{"arguments": {B}, "name": "say"}}]',
        "ok",
        (CALL_A, CALL_B),
    ),
    Transcript(
        "mistral", f"[TOOL_CALLS]get_weather[ARGS]{A}[TOOL_CALLS]say[CALL_ID]123456789[ARGS]{B}", "", (CALL_A, CALL_B)
    ),
    Transcript("mistral", f"[TOOL_CALLS]say{B}", "", (CALL_B,)),
    Transcript("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing"),
    Transcript("mistral", "a list [1, 2] [TOOL", "a list [1, 2] [TOOL"),
    Transcript("mistral", '[TOOL_CALLS]say[ARGS]{"text": "cut', "", (("say", '{"text": "cut'),), cut=True),
    Transcript(
        "deepseek_v3",
        f"Let me look.\n{D3}get_weather\n```json\n{A}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>"
        f"function<｜tool▁sep｜>say\n```json\n{B}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me look.",
        (CALL_A, CALL_B),
    ),
    Transcript("deepseek_v3", f"{D3}say\n```json\n{B}", "", (CALL_B,)),
    Transcript("deepseek_v3", f"{D3}say\nnothing", f"{D3}say\nnothing"),
    Transcript("deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>"),
    Transcript(
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{A}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>say<｜tool▁sep｜>{B}<｜tool▁call▁end｜><｜tool▁calls▁end｜> ",
        "",
        (CALL_A, CALL_B),
    ),
    Transcript(
        "kimi_k2",
        "Now.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{A}<|tool_call_end|><|tool_call_begin|>functions.say:1<|tool_call_argument_begin|>{B}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Now.",
        (CALL_A, CALL_B),
    ),
    Transcript(
        "kimi_k2",
        "<|tool_call_begin|>functions.x y:0<|tool_call_argument_begin|>{}",
        "<|tool_call_begin|>functions.x y:0<|tool_call_argument_begin|>{}",
    ),
]

TAGS = [
    Transcript(
        "qwen3_coder",
        'I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich "x" \\ <b>\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=tags>\n"
        '["a", "</b>"]\n</parameter>\n<parameter=unit>\nnull\n</parameter>\n<parameter=scale>\nF\n</parameter>\n'
        "</function>\n</tool_call>",
        "I look.",
        (
            (
                "get_weather",
                '{"city": "Zürich \\"x\\" \\\\ <b>", "days": 3, "metric": true, "tags": ["a", "</b>"], '
                '"unit": null, "scale": "F"}',
            ),
        ),
    ),
    Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=say>\n<parameter=text>\n"
        "def f():\n    return '</function>'\n\n</parameter>\n</function>\n</tool_call>",
        "",
        (("now", "{}"), ("say", '{"text": "def f():\\n    return \'</function>\'\\n"}')),
    ),
    Transcript(
        "qwen3_coder",
        "<function=say>\n<parameter=text>\nno tag around\n</parameter>\n</function>\n</tool_call>",
        "",
        (("say", '{"text": "no tag around"}'),),
    ),
    Transcript("qwen3_coder", "<function=unknown>\n</function>", "<function=unknown>\n</function>"),
    Transcript("qwen3_coder", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=say>\n<parameter=text>\ncut\n",
        "",
        (("say", '{"text": "cut\\n'),),
        cut=True,
    ),
    Transcript(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\nthree\n</parameter>\noops</tool_call>",
        "\noops",
        (("get_weather", '{"days": "three"}'),),
    ),
    Transcript(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich\n</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>place</arg_key>\n<arg_value>{'a': None, 'b': 1}</arg_value>\n</tool_call>\n"
        "<tool_call>now</tool_call>",
        "",
        (("get_weather", '{"city": "Zürich\\n", "days": 3, "place": {"a": null, "b": 1}}'), ("now", "{}")),
    ),
    Transcript(
        "glm45",
        "So:<tool_call>say<arg_key>text</arg_key><arg_value>5</arg_value></tool_call>",
        "So:",
        (("say", '{"text": "5"}'),),
    ),
    Transcript(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Bern</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        (("get_weather", '{"city": "Bern", "days": 2}'), ("now", "{}")),
    ),
    Transcript(
        "deepseek_v32",
        'Well.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="other" string="false">[1, 2]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Well.",
        (("get_weather", '{"city": "5", "other": [1, 2]}'),),
    ),
]

PYTHON = [
    Transcript(
        "pythonic",
        "[get_weather(city='Zürich \"x\" \\'', days=3, metric=True, tags=[\"a\", 'b'], "
        "place={'lat': 47.4, 'n': None}), now()]",
        "",
        (
            (
                "get_weather",
                '{"city": "Zürich \\"x\\" \'", "days": 3, "metric": true, "tags": ["a", "b"], '
                '"place": {"lat": 47.4, "n": null}}',
            ),
            ("now", "{}"),
        ),
    ),
    Transcript("pythonic", '[say("by place")]', "", (("say", '{"text": "by place"}'),)),
    Transcript(
        "pythonic", '[say(text="""a "b"\n\\x41\\u00e9\\d""")]', "", (("say", '{"text": "a \\"b\\"\\nAé\\\\d"}'),)
    ),
    Transcript(
        "pythonic",
        "[get_weather(days=0x10, city=Bern, unit=-1.5e3)]",
        "",
        (("get_weather", '{"days": 16, "city": "Bern", "unit": -1.5e3}'),),
    ),
    Transcript("pythonic", '[say(text="b"\n\\x41\\d""")]', "", (("say", '{"text": "b\\"\\nA\\\\d\\"\\""}'),)),
    Transcript("pythonic", "[1, 2, 3]", "[1, 2, 3]"),
    Transcript("pythonic", "[unknown(a=1)]", "[unknown(a=1)]"),
    Transcript("pythonic", "text [now()]", "text [now()]"),
    Transcript("pythonic", "[say(text='cut o", "", (("say", '{"text": "cut o'),), cut=True),
    Transcript("pythonic", "[now()] and text", " and text", (("now", "{}"),)),
    Transcript(
        "llama4_pythonic",
        "<|python_start|>[now(), say(text='é')]<|python_end|>",
        "",
        (("now", "{}"), ("say", '{"text": "é"}')),
    ),
    Transcript("llama4_pythonic", "[now()]", "", (("now", "{}"),)),
    Transcript(
        "gemma",
        "Let me see.\n```tool_code\nprint(default_api.get_weather(city='Bern'))\nnow()\n```\n",
        "Let me see.",
        (("get_weather", '{"city": "Bern"}'), ("now", "{}")),
    ),
    Transcript("gemma", "```python\nnow()\n```", "```python\nnow()\n```"),
    Transcript("gemma", "```tool_code\nx = 1\n```", "```tool_code\nx = 1\n```"),
    Transcript(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Zü, {rich}<escape>,days:3,metric:true,"
        "tags:[<escape>a<escape>,<escape>b<escape>],place:{at:<escape>x<escape>}}<end_function_call>",
        "",
        (
            (
                "get_weather",
                '{"city": "Zü, {rich}", "days": 3, "metric": true, "tags": ["a", "b"], "place": {"at": "x"}}',
            ),
        ),
    ),
    Transcript(
        "gemma4",
        'Hm <|tool_call>call:say{text:<|"|>a "b" \\ <|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "Hm",
        (("say", '{"text": "a \\"b\\" \\\\ "}'), ("now", "{}")),
    ),
    Transcript("gemma4", "<|tool_call>nothing", "<|tool_call>nothing"),
]

HARMONY = [
    Transcript(
        "openai",
        "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{A}<|call|>",
        "",
        (CALL_A,),
        "I should look.",
        "openai_gptoss",
    ),
    Transcript(
        "openai",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|> Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello.\n\nWorld.<|return|>",
        "Hello.\n\nWorld.",
        (),
        "One.\n\nTwo.",
        "openai_gptoss",
    ),
    Transcript(
        "openai", f" to=functions.say<|channel|>commentary json<|message|>{B}", "", (CALL_B,), "", "openai_gptoss"
    ),
    Transcript(
        "openai",
        "<|channel|>commentary<|message|>First I look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.now<|message|>{}<|call|>",
        "First I look.",
        (("now", "{}"),),
        "",
        "openai_gptoss",
    ),
    Transcript("openai", "plain", "plain", (), "", "openai_gptoss"),
    Transcript("openai", "<|channel|>final", "<|channel|>final", (), "", "openai_gptoss"),
]

THINKING = [
    Transcript("", "<think>\nHm, \n\nso.\n</think>\n\nYes.\n", "Yes.\n", (), "Hm, \n\nso.", "qwen3"),
    Transcript("", "Hm.</think>Yes.", "Yes.", (), "Hm.", "qwen3", inside=True),
    Transcript("", "\n\n</think>\n\nYes.", "Yes.", (), "", "qwen3", inside=True),
    Transcript("", "<think>\n\n</think>\n\nYes.", "Yes.", (), "", "qwen3"),
    Transcript("", "No thinking, but <think> in text.", "No thinking, but <think> in text.", (), "", "qwen3"),
    Transcript("", " <thin", " <thin", (), "", "qwen3"),
    Transcript("", "<think>cut of", "", (), "cut of", "qwen3"),
    Transcript("", "cut of</thin", "", (), "cut of</thin", "deepseek_r1", inside=True),
    Transcript("", "[THINK]é 😀[/THINK]Yes", "Yes", (), "é 😀", "mistral"),
    Transcript("", "Here is my thought process: a b\n\nHere is my response:\nYes", "Yes", (), "a b", "granite"),
    Transcript("", "<think>a</think><response>Yes", "Yes", (), "a", "granite"),
    Transcript("", "<|channel>thought\nHm.<channel|>Yes.", "Yes.", (), "Hm.", "gemma4"),
    Transcript(
        "hermes",
        f"<think>\nI call <tool_call> now.\n</think>\n\n{_hermes(*CALL_A)}",
        "",
        (CALL_A,),
        "I call <tool_call> now.",
        "qwen3",
    ),
    Transcript(
        "qwen3_coder",
        "ok</think>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        (("now", "{}"),),
        "ok",
        "qwen3",
        inside=True,
    ),
    Transcript(
        "kimi_k2",
        "hm<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        (("now", "{}"),),
        "hm",
        "kimi_k2",
        inside=True,
    ),
    Transcript(
        "llama3_json", '<think>a</think>\n{"name": "now", "parameters": {}}', "", (("now", "{}"),), "a", "qwen3"
    ),
    Transcript("pythonic", "<think>a</think>[now()]", "", (("now", "{}"),), "a", "qwen3"),
]

ALL = [*OBJECTS, *NAMED, *TAGS, *PYTHON, *HARMONY, *THINKING]

MARKS = (
    "<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "functools", "<|python_tag|>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```json\n", "\n```",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "functions.", ":0", "<function=", "</function>", "<parameter=", "</parameter>", ">", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>",
    '<parameter name="', "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="',
    "</｜DSML｜invoke>", '<｜DSML｜parameter name="', '" string="true">', '" string="false">', "</｜DSML｜parameter>",
    "<|python_start|>", "<|python_end|>", "```tool_code", "print(", "<start_function_call>", "<end_function_call>",
    "<escape>", "call:", "<|tool_call>", "<tool_call|>", '<|"|>', "<|start|>", "<|channel|>", "<|message|>",
    "<|constrain|>", "<|end|>", "<|call|>", "<|return|>", "assistant", "analysis", "commentary", "final",
    " to=functions.", "<think>", "</think>", "[THINK]", "[/THINK]", "Here is my thought process:",
    "Here is my response:", "<response>", "</response>", "<|channel>thought\n", "<channel|>",
    '{"name": "now", "arguments": ', '"parameters": ', "get_weather", "now", "say", "city", "days", "text", "{",
    "}", "[", "]", "(", ")", "=", ":", ",", ";", '"', "'", '"""', "\\", "\\u12", "\\ud83d", "\\x4", "\n", " ", "\t",
    "é", "😀", "1", "-2.5e3", "0x1f", "True", "null", "None", "word", "<", "|", "f(", '{"a": [1, {"b": "c"}]}',
)  # fmt: skip
"""parts of random answers"""
