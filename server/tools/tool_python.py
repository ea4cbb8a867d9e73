"""`PythonFormat`: a list of calls in Python syntax, `[f(a=1), g()]`, or calls in a code fence. `CallFormat`: Gemma's
`call:f{a:1}` between marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from weft.engine.wire.grammar_text import literal
from weft.server.bodies import parse_json
from weft.server.tools.parameter_types import choices, flattened, kinds
from weft.server.tools.stream import MAX_NAME, SPACE, Reader, Steps
from weft.server.tools.tool_format import (
    ROOT_KEYS,
    Marker,
    Schema,
    ToolFormat,
    Tools,
    after_mark,
    at_start,
    either_number,
    json_value,
    required_of,
    through,
)
from weft.server.tools.tool_literal import Literals

_NAME = re.compile(rf"[\w.:/-]{{0,{MAX_NAME + 1}}}")
_NOTHING = re.compile(r"""\s*(?:null|None|""|\(\s*\)|\[\s*\])$""")  # Arguments of a call without any.
_PYTHON = Literals()


@dataclass(frozen=True)
class PythonFormat(ToolFormat):
    begin: str = ""  # Mark before calls; empty if an answer consists of calls.
    end: str = ""
    listed: bool = True  # Whether the model writes a list. Both forms are read.
    pad: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end)))

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.begin or "[",)

    @property
    def marked(self) -> bool:
        return bool(self.begin)

    @property
    def markup(self) -> tuple[str, str | None] | None:
        return (self.begin, self.end or None) if self.begin else None

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        reader.attempt()
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            if not (yield from self._calls(reader, tools)):
                reader.give_up()
        else:
            reader.back()
        if not self.begin:
            yield from reader.text_to_end()
            return
        ends: tuple[str, ...] = ()
        while mark := (yield from reader.text_until(self.begin, *ends)):
            if mark in ends:
                reader.accept()
                ends = ()
            elif (yield from self._calls(reader, tools)):
                yield from reader.space()
                ends = () if (yield from reader.take(self.end)) else (self.end,)
            else:
                reader.give_up()

    def _calls(self, reader: Reader, tools: Tools) -> Steps[bool]:
        """Read calls of offered tools. Returns False if there are none."""
        yield from reader.space()
        listed = yield from reader.take("[")
        found_call = False
        while True:
            if found_call:
                reader.attempt()
            yield from reader.space(SPACE + "," if listed else SPACE)
            if listed and found_call and (yield from reader.take("]")):
                reader.accept()
                return True
            wrapped = yield from reader.take("print(")
            found = yield from reader.match(_NAME)
            name = found.group() if found is not None else ""
            name = name if name in tools else name.rpartition(".")[2]
            if found is not None:
                reader.at = found.end()
            yield from reader.space()
            called = name in tools and (yield from reader.take("("))
            if name not in tools or not (called or (yield from self._is_bare(reader, tools, bool(listed)))):
                if found_call:
                    reader.back()
                return found_call
            reader.call(name)
            found_call = True
            if not called:
                reader.emit_arguments("{}")
                yield from reader.take(")" if wrapped else "")
                continue
            if (yield from _is_empty(reader, ")")):
                reader.emit_arguments("{}")
                continue
            if not (yield from _PYTHON.pairs(reader, "=", ")", schema=tools[name])):
                return True
            if wrapped:
                yield from reader.space()
                yield from reader.take(")")

    def _is_bare(self, reader: Reader, tools: Tools, listed: bool) -> Steps[bool]:
        """Return whether a tool's name without brackets is a call: only calls follow up to the end. Skips nothing."""
        at = reader.tried_length
        ends = ("]",) if listed else (")", self.end)
        while mark := (yield from reader.take(",", *ends)):
            yield from reader.space()
            if mark != ",":
                break
            found = yield from reader.match(_NAME)
            if found is None or found.group() not in tools:
                mark = ""
                break
            reader.at = found.end()
            yield from reader.space()
            if (yield from reader.peek()) == "(":
                break
        if mark == "]":
            mark = mark if (yield from reader.take(self.end)) or not (yield from reader.peek()) else ""
        reader.tried_length = at
        return bool(mark)

    def grammar(self, tools: Sequence[tuple[str, Schema]], marker: Marker, *, several: bool, free: bool = False) -> str:
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, (name, schema) in enumerate(tools):
            rules += _arguments(f"call_{i}", schema, (f"{name}(", "=", ", ", ")"), _py)
        pad = literal(self.pad) if self.pad else ""
        open, close, comma = ('"["', '"]"', '", "') if self.listed else ("", "", r'"\n"')
        end = f"{pad} {marker(self.end)}" if self.end else ""
        more = f" ({comma} call)*" if several else ""
        text = "\n".join([f"calls: {pad} {open} call{more} {close} {end}", *rules])
        return after_mark(text, self.begin, marker, free=free) if self.begin else at_start(text, r"\[", free=free)

    def write(self, name: str, arguments: str) -> str:
        given = _parsed(arguments)
        call = f"{name}({', '.join(f'{key}={_python(value)}' for key, value in given.items())})"
        return f"{self.begin}{self.pad}{f'[{call}]' if self.listed else call}{self.pad}{self.end}"


