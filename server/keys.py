"""API keys, known by their SHA-256 digests only, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig

GAP = b""
"""in a list of digests: no key"""

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


def digest(key: str) -> bytes:
    """Of a key as an operator writes it; `sha256:HEX` is a digest already. White space around it does not count: no
    client could send it, and a variable that is made of a file ends with a line end."""
    key = key.strip()
    if match := _DIGEST.fullmatch(key):
        return bytes.fromhex(match[1])
    return hashlib.sha256(key.encode()).digest()


def load_keys(config: ServeConfig) -> list[bytes]:
    """Digests of all keys of `--api-key` and `--api-key-file`, each once. Raises `ConfigError`."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        keys += _read(expanded(config.api_key_file))
    return list(dict.fromkeys(map(digest, keys)))


def reread(known: Sequence[bytes], config: ServeConfig, capacity: int) -> list[bytes]:
    """The keys as they are now, each with the number it had: what is no longer a key leaves a gap, which matches
    nothing and is filled by new ones. Raises `ConfigError`, also for more than `capacity` keys.

    `known`: digests by number.
    """
    now = dict.fromkeys(load_keys(config))
    keys = [key if key in now else GAP for key in known]
    new = [key for key in now if key not in known]
    gaps = [i for i, key in enumerate(keys) if key == GAP]
    for i, key in zip(gaps, new, strict=False):
        keys[i] = key
    keys += new[len(gaps) :]
    if len(keys) > capacity:
        raise ConfigError(f"more than {capacity} keys need a restart")
    return keys


def _read(path: Path) -> list[str]:
    """One key a line; empty lines and lines that begin with # are none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"cannot read --api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path} is not UTF-8 text") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key in it")  # serving without keys would be a surprise
    return keys


def match(presented: str, digests: Sequence[bytes]) -> int | None:
    """Which of `digests` a presented key (as latin-1 text) has, or None. Compares all, whichever matches."""
    found = None
    mine = hashlib.sha256(presented.encode("latin-1")).digest()
    for i, known in enumerate(digests):
        if hmac.compare_digest(mine, known):
            found = i
    return found
