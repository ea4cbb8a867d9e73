"""JSON schemas of clients: `without_nulls` drops keywords set to null, `check_counts` refuses counts of properties that
a grammar cannot keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.engine.errors import RequestError

Schema = dict[str, Any]

_DATA = frozenset({"const", "default", "enum", "example", "examples"})  # keywords whose values are not schemas
_NAMES = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose keys are names, not keywords."""


def mapped(node: Any, change: Callable[[Schema], Schema], names: bool = False) -> Any:
    """Apply `change` to every schema inside, innermost first. With `names`, the node's keys are names of schemas."""
    if isinstance(node, list):
        return [mapped(item, change) for item in node]
    if not isinstance(node, dict):
        return node
    if names:
        return {key: mapped(value, change) for key, value in node.items()}
    inner = {k: v if k in _DATA else mapped(v, change, k in _NAMES) for k, v in node.items()}
    return change(inner)


def without_nulls(schema: Schema) -> Schema:
    """Return a schema without keywords set to null, which some clients write for absent ones (Go's empty slices)."""
    changed: Schema = mapped(schema, _drop_nulls)
    return changed


def _drop_nulls(part: Schema) -> Schema:
    out: Schema = {}
    for key, value in part.items():
        if value is None and key not in ("const", "default"):
            continue
        if key in _NAMES and isinstance(value, dict):
            value = {name: {} if inner is None else inner for name, inner in value.items()}
        elif key == "type" and isinstance(value, list):
            value = ["null" if kind is None else kind for kind in value]
        elif isinstance(value, list) and key not in _DATA:
            value = [item for item in value if item is not None]
        out[key] = value
    return out


def check_counts(schema: Schema) -> None:
    """Raises `RequestError` for a `minProperties` that repeated names could satisfy: a grammar cannot compare names."""
    mapped(schema, _check_count)


def _check_count(part: Schema) -> Schema:
    least, required = part.get("minProperties"), part.get("required")
    if isinstance(least, int | float) and least >= 2:
        always = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
        if always < least and (part.get("additionalProperties") is not False or part.get("patternProperties")):
            raise RequestError(
                "minProperties above 1 cannot be enforced together with patternProperties or additional properties, "
                "because a property could be repeated; list the properties and require them",
                "grammar",
            )
    return part
