"""`TagFormat`: calls as tags with one tag per parameter, converted to JSON by their schemas: Qwen3-Coder, GLM,
MiniMax, DeepSeek since V3.2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from weft.engine.wire.grammar_text import literal
from weft.server.bodies import parse_json
from weft.server.tools.parameter_types import KINDS, as_json, choices, flattened, kinds, parameter
from weft.server.tools.stream import MAX_LOOKED, MAX_NAME, SPACE, Reader, Steps, drop, quoted
from weft.server.tools.tool_format import (
    ROOT_KEYS,
    Marker,
    Schema,
    ToolFormat,
    Tools,
    after_mark,
    either_number,
    json_value,
    required_of,
    through,
)


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
    def opens(self) -> tuple[str, ...]:
        return (*either_number(self.section[0]), *self._own(self.call[0]))

    @property
    def _closes(self) -> tuple[str, ...]:
        """Marks that end a call."""
        return (*either_number(self.section[1]), *self._own(self.call[1]))

    def _own(self, mark: str) -> tuple[str, ...]:
        """Return the spellings of a mark of a call; a section's mark differs from it in number."""
        return (mark,) if self.section[0] else either_number(mark)

    @property
    def markup(self) -> tuple[str, str | None] | None:
        return self.section if self.section[0] else self.call

    # -- reading

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        opens, closes = self.opens, self._closes
        open = False
        while mark := (yield from reader.text_until(*opens, *(closes if open else ()))):
            if mark in closes:
                reader.accept()
                open = mark == self.call[1] and bool(self.section[1])
                continue
            if mark != self.call[0]:
                yield from reader.space()
                if not (yield from reader.take(self.call[0])) and self.section[0]:
                    reader.give_up()
                    continue
            bare = bool(self.section[0]) and mark == self.call[0]
            open |= yield from self._call(reader, tools, bare=bare)
            while open and self.section[1] and (yield from reader.attempt_after_space(self.call[0])):
                yield from self._call(reader, tools, bare=False)

    def _call(self, reader: Reader, tools: Tools, *, bare: bool) -> Steps[bool]:
        """Read a call from its name on. Returns False if it is text. `bare`: outside its section, where it only counts
        if its tool was offered."""
        name, mark = yield from self._name(reader, tools)
        if not name or (bare and name not in tools):
            reader.give_up()
            return False
        reader.call(name)
        schema = tools.get(name) or {}
        keys = set[str]()
        if mark.endswith("/>"):
            reader.emit_arguments("{}")
            return True
        reader.attempt()
        yield from reader.space()
        if (yield from reader.take("{", "null", "None", '""')):  # JSON instead of tags
            reader.back()
            reader.accept()
            yield from reader.space()
            yield from reader.arguments(*self._closes, *self.opens)
            yield from reader.space()
            yield from reader.take(*self._own(self.call[1]))
            return True
        reader.back()
        while (yield from reader.attempt_after_space(self.key[0])):
            key, mark = yield from reader.name(self.key[1], *filter(None, self.value[:1]))
            if not key:
                cut_off = reader.ended and len(reader.text) - reader.at <= MAX_NAME
                reader.back()
                reader.at = len(reader.text) if cut_off else reader.at
                break
            reader.at -= 0 if mark == self.key[1] else len(mark)
            key, is_text = self._hint(key.strip())
            if self.value[0]:
                yield from reader.space()
                yield from reader.take(self.value[0])
            reader.accept()
            reader.emit_arguments(f"{', ' if keys else '{'}{orjson.dumps(key).decode()}: ")
            keys.add(key)
            kind = _hinted(parameter(schema, key), schema, is_text=is_text)
            yield from _Value(self, reader, tools, schema, keys).read(kind)
            if reader.cut and reader.at == len(reader.text):
                return True
        if reader.rest_begins(self.key[0], *self._closes):
            reader.at = len(reader.text)
        reader.attempt()
        yield from reader.space()
        if (yield from reader.take(*self._own(self.call[1]))) or (not reader.cut and not (yield from reader.peek())):
            reader.accept()
        elif not (yield from reader.peek()):
            return True
        else:
            following = yield from reader.take(*self._closes, *self.opens)
            reader.broken |= not following
            reader.back()
        reader.emit_arguments("}" if keys else "{}")
        return True

    def _name(self, reader: Reader, tools: Tools) -> Steps[tuple[str, str]]:
        """Skip and return the name of a call and the mark that ends it; a mark that begins what follows is not
        skipped. The name is empty if there is none."""
        own = [self.name_end, f"{self.name_end[:-1]}/>", f"{self.name_end[:-1]} />"] if self.name_end else ["\n"]
        yield from reader.space()
        name, mark = yield from reader.name(*own, self.key[0], *self._closes, names=tools)
        if mark not in own:
            reader.at -= len(mark)
        name = _unquoted(name.strip())
        return "" if any(char in name for char in SPACE + '<>{}"') else name, mark

    def _hint(self, key: str) -> tuple[str, bool | None]:
        if not self.hint:
            return _unquoted(key), None
        name, found, flag = key.partition(self.hint)
        return name.rstrip('" '), flag.startswith("true") if found else None

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
        schema = flattened(schema)
        properties = schema.get("properties")
        line = literal(self.line) if self.line else ""
        if not isinstance(properties, dict) or not _plain(properties):
            opened = self._open(r"/[^<>\s\"]{1,64}/", "true", marker)
            return [f"{rule}: ({opened} {rule}_value {line})*", *self._text_value(f"{rule}_value", marker)]
        shared: Schema = {key: schema[key] for key in ROOT_KEYS if key in schema}
        parts, rules, required = [], [], required_of(schema)
        for i, (key, given) in enumerate(properties.items()):
            value, types = f"{rule}_{i}", kinds(given, schema)
            text = "string" in types and types != KINDS
            rules += self._written(value, {**given, **shared}, marker, text=text)
            part = f"{self._open(literal(key), 'true' if text else 'false', marker)} {value} {line}"
            parts.append(part if key in required else f"({part})?")
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
            if not (values := choices(schema, schema, strings=bool(self.hint))):
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


