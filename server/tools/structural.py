"""`structural_tag`: answers that mix free text and structured output, compatible with vLLM, SGLang and xgrammar.

A tree of formats becomes a Lark grammar. Unsupported formats are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from weft.engine.errors import RequestError
from weft.engine.wire import grammar_text
from weft.engine.wire.grammar_text import json_options, literal
from weft.server.errors import clip
from weft.server.tools.tool_format import Marker

Format = dict[str, Any]

MAX_REPEAT = 1024
_MARK = re.compile(r"(<[^<>]+>|\[/?[A-Z_]+\])")  # Text that may be a single special token.


def structural_tag(asked: Format, marker: Marker) -> str:
    """Return the grammar of a request's `structural_tag`, in either of its forms. Raises `RequestError`. `marker`:
    writes a mark as a token or as text."""
    if "format" in asked:
        return _Writer(marker).grammar(_object(asked["format"], "format"))
    tags = [
        {"type": "tag", "begin": s["begin"], "content": {"type": "json_schema", "json_schema": s["schema"]},
         "end": s["end"]}
        for s in asked["structures"]
    ]  # fmt: skip
    return _Writer(marker).grammar({"type": "triggered_tags", "triggers": asked["triggers"], "tags": tags})


class _Writer:
    """Writes the Lark rules of one tree. Each expression includes the text that must follow it (`after`, one of several
    texts), because nothing else ends free text."""

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self._rules: list[str] = []
        self._parts: dict[str, str] = {}  # Embedded grammars by name.
        self._writers: dict[str, Callable[[Format, Sequence[str]], str]] = {
            "const_string": self._const_string, "json_schema": self._json_schema, "grammar": self._grammar,
            "regex": self._regex, "any_text": self._any_text, "sequence": self._sequence, "or": self._or,
            "optional": self._optional, "plus": self._plus, "star": self._star, "repeat": self._repeat,
            "tag": self._tag, "triggered_tags": self._triggered_tags, "dispatch": self._dispatch,
            "tags_with_separator": self._tags_with_separator,
        }  # fmt: skip

    def grammar(self, form: Format) -> str:
        start = f"start: {self._write(form, ())}"
        return grammar_text.joined("\n".join([start, *self._rules]), self._parts)

    def _write(self, form: Format, after: Sequence[str]) -> str:
        kind = form.get("type")
        if not isinstance(kind, str) or kind not in self._writers:
            known = ", ".join(self._writers)
            raise RequestError(f"a format of type {clip(kind)!r} is not supported; supported: {known}")
        needed, others = _FIELDS[kind]
        if unknown := form.keys() - {*needed, *others, "type"}:
            raise RequestError(f"{kind}: {clip(min(unknown))!r} is not supported")
        if missing := [name for name in needed if form.get(name) is None]:
            raise RequestError(f"{kind} needs {missing[0]!r}")
        return self._rule(self._writers[kind](form, after))

    # -- single formats

    def _const_string(self, form: Format, after: Sequence[str]) -> str:
        return self._closed(self._spelled(_text(form, "value")), after)

    def _json_schema(self, form: Format, after: Sequence[str]) -> str:
        schema = form["json_schema"]
        if not isinstance(schema, dict | bool):
            raise RequestError("json_schema must be a JSON schema")
        if form.get("style") not in (None, "json"):
            raise RequestError(f"json_schema: the style {clip(form['style'])!r} is not supported")
        if form.get("any_order"):
            raise RequestError("json_schema: 'any_order' is not supported")
        return self._closed(f"%json {orjson.dumps(json_options(schema, lenient=True)).decode()}", after)

    def _grammar(self, form: Format, after: Sequence[str]) -> str:
        return self._closed(self._part(grammar_text.grammar(_text(form, "grammar"))), after)

    def _regex(self, form: Format, after: Sequence[str]) -> str:
        return self._closed(self._part(grammar_text.regex(_text(form, "pattern"))), after)

    def _any_text(self, form: Format, after: Sequence[str]) -> str:
        if form.get("max_tokens") is not None:
            raise RequestError("any_text: 'max_tokens' is not supported")
        excluded = _texts(form, "excludes")
        return self._until(after, excluded) if after else self._text(excluded)

    # -- combinations

    def _sequence(self, form: Format, after: Sequence[str]) -> str:
        elements, parts = _objects(form, "elements"), list[str]()
        while elements:
            element = elements.pop(0)
            if not elements:
                parts.append(self._write(element, after))
            elif not _open(element):
                parts.append(self._write(element, ()))
            else:  # the start of the next element ends it
                following = elements.pop(0)
                if following.get("type") == "const_string":
                    parts.append(self._write(element, [_text(following, "value")]))
                    if not elements:
                        parts.append(self._closed("", after))
                elif following.get("type") == "tag":
                    parts.append(self._write(element, [_text(following, "begin")]))
                    parts.append(self._tag({**following, "begin": ""}, after if not elements else ()))
                else:
                    kind = clip(following.get("type"))
                    raise RequestError(f"free text must be followed by a const_string or a tag, not {kind!r}")
        return " ".join(parts)

    def _or(self, form: Format, after: Sequence[str]) -> str:
        return " | ".join(self._write(element, after) for element in _objects(form, "elements"))

    def _optional(self, form: Format, after: Sequence[str]) -> str:
        return f"{self._write(_object(form['content'], 'content'), after)} | {self._closed('', after)}"

    def _plus(self, form: Format, after: Sequence[str]) -> str:
        return self._closed(f"{self._repeated(form)}+", after)

    def _star(self, form: Format, after: Sequence[str]) -> str:
        return self._closed(f"{self._repeated(form)}*", after)

    def _repeat(self, form: Format, after: Sequence[str]) -> str:
        least, most = form["min"], form["max"]
        if type(least) is not int or type(most) is not int or not 0 <= least <= MAX_REPEAT or most > MAX_REPEAT:
            raise RequestError(f"repeat: 'min' and 'max' must be integers of at most {MAX_REPEAT}")
        if most != -1 and most < least:
            raise RequestError("repeat: 'max' must be -1, or no less than 'min'")
        return self._closed(f"{self._repeated(form)}{{{least},{'' if most < 0 else most}}}", after)

    def _repeated(self, form: Format) -> str:
        content = _object(form["content"], "content")
        if _open(content):
            raise RequestError(f"{form['type']}: free text cannot be repeated")
        return self._write(content, ())

    # -- tags

    def _tag(self, form: Format, after: Sequence[str]) -> str:
        ends = form["end"] if isinstance(form["end"], list) else [form["end"]]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise RequestError("tag: 'end' must be a text, or a list of texts")
        begin, content = self._spelled(_text(form, "begin", empty=True)), _object(form["content"], "content")
        if ends == [""]:
            return f"{begin} {self._write(content, after)}"
        if "" in ends and _open(content):
            raise RequestError("tag: an end must not be empty after free text")
        return self._closed(f"{begin} {self._write(content, ends)}", after)

    def _any_tag(self, form: Format) -> str:
        return self._rule(" | ".join(self._write(tag, ()) for tag in _tags(form)))

    def _tags_with_separator(self, form: Format, after: Sequence[str]) -> str:
        tag, separator = self._any_tag(form), self._spelled(_text(form, "separator", empty=True))
        tags = tag if form.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return self._closed(tags if form.get("at_least_one") else f"({tags})?", after)

    def _triggered_tags(self, form: Format, after: Sequence[str]) -> str:
        triggers, excluded = _texts(form, "triggers"), _texts(form, "excludes")
        of: dict[str, list[str]] = {}
        for tag in _tags(form):
            begin = _text(tag, "begin")
            trigger = next((t for t in sorted(triggers, key=len) if begin.startswith(t)), None)
            if trigger is None:
                raise RequestError(f"the tag {clip(begin)!r} starts with none of the triggers")
            of.setdefault(trigger, []).append(self._write({**tag, "begin": begin.removeprefix(trigger)}, ()))
        whole = [self._write(tag, ()) for tag in _tags(form)] if form.get("at_least_one") else []
        return self._dispatched(of, whole, excluded, after, once=bool(form.get("stop_after_first")))

    def _dispatch(self, form: Format, after: Sequence[str]) -> str:
        of: dict[str, list[str]] = {}
        rules = form["rules"]
        if not isinstance(rules, list) or not all(
            isinstance(rule, list) and len(rule) == 2 and isinstance(rule[0], str) and rule[0] for rule in rules
        ):
            raise RequestError("dispatch: 'rules' must be a list of pairs of a text and a format")
        for trigger, content in rules:
            inner = _object(content, "rules")
            if _open(inner):
                raise RequestError("dispatch: free text in a rule has no end")
            of.setdefault(trigger, []).append(self._write(inner, ()))
        return self._dispatched(of, [], _texts(form, "excludes"), after, once=form.get("loop") is False)

    def _dispatched(
        self, of: dict[str, list[str]], first: list[str], excluded: list[str], after: Sequence[str], *, once: bool
    ) -> str:
        """Return free text in which a trigger must continue with one of its expressions. `first`: required first."""
        for one in of:
            if inside := next((o for o in of if o != one and o in one and not one.startswith(o)), None):
                raise RequestError(f"the trigger {clip(one)!r} contains another one, {clip(inside)!r}")
        shortest = {one: next(o for o in sorted(of, key=len) if one.startswith(o)) for one in of}
        if wrong := next((one for one, other in shortest.items() if one != other), None):
            raise RequestError(f"the trigger {clip(wrong)!r} starts with another one, {clip(shortest[wrong])!r}")
        free = [*excluded, *of]
        block = self._rule(
            " | ".join(f"{self._until([t], excluded, free)} {self._rule(' | '.join(rest))}" for t, rest in of.items())
        )
        last = self._until(after, excluded, free) if after else self._text(free)
        if first and once:
            return self._closed(self._rule(" | ".join(first)), after)
        if first:
            return f"{self._rule(' | '.join(first))} {block}* {last}"
        return f"{self._closed(block, after)} | {last}" if once else f"{block}* {last}"

    # -- Lark

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _part(self, text: str) -> str:
        name = f"weft_tag_{len(self._parts)}"
        self._parts[name] = text
        return f"@{name}"

    def _spelled(self, text: str) -> str:
        """Return fixed text, with marks as single tokens if the vocabulary has them."""
        pieces, plain = list[str](), ""
        for piece in _MARK.split(text):
            if piece and (mark := self._marker(piece)).startswith("<["):
                pieces += [literal(plain), mark] if plain else [mark]
                plain = ""
            else:
                plain += piece
        return " ".join([*pieces, literal(plain)] if plain else pieces)

    def _closed(self, expression: str, after: Sequence[str]) -> str:
        ends = [self._spelled(end) for end in after]
        if not ends:
            return expression or '""'
        return f"{expression} {self._rule(' | '.join(end or literal('') for end in ends))}"

    def _text(self, excluded: Sequence[str]) -> str:
        return f"{self._terminal(excluded)}?"

    def _terminal(self, excluded: Sequence[str]) -> str:
        """Add a terminal for non-empty text without any of these, and return its name."""
        name = f"T{len(self._rules)}"
        but = "".join(f" & ~(/(?s:.*)/ {literal(text)} /(?s:.*)/)" for text in dict.fromkeys(excluded))
        self._rules.append(f"{name}: /(?s:.+)/{but}")
        return name

    def _until(self, ends: Sequence[str], excluded: Sequence[str], also: Sequence[str] = ()) -> str:
        """Return any text up to the first occurrence of one of these ends. `also`: texts that must not occur before a
        token, because another rule matches them."""
        return self._rule(" | ".join(self._until_one(end, excluded, also) for end in ends))

    def _until_one(self, end: str, excluded: Sequence[str], also: Sequence[str]) -> str:
        first = next(filter(None, _MARK.split(end)))
        if self._marker(first).startswith("<["):  # a single token is not text
            return f"{self._terminal([*excluded, *also])}? {self._spelled(end)}"
        if any(self._marker(piece).startswith("<[") for piece in _MARK.split(end) if piece):
            raise RequestError(f"the end of free text must not have a special token in the middle: {clip(end)!r}")
        name = f"r{len(self._rules)}"
        free = f"({self._terminal(excluded)})?" if excluded else "/(?s:.*)/"
        self._rules.append(f"{name}[lazy]: {free} {literal(end)}")
        return name


_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "const_string": ((), ("value",)),
    "json_schema": (("json_schema",), ("style", "any_order")),
    "grammar": ((), ("grammar",)),
    "regex": ((), ("pattern",)),
    "any_text": ((), ("excludes", "max_tokens")),
    "sequence": ((), ("elements",)),
    "or": ((), ("elements",)),
    "optional": (("content",), ()),
    "plus": (("content",), ()),
    "star": (("content",), ()),
    "repeat": (("content", "min", "max"), ()),
    "tag": (("begin", "content", "end"), ()),
    "triggered_tags": ((), ("triggers", "tags", "at_least_one", "stop_after_first", "excludes")),
    "dispatch": (("rules",), ("loop", "excludes")),
    "tags_with_separator": ((), ("tags", "separator", "at_least_one", "stop_after_first")),
}
"""Fields of each format: those checked for presence, and the others."""


def _open(form: Format) -> bool:
    """Return whether a format may end with free text, which needs an end from what follows."""
    kind, content = form.get("type"), form.get("content")
    if kind in ("any_text", "triggered_tags", "dispatch"):
        return True
    if kind in ("or", "sequence"):
        elements = _objects(form, "elements")
        return any(map(_open, elements if kind == "or" else elements[-1:]))
    inside = kind == "optional" or (kind == "tag" and form.get("end") in ("", [""]))
    return inside and isinstance(content, dict) and _open(content)


def _object(value: Any, field: str) -> Format:
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be a format: an object with a type")
    return value


def _objects(form: Format, field: str) -> list[Format]:
    value = form.get(field)
    if not isinstance(value, list) or not value:
        raise RequestError(f"{form.get('type')} needs a list {field!r} that is not empty")
    return [_object(entry, field) for entry in value]


def _tags(form: Format) -> list[Format]:
    tags = [{"type": "tag", **tag} for tag in _objects(form, "tags")]
    for tag in tags:
        if tag["type"] != "tag":
            raise RequestError(f"{form['type']}: 'tags' must be tags, not {clip(tag['type'])!r}")
    return tags


def _text(form: Format, field: str, *, empty: bool = False) -> str:
    value = form.get(field)
    if not isinstance(value, str) or not (value or empty):
        raise RequestError(f"{form.get('type')} needs a text {field!r}")
    return value


def _texts(form: Format, field: str) -> list[str]:
    value = form.get(field)
    if value is None and field == "excludes":
        return []
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise RequestError(f"{form.get('type')}: {field!r} must be a list of texts")
    return value
