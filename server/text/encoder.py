"""`Encoder`: text to token ids, with a cache of segments between control tokens for conversations."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_BYTES = 2**25  # size of the cached texts and ids
MIN_SEGMENT = 256
"""Minimum characters of a segment; shorter ones are joined with the next."""
_ENTRY_BYTES = 200  # overhead of a cache entry in addition to its text and ids


class Encoder:
    """Encodes text. Thread-safe.

    Added tokens that are neither `normalized` nor `single_word` are split off before a text is processed further. The
    text before such a token and the text from it on are tokenized independently, so a text can be cut there."""

    def __init__(self, backend: Any, max_bytes: int = MAX_BYTES, min_segment: int = MIN_SEGMENT) -> None:
        """`backend`: a `tokenizers.Tokenizer`. `min_segment`: see `MIN_SEGMENT`."""
        self._backend, self._min_segment, self._max_bytes = backend, min_segment, max_bytes
        added = backend.get_added_tokens_decoder().values()
        fixed = {token.content for token in added if not token.normalized}
        self._absorbing = {token.content for token in added if token.lstrip}
        """Tokens that absorb preceding white space; the text is not cut before them."""
        whole = fixed - self._absorbing and not any(token.single_word for token in added)
        self._fixed = any_of(fixed) if whole else None
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], npt.NDArray[np.int32]] = OrderedDict()
        """Ids by salt and text, least recently used first."""
        self.num_bytes = 0

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each text."""
        # The batch call releases the GIL and computes no offsets.
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(each.ids) for each in found]

    def encode_cached(self, text: str, salt: str) -> list[int]:
        """Like `encode` without added tokens, with cached segments. Entries are separate for each salt, so that timing
        does not reveal texts of others."""
        parts = self._segments(text)
        if len(parts) < 2:
            return self.encode([text], add_special_tokens=False)[0]
        ids = self._find(parts, salt)
        missing = [i for i, each in enumerate(ids) if each is None]
        made = self._backend.encode_batch_fast([parts[i] for i in missing], add_special_tokens=False)
        for i, each in zip(missing, made, strict=True):
            ids[i] = np.array(each.ids, np.int32)
        self._keep(((parts[i], ids[i]) for i in missing if i < len(parts) - 1), salt)  # the last one grows next time
        return np.concatenate(ids).tolist()

    def _segments(self, text: str) -> list[str]:
        """Cut the text where its tokens do not depend on what follows."""
        cuts = [0]
        if self._fixed is not None and len(text) >= 2 * self._min_segment:
            for match in self._fixed.finditer(text):
                if match.start() - cuts[-1] >= self._min_segment and match[0] not in self._absorbing:
                    cuts.append(match.start())
        return [text[begin:end] for begin, end in pairwise((*cuts, len(text)))]

    def _find(self, parts: Sequence[str], salt: str) -> list[Any]:
        with self._lock:
            found = []
            for part in parts:
                ids = self._cache.get((salt, part))
                if ids is not None:
                    self._cache.move_to_end((salt, part))
                found.append(ids)
        return found

    def _keep(self, made: Iterable[tuple[str, npt.NDArray[np.int32]]], salt: str) -> None:
        with self._lock:
            for part, ids in made:
                if (salt, part) not in self._cache:
                    self._cache[salt, part] = ids
                    self.num_bytes += _size(part, ids)
            while self.num_bytes > self._max_bytes:
                (_, part), ids = self._cache.popitem(last=False)
                self.num_bytes -= _size(part, ids)


def _size(part: str, ids: npt.NDArray[np.int32]) -> int:
    return part.__sizeof__() + ids.nbytes + _ENTRY_BYTES


def any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the first and longest of the words, as tokenizers do; None for no words. Words share common
    prefixes in the pattern, because a vocabulary may have a thousand of them."""
    words = sorted({word for word in words if word})
    return re.compile(_branches(words)) if words else None


def _branches(words: Sequence[str]) -> str:
    """`words`: sorted and non-empty."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[0], []).append(word[1:])
    branches = []
    for first, rests in by_first.items():
        begun = re.escape(first)
        while len(heads := {rest[:1] for rest in rests}) == 1 and "" not in heads:
            begun += re.escape(heads.pop())
            rests = [rest[1:] for rest in rests]
        longer = [rest for rest in rests if rest]
        if longer:
            begun += f"(?:{_branches(longer)})" + ("?" if len(longer) < len(rests) else "")
        branches.append(begun)
    return "|".join(branches)
