"""`read_document`: reads a JSON file that states its format and version."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weft.engine.errors import ConfigError

T = TypeVar("T")


def read_document(path: Path, into: type[T], *, form: str, version: int, kind: str, made_by: str) -> T:
    """Return the file as a msgspec `into`. Raises `ConfigError`, one line.

    form: required value of the field `format`. kind, made_by: the name of such files and how to get one, for errors."""
    try:
        raw: Any = msgspec.json.decode(path.read_bytes())
        if not isinstance(raw, dict) or raw.get("format") != form:
            raise ConfigError(f"{path} is not a {kind} ({made_by})")
        if raw.get("version") != version:
            raise ConfigError(
                f"{path} is a {kind} of version {raw.get('version')}, this weft reads {version} ({made_by})"
            )
        return msgspec.convert(raw, into)
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is not a valid {kind}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{path} is not a {kind}: it is not JSON") from None
