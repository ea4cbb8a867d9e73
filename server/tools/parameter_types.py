"""Types of parameters, read from a tool's JSON schema: what text between tags, which carries no type, stands for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import orjson

from weft.server.bodies import parse_json
from weft.server.tools.stream import SPACE, quoted
from weft.server.tools.tool_format import Schema
from weft.server.tools.tool_json import WORDS, JsonValue

KINDS = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_MAX_REFERENCES = 64
_ANY = object()


def parameter(schema: Schema, key: str) -> Schema:
    """Return the schema of a tool's parameter; {} if the tool's schema does not restrict it."""
    found = _places(schema, key, schema, 0)
    return found[0] if len(found) == 1 else {"allOf": found} if found else {}


def _places(node: Any, key: str, root: Schema, depth: int) -> list[Schema]:
    if not isinstance(node, dict) or depth > 8:
        return []
    properties, patterns, extra = (node.get(k) for k in ("properties", "patternProperties", "additionalProperties"))
    found = list[Any]()
    if isinstance(properties, dict) and key in properties:
        found.append(properties[key])
    elif isinstance(patterns, dict) and (given := [one for text, one in patterns.items() if _matches(text, key)]):
        found += given
    else:
        found.append(extra)
    found = [one for one in found if isinstance(one, dict)]
    inner = [_target(node["$ref"], root)] if "$ref" in node else []
    for one in (*inner, *_list(node, "allOf")):
        found += _places(one, key, root, depth + 1)
    for name in ("anyOf", "oneOf"):
        options = [one for option in _list(node, name) for one in _places(option, key, root, depth + 1)]
        found += [{"anyOf": options}] if options else []
    return found


def flattened(schema: Schema) -> Schema:
    """Return a tool's schema with the parameters that `$ref` and `allOf` at its root add."""
    nodes = [schema]
    for node in nodes:
        inner = [_target(node["$ref"], schema)] if "$ref" in node else []
        nodes += [one for one in (*inner, *_list(node, "allOf")) if isinstance(one, dict) and one not in nodes]
    found = [given for node in reversed(nodes) if isinstance(given := node.get("properties"), dict)]
    if len(nodes) == 1 or not found:
        return schema
    properties = {key: one for given in found for key, one in given.items()}
    return {**schema, "properties": properties, "required": [key for node in nodes for key in _list(node, "required")]}


def _matches(pattern: str, key: str) -> bool:
    with suppress(re.error):
        return re.search(pattern, key) is not None
    return False


def _list(node: Schema, name: str) -> list[Any]:
    return given if isinstance(given := node.get(name), list) else []


