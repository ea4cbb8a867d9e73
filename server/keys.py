"""API keys, stored as SHA-256 digests and compared in constant time."""

from __future__ import annotations

import codecs
import hashlib
import hmac
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig

GAP = b""  # stands for a removed key in a list of digests
MAX_KEYS = 100_000  # Every request is compared with all keys.
MAX_KEY_CHARS = 8192
MAX_FILE_BYTES = 16 * 2**20

_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_LIKE_A_DIGEST = re.compile(
    r"""(?:^|[:=,;<{(\[\\"'])(?:hmac[-_])?(?:s?sha[-_]?\d{1,3}(?:[-_/]\d{3})?|s?sha(?=\})|s?md[245]|blake\d\w*|ripemd[-_]?\d*
    |rmd160|[bs]crypt\w*|yescrypt|argon2\w*|pbkdf2[\w-]*|apr1|whirlpool)
    (?:[^\w]|$|[0-9a-f]{32})           # the name of an algorithm, as in sha512:..., {SSHA}... or pbkdf2_sha256$...
    |(?:^|:)\$[\w-]{1,16}\$             # crypt(3), as in $2b$...
    |^[\w-]{1,32}\s*[:=$]\s*[0-9a-f]{32,}$  # a misspelt name, as in sha265:...""",
    re.IGNORECASE | re.VERBOSE,
)


def digest(key: str) -> bytes:
    """The digest of a plain key or of `sha256:HEX`, without surrounding white space, which clients cannot send. Raises
    `ValueError`, without the key itself, for anything else."""
    key = key.strip()
    if match := _DIGEST.fullmatch(key):
        return bytes.fromhex(match[1])
    if problem := _problem(key):
        raise ValueError(problem)
    return hashlib.sha256(key.encode()).digest()


def _problem(key: str) -> str | None:
    """Why this is not a plain key."""
    if not key:
        return "the key is empty"
    if len(key) > MAX_KEY_CHARS:
        return f"the key has more than {MAX_KEY_CHARS} characters"
    if _LIKE_A_DIGEST.search(unicodedata.normalize("NFKC", key)):
        return "this looks like a digest, but is not 'sha256:' and 64 hexadecimal digits, with nothing else on the line"
    if any(char.isspace() for char in key):
        return "a key has no white space, and nothing follows it on its line; write comments on lines of their own"
    if unprintable := next((char for char in key if not char.isprintable()), None):
        return f"the key contains U+{ord(unprintable):04X}, which is not a printable character"
    if len(key) > 1 and key[0] == key[-1] and key[0] in "\"'`":
        return "write the key without quotes"
    return None


def load_keys(config: ServeConfig) -> list[bytes]:
    """Unique digests of the keys in `--api-key` and `--api-key-file`. Raises `ConfigError`, also for the admin key."""
    if config.admin_api_key is not None:
        _digest_at("--admin-api-key", config.admin_api_key)
    keys = dict.fromkeys(_digest_at(f"--api-key, number {i + 1}", key) for i, key in enumerate(config.api_key))
    if config.api_key_file is not None:
        keys |= dict.fromkeys(_read(expanded(config.api_key_file)))
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{len(keys)} API keys are more than {MAX_KEYS}")
    return list(keys)


def _digest_at(place: str, key: str) -> bytes:
    try:
        return digest(key)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def reread(known: Sequence[bytes], config: ServeConfig, capacity: int) -> list[bytes]:
    """The current keys, with unchanged numbers. Removed keys leave a `GAP`, which new keys fill. `known`: digests by
    number. Raises `ConfigError`, also for more than `capacity` keys."""
    now, before = dict.fromkeys(load_keys(config)), set(known)
    keys = [key if key in now else GAP for key in known]
    new = [key for key in now if key not in before]
    gaps = [i for i, key in enumerate(keys) if key == GAP]
    for i, key in zip(gaps, new, strict=False):
        keys[i] = key
    keys += new[len(gaps) :]
    if len(keys) > capacity:
        raise ConfigError(f"more than {capacity} keys need a restart")
    return keys


def _read(path: Path) -> Iterator[bytes]:
    """Digests of the keys in a UTF-8 file. A line is empty, a comment that starts with #, a plain key, or
    `sha256:HEX`; spaces and tabs around it are ignored. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read --api-key-file {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    empty = True
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        place = f"--api-key-file {path}, line {number}"
        try:
            text = line.decode().strip(" \t\r")
        except UnicodeDecodeError:
            raise ConfigError(f"{place}: this is not UTF-8 text") from None
        if text and not text.startswith("#"):
            empty = False
            yield _digest_at(place, text)
    if empty:
        raise ConfigError(f"--api-key-file {path} contains no keys")  # do not serve without keys by accident


def match(presented: str, digests: Sequence[bytes]) -> int | None:
    """The index of a presented key (latin-1 text) in `digests`, or None. It compares all, for constant time."""
    found = None
    presented_digest = hashlib.sha256(presented.encode("latin-1")).digest()
    for i, known in enumerate(digests):
        if hmac.compare_digest(presented_digest, known):
            found = i
    return found
