"""Answers with tool calls in every format, and what their parser makes of them."""

from __future__ import annotations

import json
import random
from typing import Any

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
    results = [read(name, pieces, tools, thinks, inside) for pieces in splits]
    results.append(read(name, list(text), tools, thinks, inside, short=True))
    assert all(result == results[0] for result in results), text
    content, calls, reasoning = results[0]
    return content, [(called, json.loads(arguments)) for called, arguments in calls], reasoning


def read(
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


def tags(name: str, *pairs: tuple[str, str], tool: str = "read") -> str:
    """A call with these texts as values."""
    form: Any = TOOL_FORMATS[name]  # type: ignore[index]
    pad = "\n" if form.padded else ""
    inner = "".join(f"{form.key[0]}{k}{form.key[1]}{form.value[0]}{pad}{v}{pad}{form.value[1]}\n" for k, v in pairs)
    end = f"\n{form.section[1]}" if form.section[1] else ""
    return f"{form.section[0]}{form.call[0]}{tool}{form.name_end}\n{inner}{form.call[1]}{end}"


def splits_mark(name: str, text: str, at: int) -> bool:
    marks = (*TOOL_FORMATS[name].markers, "print(")  # type: ignore[index]
    return any(text[:at].endswith(m[:k]) and text[at - k :].startswith(m) for m in marks for k in range(1, len(m)))