def _target(path: Any, root: Schema) -> Any:
    """Return what a reference inside a schema refers to; None if there is nothing."""
    target: Any = root
    if not isinstance(path, str) or not path.startswith("#"):
        return None
    for step in filter(None, unquote(path[1:]).split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            target = target.get(name) if isinstance(target, dict) else None
    return target


def kinds(schema: Schema, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows; `KINDS` if it does not restrict them. `root`: the schema at which its
    references start."""
    return frozenset(kind for kind in KINDS if _accepts(schema, root, kind, _ANY, {}))


def _accepts(schema: Any, root: Schema, kind: str, value: Any, seen: dict[str, bool]) -> bool:
    """Return whether a schema allows a type, and the value unless it is `_ANY`. `seen`: results by reference."""
    if not isinstance(schema, dict):
        return schema is not False
    if kind == "null" and schema.get("nullable") is True:
        return True
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if isinstance(types, list) and kind not in types and not (kind == "integer" and "number" in types):
        return False
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list) and not any(_same(one, kind, value) for one in listed):
        return False
    if isinstance(path := schema.get("$ref"), str):
        if path not in seen and len(seen) < _MAX_REFERENCES:
            seen[path] = True  # a reference to itself restricts nothing
            seen[path] = _accepts(_target(path, root), root, kind, value, seen)
        if not seen.get(path, True):
            return False
    if not all(_accepts(one, root, kind, value, seen) for one in _list(schema, "allOf")):
        return False
    options = (_list(schema, name) for name in ("anyOf", "oneOf"))
    return all(any(_accepts(one, root, kind, value, seen) for one in each) for each in options if each)


def _same(one: Any, kind: str, value: Any) -> bool:
    own = _kind(one)
    return (own == kind or {own, kind} == {"integer", "number"}) and (value is _ANY or one == value)


def _kind(value: Any) -> str:
    names: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def choices(schema: Schema, root: Schema, *, strings: bool = False) -> list[str]:
    """Return the texts that a value is restricted to; empty for no restriction. `strings`: only those of strings."""
    found = [one for one in _values(schema, root, 0) or () if isinstance(one, str) or not strings]
    return [one if isinstance(one, str) else orjson.dumps(one).decode() for one in found]


def _values(schema: Any, root: Schema, depth: int) -> list[Any] | None:
    if not isinstance(schema, dict) or depth > 8:
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(listed := schema.get("enum"), list):
        return listed
    if schema.get("type") == "null":
        return [None]
    inner = [_target(schema["$ref"], root)] if "$ref" in schema else []
    for one in (*inner, *_list(schema, "allOf")):
        if (found := _values(one, root, depth + 1)) is not None:
            return found
    options = [_values(one, root, depth + 1) for name in ("anyOf", "oneOf") for one in _list(schema, name)]
    return [one for each in options for one in each or ()] if options and None not in options else None


def as_json(text: str, schema: Schema, root: Schema) -> str:
    """Convert text between tags to JSON of one of the schema's types. If the schema does not allow a string, values may
    be in Python's syntax, in a code fence, or in a JSON string."""
    allowed = kinds(schema, root)
    bare, is_text = text.strip(SPACE), "string" in allowed
    if not is_text and (fenced := _FENCED.fullmatch(bare)) is not None:
        bare = fenced[1]
    bare = WORDS.get(bare if is_text else bare.capitalize(), bare)
    try:
        value = parse_json(bare)
    except ValueError:
        found = None if is_text else _literal(bare, numbers=not allowed.isdisjoint(("integer", "number")))
        return f'"{quoted(text)}"' if found is None else found
    if isinstance(value, str) and not is_text:
        return as_json(value, schema, root)
    if isinstance(value, str) and is_text and allowed != KINDS:
        return f'"{quoted(text)}"'  # the quotes are part of the text
    if is_text and not _accepts(schema, root, _kind(value), value, {}):
        return f'"{quoted(text)}"'
    return bare


def fitted(schema: Schema, key: str, value: str) -> str:
    """Return a number or a boolean, as JSON, as a string if a parameter allows that instead."""
    allowed, kind = kinds(parameter(schema, key), schema), _kind(json.loads(value))
    scalar = kind in ("boolean", "integer", "number")
    return f'"{value}"' if scalar and kind not in allowed and "string" in allowed else value


def _literal(text: str, *, numbers: bool) -> str | None:
    """Return an object, a list or, with `numbers`, a number in Python's syntax, or JSON with faults, as JSON; None if
    it is neither."""
    readers: tuple[Callable[[], Any], ...] = ()
    if text[:1] in ("{", "[", "("):
        readers = (lambda: json.loads(text, strict=False), lambda: ast.literal_eval(text), lambda: _repaired(text))
    elif numbers:
        readers = (lambda: int(text), lambda: float(text))
    for read in readers:
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            out = json.dumps(read(), ensure_ascii=False, allow_nan=False, default=_sorted)
            parse_json(out)
            return out
    return None


_FENCED = re.compile(r"```(?:\w*\n)?\s*(.*?)\s*```", re.DOTALL)


def _sorted(value: object) -> list[Any]:
    """Return a set as a list. Raises `TypeError` for other values."""
    if not isinstance(value, set):
        raise TypeError(value)
    return sorted(value)


def _repaired(text: str) -> Any:
    value = JsonValue()
    if value.feed(text, final=True) < len(text) or not value.complete:
        raise ValueError(text)
    return json.loads(value.take())
