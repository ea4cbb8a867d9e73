"""`read_document`: a JSON file of ours that says of itself what it is and of which version."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weft.engine.errors import ConfigError

T = TypeVar("T")


def read_document(path: Path, into: type[T], *, form: str, version: int, kind: str, made_by: str) -> T:
    """The file as a msgspec `into`. Raises `ConfigError`, one line.

    form: what its field `format` must say. kind: what such a file is called, made_by: how people get one.
    """
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
