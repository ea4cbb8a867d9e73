"""Converts JSON schemas, regular expressions, choices and grammars to the text form used in `SamplingParams`.

The text is llguidance's serialized form. Nothing here imports torch, because API processes check grammars with it.
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
from weft.engine.wire.json_schemas import check_counts, without_nulls
from weft.engine.wire.number_bounds import kept_bounds

MAX_GRAMMAR_CHARS = 64 * 1024
STACK_BYTES = 256 * 2**20
"""Stack size of threads that compile: nested rules are followed by recursion, as deep as the text allows."""

WHITESPACE = r" |\r?\n[ \t]{0,24}"
"""Whitespace between JSON tokens: a space, or a line break with indentation. It is bounded because a model could fill
its output with whitespace."""

LIMITS = LLParserLimits(initial_lexer_fuel=500_000, max_lexer_states=20_000, verbose_errors=False)
"""Limits of the work of compiling a grammar, and of each token."""

_stack_size_lock = threading.Lock()


def json_schema(schema: dict[str, Any] | bool, *, lenient: bool = False, whitespace: str = WHITESPACE) -> str:
    """Return the grammar of a JSON schema. With `lenient`, keywords that cannot be enforced are ignored, not refused.
    `whitespace`: the pattern of whitespace between tokens. Raises `RequestError` if the schema allows no value, or has
    bounds that cannot be enforced."""
    if schema is False or schema == {"not": {}} or schema == {"not": True}:
        raise RequestError("the schema allows no value", "grammar")
    return json.dumps({"grammars": [{"json_schema": json_options(schema, lenient=lenient, whitespace=whitespace)}]})


def json_options(schema: dict[str, Any] | bool, *, lenient: bool, whitespace: str = WHITESPACE) -> dict[str, Any]:
    """Return the schema with this server's rules for whitespace and unknown keywords, without nulls, and with
    enforceable bounds. Raises `RequestError`."""
    base: dict[str, Any] = {} if schema else {"not": {}}
    if isinstance(schema, dict):
        base = kept_bounds(without_nulls(schema))
        if not lenient:
            check_counts(base)
    return {**base, "x-guidance": {"whitespace_pattern": whitespace, "lenient": lenient}}


def regex(pattern: str) -> str:
    """Return the grammar of texts that match the pattern (Rust `regex` syntax: no look-around or back-references)."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(literal, texts)))


def lark(text: str) -> str:
    return LLMatcher.grammar_from_lark(text)


def grammar(text: str) -> str:
    """Convert a context-free grammar in Lark or GBNF syntax. Raises `RequestError` if it is neither."""
    try:
        return lark(any_to_lark(text))
    except Exception as error:  # the converter raises many types
        raise RequestError(f"the grammar cannot be read: {' '.join(str(error).split())}"[:200], "grammar") from None


def either(texts: Sequence[str]) -> str:
    """Return the union of grammars. Each keeps its rule names."""
    first = "start: " + " | ".join(f"@weft_part_{i}" for i in range(len(texts)))
    return joined(first, {f"weft_part_{i}": text for i, text in enumerate(texts)})


def within(lark: str, rest: str) -> str:
    """Return a Lark grammar that refers to another grammar as `@weft_rest`."""
    return joined(lark, {"weft_rest": rest})


def joined(lark: str, named: dict[str, str]) -> str:
    """Return a Lark grammar that refers to others as `@name`. Names must be unique to the calling code."""
    parts = [{"name": "start", "lark_grammar": lark}]
    for name, text in named.items():
        parts += _parts(text, name)
    return json.dumps({"grammars": parts})


def _parts(text: str, name: str) -> list[dict[str, Any]]:
    """Return the parts of a grammar, which may be plain Lark, renamed to `name` and names that start with it."""
    if not text.lstrip().startswith("{"):
        return [{"name": name, "lark_grammar": text}]
    parts = [{k: v for k, v in part.items() if v is not None} for part in json.loads(text)["grammars"]]
    names = [part["name"] for part in parts[1:]]  # added by `joined`
    for part in parts:
        for inner in names:
            if "lark_grammar" in part:
                part["lark_grammar"] = re.sub(rf"@{inner}\b", f"@{name}_{inner}", part["lark_grammar"])
    for part, inner in zip(parts, ["", *names], strict=True):
        part["name"] = f"{name}_{inner}" if inner else name
    return parts


def literal(text: str) -> str:
    """Return a text as a Lark string with all control characters escaped; JSON does not escape U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def compile_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return threads whose stack no grammar can exhaust (`STACK_BYTES`, allocated on use)."""
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool, all_there = ThreadPoolExecutor(count, thread_name_prefix=name), threading.Barrier(count)
            for started in [pool.submit(all_there.wait) for _ in range(count)]:
                started.result()
        finally:
            threading.stack_size(before)
    return pool
