"""API keys, stored as SHA-256 digests and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig

GAP = b""  # stands for a removed key in a list of digests

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


def digest(key: str) -> bytes:
    """The digest of a key or of `sha256:HEX`, without surrounding white space, which clients cannot send."""
    key = key.strip()
    if match := _DIGEST.fullmatch(key):
        return bytes.fromhex(match[1])
    return hashlib.sha256(key.encode()).digest()


def load_keys(config: ServeConfig) -> list[bytes]:
    """Unique digests of the keys in `--api-key` and `--api-key-file`. Raises `ConfigError`."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        keys += _read(expanded(config.api_key_file))
    return list(dict.fromkeys(map(digest, keys)))


def reread(known: Sequence[bytes], config: ServeConfig, capacity: int) -> list[bytes]:
    """The current keys, with unchanged numbers. Removed keys leave a `GAP`, which new keys fill. `known`: digests by
    number. Raises `ConfigError`, also for more than `capacity` keys."""
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
    """The keys in a file, one per line. Empty lines and lines that start with # are ignored."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"cannot read --api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path} is not UTF-8 text") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} contains no keys")  # do not serve without keys by accident
    return keys


def match(presented: str, digests: Sequence[bytes]) -> int | None:
    """The index of a presented key (latin-1 text) in `digests`, or None. It compares all, for constant time."""
    found = None
    presented_digest = hashlib.sha256(presented.encode("latin-1")).digest()
    for i, known in enumerate(digests):
        if hmac.compare_digest(presented_digest, known):
            found = i
    return found
