"""Declarations of tool and reasoning formats, by option value."""

from __future__ import annotations

from weft.server.config import ReasoningParserName, ToolParserName
from weft.server.tools.harmony import HarmonyFormat
from weft.server.tools.reasoning import HARMONY, THINK, ReasoningFormat
from weft.server.tools.tool_format import ToolFormat
from weft.server.tools.tool_named import MistralFormat, NamedFormat
from weft.server.tools.tool_objects import BareObjects, ObjectFormat
from weft.server.tools.tool_python import CallFormat, PythonFormat
from weft.server.tools.tool_xml import TagFormat

HERMES = ObjectFormat("<tool_call>", "</tool_call>", pad="\n")
LLAMA3 = BareObjects()
QWEN3_CODER = TagFormat(
    section=("<tool_call>", "</tool_call>"),
    call=("<function=", "</function>"),
    name_end=">",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    padded=True,
)

TOOL_FORMATS: dict[ToolParserName, ToolFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "llama4_json": LLAMA3,
    "llama4_pythonic": PythonFormat("<|python_start|>", "<|python_end|>"),
    "pythonic": PythonFormat(),
    "mistral": MistralFormat(has_args=True),
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "deepseek_v3": NamedFormat(
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        begin="<｜tool▁call▁begin｜>",
        prefix="function<｜tool▁sep｜>",
        name_end="\n",
        fence=("```json\n", "\n```"),
        end="<｜tool▁call▁end｜>",
        separator="\n",
    ),
    "deepseek_v31": NamedFormat(
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        begin="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
    ),
    "deepseek_v32": TagFormat(
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        several_in_section=True,
        call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
        name_end='">',
        key=('<｜DSML｜parameter name="', '">'),
        hint=' string="',
        value=("", "</｜DSML｜parameter>"),
        tokens=("｜DSML｜",),
    ),
    "glm45": TagFormat(
        call=("<tool_call>", "</tool_call>"),
        name_end="",
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
    ),
    "kimi_k2": NamedFormat(
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        begin="<|tool_call_begin|>",
        name_end="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        numbered=True,
    ),
    "minimax_m2": TagFormat(
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        several_in_section=True,
        call=('<invoke name="', "</invoke>"),
        name_end='">',
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
    ),
    "granite": ObjectFormat("<|tool_call|>", listed=True, also=("<tool_call>",)),
    "phi4_mini_json": ObjectFormat("<|tool_call|>", "<|/tool_call|>", listed=True, also=("functools",)),
    "openai": HarmonyFormat(),
    "gemma": PythonFormat("```tool_code", "```", listed=False, pad="\n"),
    "functiongemma": CallFormat("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": CallFormat("<|tool_call>", "<tool_call|>", '<|"|>'),
}

TOOL_MARKS: tuple[tuple[tuple[str, ...], ToolParserName], ...] = (
    (("<|channel|>commentary",), "openai"),
    (("<｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁sep｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁sep｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<arg_key>",), "glm45"),
    (("<function=",), "qwen3_coder"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("<|/tool_call|>",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("functools[",), "phi4_mini_json"),
    (("<|/tool|>",), "phi4_mini_json"),
    (("<tool_call>",), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("tool_code",), "gemma"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters"',), "llama3_json"),
)
"""Marks in a chat template and the format they indicate; the first match wins."""

UNREAD_MARKS = (
    "<|START_ACTION|>", "<TOOLCALL>", "<seed:tool_call>", "<|tool_list_start|>", "<|tool_call_start|>", "<tool_calls>",
    "<|action_start|>", "<|tools_prefix|>", ">>>all", "<longcat_tool_call>", "<steptml:invoke", "<|tool_call:begin|>",
)  # fmt: skip
"""Marks in templates of families whose calls are not read. Such a template may contain marks of other formats too."""


REASONING_FORMATS: dict[ReasoningParserName, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "deepseek_v3": THINK,
    "qwen3": THINK,
    "glm45": THINK,
    "kimi_k2": THINK,
    "minimax_m2": THINK,
    "openai_gptoss": HARMONY,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", forced="[/THINK]"),
    "granite": ReasoningFormat(
        "Here is my thought process:",
        "Here is my response:",
        also=(("Here's my thought process:", "Here's my response:"), ("<think>", "</think>")),
        wraps=("<response>", "</response>"),
    ),
    "gemma4": ReasoningFormat(
        "<|channel>thought\n", "<channel|>", also=(("<|channel>thought", "<channel|>"),), forced="<channel|>"
    ),
}

REASONING_MARKS: tuple[tuple[str, ReasoningParserName], ...] = (
    ("<|channel|>", "openai_gptoss"),
    ("<|channel>thought", "gemma4"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("Here is my thought process", "granite"),
    ("<｜Assistant｜>", "deepseek_v3"),
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
)