def _is_empty(reader: Reader, end: str) -> Steps[bool]:
    """Skip a single argument that stands for none, and the mark `end` after it. Returns whether there was one."""
    reader.attempt()
    yield from reader.space()
    if (yield from reader.take("None", "null", "{}", '""', "''")):
        yield from reader.space()
        if (yield from reader.take(end)):
            reader.accept()
            return True
    reader.back()
    return False


def _py(rule: str, schema: Schema) -> list[str]:
    """Return Lark rules of a value in Python syntax, or in JSON for complex values. Both are read."""
    kind = kinds(schema, schema)
    if kind == {"boolean"} and "enum" not in schema:
        return [f'{rule}: "True" | "False"']
    return [f"{rule}: " + ('"None"' if kind == {"null"} else json_value(schema))]


def _python(value: object) -> str:
    return repr(value) if not isinstance(value, str) else orjson.dumps(value).decode()


def _parsed(arguments: str) -> dict[str, object]:
    with suppress(ValueError):
        if isinstance(given := parse_json(arguments), dict):
            return given
    return {"PARAMETER": "VALUE"}


def _arguments(
    rule: str, schema: Schema, marks: tuple[str, str, str, str], value: Callable[[str, Schema], list[str]]
) -> list[str]:
    """Return Lark rules of a call: its parameters in order, the optional ones optional. `marks`: texts before all
    parameters, after a key, between parameters and after all."""
    head, equals, between, close = marks
    schema = flattened(schema)
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    given = [(key, one if isinstance(one, dict) else {}) for key, one in properties.items()]
    required = required_of(schema)
    shared: Schema = {key: schema[key] for key in ROOT_KEYS if key in schema}
    rules = [f"{rule}: {literal(head)} {rule}_f0 {literal(close)}"]
    for i, (key, one) in enumerate(given):
        # `_a`: the parameters that may follow another one; `_f`: those that may come first.
        part = f"{literal(key + equals)} {rule}_{i}"
        follows = f"{literal(between)} {part}"
        must = key in required
        rules.append(f"{rule}_a{i}: {follows if must else f'({follows})?'} {rule}_a{i + 1}")
        rules.append(f"{rule}_f{i}: {part} {rule}_a{i + 1}" + ("" if must else f" | {rule}_f{i + 1}"))
        rules += value(f"{rule}_{i}", {**one, **shared})
    return [*rules, f'{rule}_a{len(given)}: ""', f'{rule}_f{len(given)}: ""']


@dataclass(frozen=True)
class CallFormat(ToolFormat):
    begin: str
    end: str
    quote: str  # Mark around texts.
    head: str = "call:"
    literals: Literals = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "literals", Literals(quotes=('"',), raw=self.quote, stop=self.end))

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begin, self.end, self.quote

    @property
    def markup(self) -> tuple[str, str | None] | None:
        return self.begin, self.end

    @property
    def opens(self) -> tuple[str, ...]:
        return either_number(self.begin)

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        all_ends = either_number(self.end)
        ends: tuple[str, ...] = ()
        while mark := (yield from reader.text_until(*self.opens, *ends)):
            if mark in ends:
                reader.accept()
                ends = ()
                continue
            yield from reader.space()
            yield from reader.take(self.head, ":")
            name, mark = yield from reader.name("{", *all_ends, *self.opens, names=tools)
            name = name.strip()
            name = bare if (bare := _NOTHING.sub("", name)) in tools else name
            if not name or not _NAME.fullmatch(name):
                reader.give_up()
                continue
            reader.call(name)
            if mark != "{":  # without arguments
                reader.at -= len(mark)
                reader.emit_arguments("{}")
            elif (yield from _is_empty(reader, "}")):
                reader.emit_arguments("{}")
            else:
                yield from self.literals.pairs(reader, ":", "}", schema=tools.get(name))
            yield from reader.space()
            ends = () if (yield from reader.take(*all_ends)) else all_ends

    def grammar(self, tools: Sequence[tuple[str, Schema]], marker: Marker, *, several: bool, free: bool = False) -> str:
        quote = marker(self.quote)

        def value(rule: str, schema: Schema) -> list[str]:
            if kinds(schema, schema) != {"string"}:
                return [f"{rule}: {json_value(schema)}"]
            if given := choices(schema, schema):
                return [f"{rule}: {quote} ({' | '.join(map(literal, given))}) {quote}"]
            return [f"{rule}: {quote} {rule}_text", *through(f"{rule}_text", self.quote, marker)]

        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, (name, schema) in enumerate(tools):
            rules += _arguments(f"call_{i}", schema, (f"{self.head}{name}{{", ":", ",", "}"), value)
        more = f" ({marker(self.begin)} call {marker(self.end)})*" if several else ""
        text = "\n".join([f"calls: call {marker(self.end)}{more}", *rules])
        return after_mark(text, self.begin, marker, free=free)

    def write(self, name: str, arguments: str) -> str:
        pairs = ",".join(f"{key}:{self._written(value)}" for key, value in _parsed(arguments).items())
        return f"{self.begin}{self.head}{name}{{{pairs}}}{self.end}"

    def _written(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._written(one)}" for key, one in value.items()) + "}"
        return orjson.dumps(value).decode()
