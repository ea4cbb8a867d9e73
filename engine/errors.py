"""Errors that a user can fix. Each message is one line with the remedy."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo

LONGEST = 80  # maximum characters of a value in a message

_POINTER = b"version https://git-lfs.github.com/spec/"


class WeftError(Exception):
    """Base of all errors that weft reports without a traceback."""


class ConfigError(WeftError):
    """An option has a value that cannot work."""


class ModelError(WeftError):
    """A model directory is unsupported, incomplete or malformed."""


class UnknownArchitecture(ModelError):
    """weft has no family for this architecture; `transformers` may support it."""


class OutOfMemory(WeftError):
    """The weights or the KV pages do not fit the device."""


class RequestError(WeftError):
    """A request cannot be served as sent. `param` names the invalid field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDead(WeftError):
    """The engine process has ended, and open requests will not be answered."""


class RankLost(WeftError):
    """A tensor-parallel rank has ended or could not start, so the others cannot continue. The message names it."""


def one_line(error: BaseException, most: int = 200) -> str:
    """Return the message of another library's error on one line of at most `most` characters; its type if empty."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def refuse_pointer(file: Path) -> None:
    """Raise `ModelError` if `file` is a Git LFS pointer to a large file that was not downloaded."""
    with suppress(OSError), file.open("rb") as f:
        if f.read(len(_POINTER)) == _POINTER:
            raise ModelError(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in {file.parent}")


def invalid_option(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """Return the first invalid option of `model` and the reason; the name is empty if options conflict."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    field = model.model_fields.get(name)
    if first["type"] == "value_error":
        return name, first["msg"].removeprefix("Value error, ")
    if field is None:
        return name, "there is no such option"
    if first["type"] == "string_too_short":
        return name, "must not be empty"
    takes = accepted_values(field)
    if first["type"] == "finite_number":
        takes = takes.replace("a number", "a finite number")
    where = [f"but number {part + 1} is" for part in first["loc"] if isinstance(part, int)]
    given = f", {where[0] if where else 'not'} {_shown(first['input'])}" if field.repr else ""
    return name, f"must be {takes}{given}"


def accepted_values(field: FieldInfo) -> str:
    """Describe the values that a field accepts, from its title, or its type and bounds."""
    return field.title or _of_type(field.annotation, field.metadata)


def _of_type(kind: Any, metadata: Sequence[Any]) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        own: FieldInfo = arguments[1]
        return own.title or _of_type(arguments[0], own.metadata)
    if origin is Literal:
        *others, last = map(repr, arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is list:
        return "a list of texts"
    if arguments:  # a union
        return ", ".join(_of_type(each, metadata) for each in arguments if each is not type(None))
    bounds = {name: bound for each in metadata for name in _BOUNDS if (bound := getattr(each, name, None)) is not None}
    if kind is bool:
        return "true or false"
    if kind is int:
        return f"a whole number{_range(bounds)}"
    if kind is float:
        return f"a number{_range(bounds)}"
    return f"a text of {bounds['max_length']} characters at most" if "max_length" in bounds else "a text"


_BOUNDS = ("ge", "gt", "le", "lt", "max_length")


def _range(bounds: dict[str, Any]) -> str:
    low, above, most = bounds.get("ge"), bounds.get("gt"), bounds.get("le")
    if "lt" in bounds:  # only used with whole numbers
        most = bounds["lt"] - 1
    if low is not None:
        return f" of {low} or more" if most is None else f" from {low} to {most}"
    if above is not None:
        return f" above {above}" + ("" if most is None else f", {most} at most")
    return "" if most is None else f" of {most} at most"


def _shown(value: Any) -> str:
    """Format a value as the user wrote it: command-line text in quotes, YAML values as in YAML."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
