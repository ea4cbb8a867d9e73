"""Grammars as text: how a JSON schema, a regular expression, a choice or a grammar is written for `SamplingParams`.

The text is llguidance's serialised form. Nothing here imports torch: API processes check grammars with it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from weft.engine.errors import RequestError
from weft.engine.wire.number_bounds import kept_bounds

MAX_GRAMMAR_CHARS = 64 * 1024
STACK_BYTES = 256 * 2**20
"""of a thread that compiles: rules that lead to rules, as long as the text allows, are followed by recursion"""

WHITESPACE = r" |\r?\n[ \t]{0,24}"
"""between JSON tokens: a space or a line break with indentation; without a bound a model may fill its output with it"""

LIMITS = LLParserLimits(initial_lexer_fuel=500_000, max_lexer_states=20_000, verbose_errors=False)
"""bound the work of compiling a grammar, and of every token"""

_stack_size_lock = threading.Lock()


def json_schema(schema: dict[str, Any] | bool, *, lenient: bool = False) -> str:
    """Values of a JSON schema. lenient: pass over keywords that cannot be enforced instead of refusing them.

    Raises `RequestError` for one without values, or with bounds that cannot be kept.
    """
    if schema is False or schema == {"not": {}} or schema == {"not": True}:
        raise RequestError("the schema allows no value", "grammar")
    return json.dumps({"grammars": [{"json_schema": json_options(schema, lenient=lenient)}]})


def json_options(schema: dict[str, Any] | bool, *, lenient: bool) -> dict[str, Any]:
    """The schema with this server's rules for whitespace and unknown keywords, and with bounds that are kept. Raises
    `RequestError`."""
    base = kept_bounds(schema) if isinstance(schema, dict) else {} if schema else {"not": {}}
    return {**base, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": lenient}}


def regex(pattern: str) -> str:
    """Texts that the pattern matches as a whole (syntax of Rust's `regex`: no look-around, no back-references)."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str]) -> str:
    """One of these texts."""
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(literal, texts)))


def lark(text: str) -> str:
    return LLMatcher.grammar_from_lark(text)


def grammar(text: str) -> str:
    """A context-free grammar in Lark or GBNF syntax. Raises `RequestError` when it is neither."""
    try:
        return lark(any_to_lark(text))
    except Exception as error:  # the converter has no error type of its own for everything
        raise RequestError(f"the grammar cannot be read: {' '.join(str(error).split())}"[:200], "grammar") from None


def either(texts: Sequence[str]) -> str:
    """What any of these grammars allows; each keeps its own names for its rules."""
    first = "start: " + " | ".join(f"@weft_part_{i}" for i in range(len(texts)))
    return joined(first, {f"weft_part_{i}": text for i, text in enumerate(texts)})


def within(lark: str, rest: str) -> str:
    """A Lark grammar that refers to another grammar as `@weft_rest`."""
    return joined(lark, {"weft_rest": rest})


def joined(lark: str, named: dict[str, str]) -> str:
    """A Lark grammar that refers to others by their names, as `@name`. The names are of one place in the code alone."""
    parts = [{"name": "start", "lark_grammar": lark}]
    for name, text in named.items():
        parts += _parts(text, name)
    return json.dumps({"grammars": parts})


def _parts(text: str, name: str) -> list[dict[str, Any]]:
    """The parts of a grammar, which may be bare Lark, under this name and names that begin with it."""
    if not text.lstrip().startswith("{"):
        return [{"name": name, "lark_grammar": text}]
    parts = [{k: v for k, v in part.items() if v is not None} for part in json.loads(text)["grammars"]]
    names = [part["name"] for part in parts[1:]]  # those of `joined`, which has put them here
    for part in parts:
        for inner in names:
            if "lark_grammar" in part:
                part["lark_grammar"] = re.sub(rf"@{inner}\b", f"@{name}_{inner}", part["lark_grammar"])
    for part, inner in zip(parts, ["", *names], strict=True):
        part["name"] = f"{name}_{inner}" if inner else name
    return parts


def literal(text: str) -> str:
    """A text as a Lark string, in which no control character stands as it is; JSON leaves U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def compile_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Threads with a stack that no grammar can use up (`STACK_BYTES`, taken as it is touched)."""
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool, all_there = ThreadPoolExecutor(count, thread_name_prefix=name), threading.Barrier(count)
            for started in [pool.submit(all_there.wait) for _ in range(count)]:
                started.result()
        finally:
            threading.stack_size(before)
    return pool
