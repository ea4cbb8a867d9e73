"""Request bodies: their JSON, and `Body`, the base of every model of one."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

MAX_NESTING = 128
"""levels of a JSON document; what handles it further on recurses, in Python and in libraries with limits"""

_CONTAINERS = frozenset({dict, list})
_NULL = {"type": "null"}


def parse_json(text: str | bytes) -> Any:
    """Strict JSON: NaN, Infinity and lone surrogates are errors. Raises `ValueError`, also for more than `MAX_NESTING`
    levels."""
    value = orjson.loads(text)
    level = [value]
    for _ in range(MAX_NESTING):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise ValueError(f"more than {MAX_NESTING} levels of nesting")


def _children(node: Any) -> list[Any]:
    """The arrays and objects directly inside. Millions of numbers are passed over without a step of Python each."""
    if type(node) not in _CONTAINERS:
        return []
    items = node.values() if type(node) is dict else node
    if _CONTAINERS.isdisjoint(map(type, items)):
        return []
    return [item for item in items if type(item) in _CONTAINERS]


class Body(BaseModel):
    """Strict types, finite numbers, explicit nulls read as "not given", unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        model = handler.resolve_ref_schema(schema)
        for name, field in model.get("properties", {}).items():
            if name not in model.get("required", ()):
                model["properties"][name] = _or_null(field)
        return schema


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may also be null."""
    about: dict[str, Any] = {key: field[key] for key in ("title", "description", "default") if key in field}
    rest = {key: value for key, value in field.items() if key not in about}
    kinds = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return {"anyOf": kinds if _NULL in kinds else [*kinds, _NULL], **about}
