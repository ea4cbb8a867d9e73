"""Generates seeded prompts of a given length from random token ids or words, with shared prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from weft.loadgen.errors import LoadError
from weft.loadgen.images import Images

Kind = Literal["ids", "words"]
Content = str | list[int] | list[dict[str, Any]]
"""Content of a request: a prompt as text or token ids, or chat messages."""

# Short, common English words. In most vocabularies each is one token with its leading space.
WORDS = (  # noqa: SIM905
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part over new "
    "sound take only little work know place year live me back give most very after thing our just name good "
    "sentence man think say"
).split()

# The first element of a generator's key identifies its use, so that no two uses share numbers.
_PROMPT, _GROUP, _SHARED, _BLOCK, _TURN, _IMAGE = range(6)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A linear fit of the server's token counts: `n` random words have `overhead + per_word * n` tokens."""

    per_word: float = 1.0
    overhead: float = 0.0


@dataclass(frozen=True)
class PromptMaker:
    """Generates the content of request `index` from the seed alone.

    `low`, `high`: token ids come from [low, high). `shared`: fraction of each prompt that is a shared prefix, one of
    `groups`. `images`: those of every request, or None.
    """

    kind: Kind
    seed: int
    low: int = 300
    high: int = 2000
    shared: float = 0.0
    groups: int = 1
    calibration: Calibration = Calibration()
    images: Images | None = None

    def prompt(self, index: int, tokens: int) -> str | list[int]:
        """Return a prompt of `tokens` tokens: exact for ids, on average for words."""
        n = self._symbols(tokens)
        head = round(self.shared * n)
        own = self._draw((_PROMPT, index), n - head)
        if not head:
            return self._render(own)
        group = int(np.random.default_rng((self.seed, _GROUP, index)).integers(self.groups))
        return self._render(np.concatenate((self._draw((_SHARED, group), head), own)))

    def from_blocks(self, index: int, hash_ids: tuple[int, ...], block: int, tokens: int) -> str | list[int]:
        """Return a prompt in which equal hash ids are equal runs of `block` tokens, cut or filled to `tokens`."""
        per_block = max(1, round(block / (self.calibration.per_word if self.kind == "words" else 1.0)))
        n = self._symbols(tokens)
        runs = [_block(self, hash_id, per_block) for hash_id in hash_ids[: -(-n // per_block)]]
        runs.append(self._draw((_PROMPT, index), max(0, n - per_block * len(runs))))
        return self._render(np.concatenate(runs)[:n])

    def turn(self, session: int, turn: int, tokens: int) -> str:
        """Return the words of one turn of a conversation."""
        drawn = self._draw((_TURN, session, turn), max(1, round(tokens / self.calibration.per_word)))
        return " ".join(WORDS[i] for i in drawn)

    def with_images(self, index: int, content: Content) -> Content:
        """Add the images of request `index`, if any, to the end of its last user message."""
        if self.images is None:
            return content
        if isinstance(content, str):
            content = [{"role": "user", "content": content}]
        messages = [message for message in content if isinstance(message, dict)]
        last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=len(messages))
        said = messages[last]["content"] if last < len(messages) else []
        text = [{"type": "text", "text": said}] if isinstance(said, str) else said
        user = {"role": "user", "content": [*text, *self.images.parts((self.seed, _IMAGE, index))]}
        return [*messages[:last], user, *messages[last + 1 :]]

    def _symbols(self, tokens: int) -> int:
        if self.kind == "ids":
            return tokens
        return max(1, round((tokens - self.calibration.overhead) / self.calibration.per_word))

    def _draw(self, key: tuple[int, ...], n: int) -> NDArray[np.int64]:
        # A generator's first n numbers do not depend on the count, so prompts of a group share a prefix.
        rng = np.random.default_rng((self.seed, *key))
        return rng.integers(self.low, self.high, n) if self.kind == "ids" else rng.integers(0, len(WORDS), n)

    def _render(self, symbols: NDArray[np.int64]) -> str | list[int]:
        return symbols.tolist() if self.kind == "ids" else " ".join(WORDS[i] for i in symbols)


@lru_cache(maxsize=8192)
def _block(maker: PromptMaker, hash_id: int, size: int) -> NDArray[np.int64]:
    return maker._draw((_BLOCK, hash_id), size)


def read_prompts(path: Path) -> list[tuple[Content, int | None]]:
    """Read prompts from a text file (one per line) or a JSONL file, each with its output length if given.

    A JSON line has `prompt` (or `text`), or `messages`, and optionally `output_tokens` (or `max_tokens`). Raises
    `LoadError` naming an invalid line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise LoadError(f"cannot read --prompts-file {path}: {reason}") from None
    is_json = path.suffix.lower() in (".jsonl", ".json", ".ndjson")
    prompts: list[tuple[Content, int | None]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not is_json:
            prompts.append((line, None))
            continue
        try:
            row = orjson.loads(line)
            content = row.get("messages") or row.get("prompt") or row["text"]
            output = row.get("output_tokens") or row.get("max_tokens")
            if not isinstance(content, (str, list)) or (output is not None and int(output) < 1):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LoadError(
                f"--prompts-file {path}, line {number}: needs prompt, text or messages (and output_tokens ≥ 1)"
            ) from None
        prompts.append((content, None if output is None else int(output)))
    if not prompts:
        raise LoadError(f"--prompts-file {path} has no prompts")
    return prompts
