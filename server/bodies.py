"""Request bodies: JSON parsing, and `Body`, the base of all body models."""

from __future__ import annotations

import typing
from typing import Any, ClassVar, NamedTuple

import orjson
from pydantic import AliasChoices, BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

EXACT = 2**53  # Larger whole floats stand for several integers.
IMAGES_MIB = 64.0  # most space for images, limited because a body is parsed on the event loop
MAX_NESTING = 128  # levels of a JSON document, limited because later processing recurses

_CONTAINERS = frozenset({dict, list})
_NULL = {"type": "null"}


class BodyBounds(NamedTuple):
    """Limits of a request body, so that parsing takes a fraction of a second."""

    max_bytes: int
    max_keys: int  # keys of all objects; also the limit of arrays and objects
    max_values: int  # values in all arrays and objects

    @classmethod
    def of(cls, max_mib: float | None, max_model_len: int, image_mib: float = 0.0) -> BodyBounds:
        """Limits for a context length, enough for 64 full prompts. `max_mib`: the operator's limit. `image_mib`: size
        of the image files that a request may hold, as base64."""
        size = min(32.0, 1 + max_model_len / 1024) + min(IMAGES_MIB, image_mib * 4 / 3) if max_mib is None else max_mib
        ids = max(max_model_len, min(64 * max_model_len, 2**20))
        return cls(int(size * 2**20), 2**16 + max_model_len, 2**17 + ids)

    def check(self, data: bytes) -> None:
        """Check unparsed JSON by counting punctuation, including that in strings. Raises `ValueError`."""
        if data.count(b":") > self.max_keys:
            raise ValueError(f"more than {self.max_keys} keys")
        if data.count(b"[") + data.count(b"{") > self.max_keys:
            raise ValueError(f"more than {self.max_keys} arrays and objects")
        if data.count(b",") > self.max_values:
            raise ValueError(f"more than {self.max_values} values")


def parse_json(text: str | bytes) -> Any:
    """Parse strict JSON: NaN, Infinity, lone surrogates and more than `MAX_NESTING` levels raise `ValueError`."""
    value = orjson.loads(text)
    level = [value]
    for _ in range(MAX_NESTING):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise ValueError(f"more than {MAX_NESTING} levels of nesting")


def _children(node: Any) -> list[Any]:
    """The arrays and objects directly inside. Lists of numbers are skipped without a Python loop."""
    if type(node) not in _CONTAINERS:
        return []
    items = node.values() if type(node) is dict else node
    if _CONTAINERS.isdisjoint(map(type, items)):
        return []
    return [item for item in items if type(item) in _CONTAINERS]


class Body(BaseModel):
    """The base of body models: strict types, finite numbers, null counts as absent, unknown fields are ignored (and
    reported, see `api.other_fields`). Integer fields accept whole floats such as 1.0, because some clients have no
    integer type."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    endpoint_path: ClassVar[str] = ""
    """The path of the endpoint that computes answers to this body, if any."""
    keeps_unknown: ClassVar[bool] = False  # unknown fields are used, or belong to a conversation, and are not reported
    attributes: ClassVar[dict[str, str]] = {}  # the attribute of each accepted name
    _integers: ClassVar[frozenset[str]] = frozenset()  # the names of integer fields

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.attributes = {key: name for name, field in cls.model_fields.items() for key in _accepted(name, field)}
        integers = {name for name, field in cls.model_fields.items() if _is_integer(field.annotation)}
        cls._integers = frozenset(key for key, name in cls.attributes.items() if name in integers)

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        for name in cls._integers.intersection(given):
            if type(given[name]) is float and given[name].is_integer() and abs(given[name]) <= EXACT:
                given[name] = int(given[name])
        return given

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        model = handler.resolve_ref_schema(schema)
        for name, field in model.get("properties", {}).items():
            if name not in model.get("required", ()):
                model["properties"][name] = _or_null(field)
        return schema


def _accepted(name: str, field: FieldInfo) -> list[str]:
    """The names under which a request may give a field."""
    if isinstance(field.validation_alias, AliasChoices):
        return [str(choice) for choice in field.validation_alias.choices]
    return [field.alias or name]


def _is_integer(annotation: Any) -> bool:
    return annotation is int or int in typing.get_args(annotation)


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a nullable field."""
    meta: dict[str, Any] = {key: field[key] for key in ("title", "description", "default") if key in field}
    rest = {key: value for key, value in field.items() if key not in meta}
    kinds = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return {"anyOf": kinds if _NULL in kinds else [*kinds, _NULL], **meta}
