"""API keys, stored as SHA-256 digests and compared in constant time, and which keys' requests outrank others."""

from __future__ import annotations

import codecs
import hashlib
import hmac
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig

GAP = b""  # stands for a removed key in a list of digests
MAX_KEYS = 100_000  # Every request is compared with all keys.
MAX_KEY_CHARS = 8192
MAX_FILE_BYTES = 16 * 2**20
BATCH_PRIORITY = 1000  # Requests with this priority or a higher number are served after those of all keys.

_LINE = re.compile(r"(.*\S)[ \t]+priority=([+-]?[0-9]{1,9})")

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
        return "this looks like a digest, but is not 'sha256:' and 64 hex digits; only priority=NUMBER may follow them"
    if any(char.isspace() for char in key):
        return "a key has no white space, and only priority=NUMBER may follow it; write comments on lines of their own"
    if unprintable := next((char for char in key if not char.isprintable()), None):
        return f"the key contains U+{ord(unprintable):04X}, which is not a printable character"
    if len(key) > 1 and key[0] == key[-1] and key[0] in "\"'`":
        return "write the key without quotes"
    return None


def load_keys(config: ServeConfig) -> dict[bytes, int]:
    """Digests of the keys in `--api-key` and `--api-key-file`, each with its best priority. Raises `ConfigError`, also
    for the admin key."""
    if config.admin_api_key is not None:
        _digest_at("--admin-api-key", config.admin_api_key)
    lines = [(f"--api-key, number {i + 1}", key) for i, key in enumerate(config.api_key)]
    keys: dict[bytes, int] = {}
    for place, line in chain(lines, () if config.api_key_file is None else _lines(expanded(config.api_key_file))):
        named = _LINE.fullmatch(line.strip())
        key, best = (named[1], int(named[2])) if named else (line, config.best_priority)
        if keys.setdefault(_digest_at(place, key), best) != best:
            raise ConfigError(f"{place}: this key is listed before with another priority")
        if len(keys) > MAX_KEYS:
            raise ConfigError(f"{place}: there are more than {MAX_KEYS} API keys")
    return keys


def precedence(priority: int, best: int) -> int:
    """The precedence of a request: lower ones go first, and within one the keys take turns. `best`: the best priority
    of its key. Other priorities than those from `best` to 0, and a batch's, only order the requests of a key."""
    if priority >= BATCH_PRIORITY:
        return max(best, BATCH_PRIORITY)
    return min(max(priority, best), max(best, 0))


def _digest_at(place: str, key: str) -> bytes:
    try:
        return digest(key)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def renumbered(known: Sequence[bytes], now: Mapping[bytes, int], capacity: int) -> list[bytes]:
    """The keys of `now`, with unchanged numbers. Removed keys leave a `GAP`, which new keys fill. `known`: digests by
    number. Raises `ConfigError` for more than `capacity` keys."""
    before = set(known)
    keys = [key if key in now else GAP for key in known]
    new = [key for key in now if key not in before]
    gaps = [i for i, key in enumerate(keys) if key == GAP]
    for i, key in zip(gaps, new, strict=False):
        keys[i] = key
    keys += new[len(gaps) :]
    if len(keys) > capacity:
        raise ConfigError(f"more than {capacity} keys need a restart")
    return keys


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a UTF-8 file with keys, each with its place. A line is empty, a comment that starts with #, or a
    plain key or `sha256:HEX`, with `priority=NUMBER` or without; spaces and tabs around it are ignored. Raises
    `ConfigError`."""
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
            yield place, text
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