@dataclass
class _Value:
    """Reads the value of one parameter. Its text may contain marks of its own format, and its closing mark may be
    missing. So a closing mark counts where a parameter, the end of the call or the end of the answer follows. At any
    other mark the text is held back: if such a closing mark comes later, outside parameters that the text spells out,
    the marks before it are text. If none comes, the value ends at the first mark that may end it."""

    form: TagFormat
    reader: Reader
    tools: Tools
    schema: Schema  # Schema of the tool.
    keys: set[str]  # Parameters up to this one.
    held: str = ""  # Text that was not emitted yet.
    streams: bool = False
    opened: bool = False  # Whether the line break at the start was removed.

    def read(self, schema: Schema) -> Steps[None]:
        """Emit a value of this schema and skip the mark after it."""
        form, reader = self.form, self.reader
        self.streams = kinds(schema, self.schema) == {"string"}
        if self.streams:
            reader.emit_arguments('"')
        marks = (form.value[1], form.key[0], *form.opens, *form._closes)
        ahead = None
        while mark := (yield from reader.until(*marks, to=self._take)):
            reader.at -= len(mark)
            ahead = yield from self._end(mark)
            if ahead is not None:
                self._take(reader.text[reader.at : reader.at + ahead])
                reader.at += ahead + len(form.value[1])
                break
            if mark == form.value[1]:
                reader.at += len(mark)
                break
            if (yield from self._may_end(mark)):
                break
            self._take(mark)
            reader.at += len(mark)
        if not mark and reader.cut:
            reader.emit_arguments(quoted(self.held) if self.streams else "")
            return
        if mark != form.value[1] and ahead is None:
            text = self.held.rstrip("\n")
        else:
            text = self.held.removesuffix("\n") if form.padded else self.held
        reader.emit_arguments(f'{quoted(text)}"' if self.streams else as_json(text, schema, self.schema))

    def _take(self, text: str) -> None:
        self.held += text
        if self.form.padded and not self.opened and self.held:
            self.held, self.opened = self.held.removeprefix("\n"), True
        if self.streams:
            shown = self.held.rstrip("\n")
            self.reader.emit_arguments(quoted(shown))
            self.held = self.held[len(shown) :]

    def _end(self, mark: str) -> Steps[int | None]:
        """Return the number of characters up to the closing mark; None if there is none that counts. `mark` comes
        next. Skips nothing."""
        form, reader = self.form, self.reader
        marks = (form.value[1], form.key[0], *form._closes)
        reader.attempt()
        found, depth, left = None, 0, False
        while found is None and (mark := (yield from reader.until(*marks, to=drop))):
            at, reader.looked = reader.tried_length, reader.looked + 1
            if mark == form.key[0]:
                depth += 1
            elif mark != form.value[1]:
                left |= not depth
            elif depth:
                depth -= 1
            elif (yield from self._counts(left=left)):
                found = at - len(mark)
            if reader.looked > MAX_LOOKED:
                break
            reader.tried_length = at
        reader.back()
        return found

    def _counts(self, *, left: bool) -> Steps[bool]:
        """Return whether the closing mark before this position ends the value. `left`: after the end of the call."""
        form, reader = self.form, self.reader
        opens, sections = form.opens, either_number(form.section[1])
        yield from reader.space()
        mark = yield from reader.take(form.key[0], *opens, *form._closes)
        if mark == form.call[1] and sections:
            yield from reader.space()
            mark = (yield from reader.take(*opens, *sections)) or mark
            if mark == form.call[1]:
                return not (yield from reader.peek())
        if mark in form._closes:  # the end of the answer or another call must follow
            yield from reader.space()
            return bool((yield from reader.take(*opens))) or not (yield from reader.peek())
        return bool(mark) or not (left or (yield from reader.peek()))

    def _may_end(self, mark: str) -> Steps[bool]:
        """Return whether the value may end before this mark, because its closing mark is missing. Skips nothing."""
        form, reader = self.form, self.reader
        if mark in form._closes:
            return True
        reader.attempt()
        reader.at += len(mark)
        if mark == form.key[0]:
            key, end = yield from reader.name(form.key[1], *filter(None, form.value[:1]))
            key = form._hint(key.strip())[0]
            alone = not form.padded or self.held.endswith("\n") or (yield from reader.peek()) == "\n"
            names = self.schema.get("properties")
            known = key in names if isinstance(names, dict) and names else bool(_IDENTIFIER.fullmatch(key))
            found = bool(end) and known and alone and key not in self.keys
        else:
            yield from reader.space()
            yield from reader.take(form.call[0])
            name, _ = yield from form._name(reader, self.tools)
            found = name in self.tools
        reader.back()
        return found


_NO_TEXT: Schema = {"type": sorted(KINDS - {"string"})}
_IDENTIFIER = re.compile(r"[\w.-]+")


def _hinted(schema: Schema, root: Schema, *, is_text: bool | None) -> Schema:
    """Return the schema of a value whose tag states whether it is a string. A tag that contradicts the tool's schema
    does not count. `root`: see `kinds`."""
    allowed = kinds(schema, root)
    if is_text is None or (("string" not in allowed) if is_text else allowed == {"string"}):
        return schema
    return {"type": "string"} if is_text else _NO_TEXT


def _unquoted(name: str) -> str:
    """Return a name without the quotes that some models add."""
    return name[1:-1] if len(name) > 2 and name[0] == name[-1] and name[0] in "\"'" else name


def _mark(text: str, marker: Marker) -> str:
    return marker(text) if text else ""


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
