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
DEEPSEEK_V3 = NamedFormat(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    begin="<｜tool▁call▁begin｜>",
    prefix="function<｜tool▁sep｜>",
    name_end="\n",
    fence=("```json\n", "\n```"),
    end="<｜tool▁call▁end｜>",
    separator="\n",
)
DEEPSEEK_V31 = NamedFormat(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    begin="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
DEEPSEEK_V32 = TagFormat(
    section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    several_in_section=True,
    call=('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
    name_end='">',
    key=('<｜DSML｜parameter name="', '">'),
    hint=' string="',
    value=("", "</｜DSML｜parameter>"),
    tokens=("｜DSML｜",),
)
KIMI_K2 = NamedFormat(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin="<|tool_call_begin|>",
    name_end="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    numbered=True,
)
QWEN3_CODER = TagFormat(
    section=("<tool_call>", "</tool_call>"),
    call=("<function=", "</function>"),
    name_end=">",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    padded=True,
)
GLM45 = TagFormat(
    call=("<tool_call>", "</tool_call>"),
    name_end="",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)
MINIMAX_M2 = TagFormat(
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    several_in_section=True,
    call=('<invoke name="', "</invoke>"),
    name_end='">',
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
)
GRANITE = ObjectFormat("<|tool_call|>", listed=True, also=("<tool_call>",))
PHI4_MINI = ObjectFormat("<|tool_call|>", "<|/tool_call|>", listed=True, also=("functools",))
GEMMA_CODE = PythonFormat("```tool_code", "```", listed=False, pad="\n")
FUNCTION_GEMMA = CallFormat("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = CallFormat("<|tool_call>", "<tool_call|>", '<|"|>')

TOOL_FORMATS: dict[ToolParserName, ToolFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "llama4_json": LLAMA3,
    "llama4_pythonic": PythonFormat("<|python_start|>", "<|python_end|>"),
    "pythonic": PythonFormat(),
    "mistral": MistralFormat(has_args=True),
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "glm45": GLM45,
    "kimi_k2": KIMI_K2,
    "minimax_m2": MINIMAX_M2,
    "granite": GRANITE,
    "phi4_mini_json": PHI4_MINI,
    "openai": HarmonyFormat(),
    "gemma": GEMMA_CODE,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
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

KIMI_THINK = ReasoningFormat("<think>", "</think>", cuts=("<|tool_calls_section_begin|>",))
DEEPSEEK_THINK = ReasoningFormat("<think>", "</think>", cuts=("<｜tool▁calls▁begin｜>",))
MISTRAL_THINK = ReasoningFormat("[THINK]", "[/THINK]", forced="[/THINK]")
GRANITE_THINK = ReasoningFormat(
    "Here is my thought process:",
    "Here is my response:",
    also=(("Here's my thought process:", "Here's my response:"), ("<think>", "</think>")),
    wraps=("<response>", "</response>"),
)
GEMMA4_THINK = ReasoningFormat(
    "<|channel>thought\n", "<channel|>", also=(("<|channel>thought", "<channel|>"),), forced="<channel|>"
)

REASONING_FORMATS: dict[ReasoningParserName, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", cuts=("<｜tool▁calls▁begin｜>",), always=True),
    "deepseek_v3": DEEPSEEK_THINK,
    "qwen3": THINK,
    "glm45": THINK,
    "kimi_k2": KIMI_THINK,
    "minimax_m2": THINK,
    "openai_gptoss": HARMONY,
    "mistral": MISTRAL_THINK,
    "granite": GRANITE_THINK,
    "gemma4": GEMMA4_THINK,
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
