"""`TagFormat`: calls as tags with one tag per parameter, converted to JSON by their schemas: Qwen3-Coder, GLM,
MiniMax, DeepSeek since V3.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from weft.engine.wire.grammar_text import literal
from weft.server.bodies import parse_json
from weft.server.tools.stream import SPACE, Reader, Steps, quoted
from weft.server.tools.tool_format import Marker, Schema, ToolFormat, Tools, after_mark, json_value, through


@dataclass(frozen=True)
class TagFormat(ToolFormat):
    call: tuple[str, str]  # Marks around a call; the name follows the first.
    name_end: str  # Mark after the name; empty if the next mark ends it.
    key: tuple[str, str]
    value: tuple[str, str]
    section: tuple[str, str] = ("", "")  # Marks around calls.
    several_in_section: bool = False
    hint: str = ""  # Attribute after the key that states whether the value is a string: ` string="`.
    padded: bool = False  # Whether the format adds a line break at both ends of a value.
    tokens: tuple[str, ...] = ()  # Parts of marks that are tokens.
    line: str = "\n"  # Text between tags.

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.section, *self.call, *self.key, *self.value, *self.tokens)))

    @property
    def markup(self) -> tuple[str, str | None] | None:
        return self.section if self.section[0] else self.call

    # -- reading

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        opens = tuple(filter(None, (self.section[0], self.call[0])))
        closes = (self.section[1],) if self.section[1] else ()
        open = False
        while mark := (yield from reader.text_until(*opens, *(closes if open else ()))):
            if mark in closes:
                reader.accept()
                open = False
                continue
            if mark == self.section[0]:
                yield from reader.space()
                if not (yield from reader.take(self.call[0])):
                    reader.give_up()
                    continue
            open |= yield from self._call(reader, tools, bare=mark != opens[0])
            while open and closes and (yield from reader.attempt_after_space(self.call[0])):
                yield from self._call(reader, tools, bare=False)

    def _call(self, reader: Reader, tools: Tools, *, bare: bool) -> Steps[bool]:
        """Read a call from its name on. Returns False if it is text. `bare`: outside its section, where it only counts
        if its tool was offered."""
        if self.name_end:
            name, _ = yield from reader.name(self.name_end)
        else:
            name, mark = yield from reader.name(self.key[0], self.call[1])
            reader.at -= len(mark)
        name = name.strip()
        if not name or any(char in name for char in SPACE + '<>{}"') or (bare and name not in tools):
            reader.give_up()
            return False
        reader.call(name)
        schema = tools.get(name) or {}
        count, closed = 0, False
        while not closed:
            reader.attempt()
            yield from reader.space()
            mark = yield from reader.take(self.key[0], self.call[1])
            if mark != self.key[0]:
                closed = mark == self.call[1]
                break
            key, _ = yield from reader.name(self.key[1])
            if not key:
                break
            key, is_text = self._hint(key.strip())
            if self.value[0]:
                yield from reader.space()
                yield from reader.take(self.value[0])
            reader.accept()
            reader.emit_arguments(f"{', ' if count else '{'}{orjson.dumps(key).decode()}: ")
            count += 1
            kind = _of(schema, key) if is_text is None else {"type": "string"} if is_text else {}
            if not (yield from self._value(reader, kind)):
                return True  # cut off
        if closed:
            reader.accept()
        elif (yield from reader.peek()):
            reader.give_up()
        else:
            reader.accept()
            return True  # cut off
        reader.emit_arguments("}" if count else "{}")
        return True

    def _hint(self, key: str) -> tuple[str, bool | None]:
        if not self.hint:
            return key, None
        name, found, flag = key.partition(self.hint)
        return name.rstrip('" '), flag.startswith("true") if found else None

    def _value(self, reader: Reader, schema: Schema) -> Steps[bool]:
        """Emit a value and skip the mark after it. Returns False if the answer ended first."""
        held = ""
        streams = kinds(schema) == {"string"}
        opened = False

        def take(text: str) -> None:
            nonlocal held, opened
            held += text
            if self.padded and not opened:
                held, opened = held.removeprefix("\n"), True
            if streams:
                keep = 1 if self.padded and held.endswith("\n") else 0
                reader.emit_arguments(quoted(held[: len(held) - keep]))
                held = held[len(held) - keep :]

        if streams:
            reader.emit_arguments('"')
        found = yield from reader.until(self.value[1], to=take)
        if streams:
            reader.emit_arguments('"' if found else quoted(held))
        elif found:
            reader.emit_arguments(as_json(held.removesuffix("\n") if self.padded else held, schema))
        return bool(found)

    # -- writing

    def grammar(self, tools: Sequence[tuple[str, Schema]], marker: Marker, *, several: bool, free: bool = False) -> str:
        line = literal(self.line) if self.line else ""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, (name, schema) in enumerate(tools):
            head = f"{_mark(self.name_end, marker)} {line}"
            rules.append(f"call_{i}: {literal(name)} {head} parameters_{i} {marker(self.call[1])}")
            rules += self._parameters(f"parameters_{i}", schema, marker)
        begin = marker(self.call[0])
        if self.section[0]:
            end = f"{line} {marker(self.section[1])}"
            if self.several_in_section:
                rules.append(f"calls: {line} {begin} call{f' ({line} {begin} call)*' if several else ''} {end}")
            else:
                again = f" ({literal(chr(10))} {marker(self.section[0])} one)*" if several else ""
                rules.append(f"calls: one{again}\none: {line} {begin} call {end}")
        else:
            again = f" ({literal(chr(10))} {begin} call)*" if several else ""
            rules.append(f"calls: call{again}")
        return after_mark("\n".join(rules), self.section[0] or self.call[0], marker, free=free)

    def _parameters(self, rule: str, schema: Schema, marker: Marker) -> list[str]:
        properties = schema.get("properties")
        line = literal(self.line) if self.line else ""
        if not isinstance(properties, dict) or not _plain(properties):
            opened = self._open(r"/[^<>\s\"]{1,64}/", "true", marker)
            return [f"{rule}: ({opened} {rule}_value {line})*", *self._text_value(f"{rule}_value", marker)]
        shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts, rules = [], []
        for i, (key, given) in enumerate(properties.items()):
            value, text = f"{rule}_{i}", "string" in kinds(given)
            rules += self._written(value, {**given, **shared}, marker, text=text)
            part = f"{self._open(literal(key), 'true' if text else 'false', marker)} {value} {line}"
            parts.append(part if key in schema.get("required", ()) else f"({part})?")
        return [f"{rule}: {' '.join(parts) or literal('')}", *rules]

    def _open(self, key: str, is_text: str, marker: Marker) -> str:
        hint = literal(f'"{self.hint}{is_text}') if self.hint else ""
        value = _mark(self.value[0], marker)
        between = literal(self.line) if self.value[0] and self.line else ""
        return f"{marker(self.key[0])} {key} {hint} {marker(self.key[1])} {between} {value}"

    def _written(self, rule: str, schema: Schema, marker: Marker, *, text: bool) -> list[str]:
        pad = literal("\n") if self.padded else ""
        end = marker(self.value[1])
        if text:
            if not (values := choices(schema)):
                return self._text_value(rule, marker)
            return [f"{rule}: {pad} ({' | '.join(map(literal, values))}) {pad} {end}"]
        return [f"{rule}: {pad} {rule}_json {pad} {end}", f"{rule}_json: {json_value(schema)}"]

    def _text_value(self, rule: str, marker: Marker) -> list[str]:
        if not self.padded:
            return through(rule, self.value[1], marker)
        end = self.value[1] if marker(self.value[1]).startswith("<[") else f"\n{self.value[1]}"
        return [f"{rule}: {literal(chr(10))} {rule}_text", *through(f"{rule}_text", end, marker)]

    def write(self, name: str, arguments: str) -> str:
        try:
            given = parse_json(arguments)
        except ValueError:
            given = {"NAME OF A PARAMETER": "ITS VALUE"}
        pad = "\n" if self.padded else ""
        out = f"{self.section[0]}{self.line if self.section[0] else ''}{self.call[0]}{name}{self.name_end}{self.line}"
        for key, value in given.items() if isinstance(given, dict) else ():
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            hint = f'"{self.hint}{"true" if isinstance(value, str) else "false"}' if self.hint else ""
            between = self.line if self.value[0] else ""
            out += f"{self.key[0]}{key}{hint}{self.key[1]}{between}{self.value[0]}{pad}{text}{pad}{self.value[1]}"
            out += self.line
        return out + self.call[1] + (self.line + self.section[1] if self.section[0] else "")


def _mark(text: str, marker: Marker) -> str:
    return marker(text) if text else ""


def _of(schema: Schema, key: str) -> Schema:
    """Return the schema of a parameter, with references resolved."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    for _ in range(8):
        if not isinstance(found, dict) or not isinstance(path := found.get("$ref"), str):
            break
        _, _, place = path.partition("#/")
        target: Any = schema
        for step in place.split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        found = target
    return found if isinstance(found, dict) else {}


