"""Which family's way of writing tool calls a model uses: told by the operator, or read off its chat template."""

from __future__ import annotations

from weft.server.config import ToolParserName
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.tool_format import ToolFormat
from weft.server.tools.tool_hermes import BEGIN as HERMES_BEGIN
from weft.server.tools.tool_hermes import HermesFormat
from weft.server.tools.tool_llama3 import Llama3Format
from weft.server.tools.tool_mistral import ARGS, MistralFormat
from weft.server.tools.tool_mistral import BEGIN as MISTRAL_BEGIN
from weft.server.tools.tool_prompt import knows_tools

UNKNOWN: ToolFormat = Llama3Format()
"""what a model of an unknown family is made to write: it needs no markers"""


def detect(tokenizer: Tokenizer) -> ToolParserName:
    """The family that the model's chat template belongs to; `auto` when it knows no tools."""
    template = tokenizer.chat_template or ""
    if not knows_tools(tokenizer):
        return "auto"
    if HERMES_BEGIN in template:
        return "hermes"
    if MISTRAL_BEGIN in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama3_json"
    return "auto"


def tool_format(name: ToolParserName, tokenizer: Tokenizer) -> ToolFormat | None:
    """None when calls cannot be told from text: an unknown family. A template that knows no tools leaves the form to
    the server (`tool_prompt`)."""
    if name == "auto" and not knows_tools(tokenizer):
        return HermesFormat()
    match detect(tokenizer) if name == "auto" else name:
        case "hermes":
            return HermesFormat()
        case "mistral":
            return MistralFormat(has_args=tokenizer.token_id(ARGS) is not None)
        case "llama3_json":
            return Llama3Format()
        case _:
            return None