def kinds(schema: Schema) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not specify any."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {kind for kind in given if isinstance(kind, str)}
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return {_kind(value) for value in values}
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            found = [kinds(option) if isinstance(option, dict) else set[str]() for option in options]
            return set().union(*found) if all(found) else set()
    return set()


def choices(schema: Schema) -> list[str]:
    """Return the texts that a value is restricted to; empty for no restriction."""
    given = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [one for one in given if isinstance(one, str)] if isinstance(given, list) else []


def _kind(value: Any) -> str:
    names: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


_WORDS = {"True": "true", "False": "false", "None": "null"}


def as_json(text: str, schema: Schema) -> str:
    """Convert text between tags to JSON of one of the schema's types."""
    allowed = kinds(schema)
    bare = text.strip(SPACE)
    bare = _WORDS.get(bare, bare)
    try:
        kind = _kind(parse_json(bare))
    except ValueError:
        return f'"{quoted(text)}"'
    fits = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    if kind == "string" and allowed and "string" in allowed:
        return f'"{quoted(text)}"'  # the quotes are part of the text
    return bare if fits or "string" not in allowed else f'"{quoted(text)}"'


def _plain(properties: dict[str, Any]) -> bool:
    """Return whether a grammar can spell out each parameter."""
    return all(
        isinstance(given, dict) and not _far(given) and not any(char in key for char in '<>"\n')
        for key, given in properties.items()
    )


def _far(schema: Any) -> bool:
    """Return whether a schema has references outside its definitions."""
    if isinstance(schema, dict):
        path = schema.get("$ref")
        if isinstance(path, str) and not path.startswith(("#/$defs/", "#/definitions/")):
            return True
        return any(map(_far, schema.values()))
    return isinstance(schema, list) and any(map(_far, schema))
