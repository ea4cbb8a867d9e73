"""`Encoder`: text to token ids. Of conversations it remembers stretches between control tokens, which come again."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_BYTES = 2**25
"""of texts and ids that are remembered"""
LEAST = 256
"""characters of a stretch at least: what is shorter goes with what follows"""
_ENTRY_BYTES = 200
"""of an entry beside its text and ids"""


class Encoder:
    """Thread-safe.

    A token that the vocabulary does not let grow (no `normalized`, no `single_word`) is found before anything else is
    done to a text, so what stands before it and what begins with it are tokenised apart: a text may be cut there.
    """

    def __init__(self, backend: Any, max_bytes: int = MAX_BYTES, least: int = LEAST) -> None:
        """`backend`: a `tokenizers.Tokenizer`. `least`: characters of a stretch."""
        self._backend = backend
        self._least = least
        self._max_bytes = max_bytes
        added = backend.get_added_tokens_decoder().values()
        fixed = {token.content for token in added if not token.normalized}
        self._eats = {token.content for token in added if token.lstrip}
        """they take white space before them: no cut there"""
        whole = fixed - self._eats and not any(token.single_word for token in added)
        self._fixed = any_of(fixed) if whole else None
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], npt.NDArray[np.int32]] = OrderedDict()
        """by salt and text; what was not used for longest first"""
        self.num_bytes = 0

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Of each its token ids."""
        # The batch call releases the GIL and computes no offsets.
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(each.ids) for each in found]

    def encode_again(self, text: str, salt: str) -> list[int]:
        """As `encode` of a text to which no tokens are added, which begins like others of this salt. Who has another
        cannot tell by the time it takes what was encoded before."""
        parts = self._stretches(text)
        if len(parts) < 2:
            return self.encode([text], add_special_tokens=False)[0]
        ids = self._look(parts, salt)
        missing = [i for i, each in enumerate(ids) if each is None]
        made = self._backend.encode_batch_fast([parts[i] for i in missing], add_special_tokens=False)
        for i, each in zip(missing, made, strict=True):
            ids[i] = np.array(each.ids, np.int32)
        self._keep(((parts[i], ids[i]) for i in missing if i < len(parts) - 1), salt)  # the last one goes on next time
        joined: list[int] = np.concatenate(ids).tolist()
        return joined

    def _stretches(self, text: str) -> list[str]:
        """The text, cut so that each part is what it is whatever follows it."""
        cuts = [0]
        if self._fixed is not None and len(text) >= 2 * self._least:
            for match in self._fixed.finditer(text):
                if match.start() - cuts[-1] >= self._least and match[0] not in self._eats:
                    cuts.append(match.start())
        return [text[begin:end] for begin, end in pairwise((*cuts, len(text)))]

    def _look(self, parts: Sequence[str], salt: str) -> list[Any]:
        with self._lock:
            found = []
            for part in parts:
                ids = self._known.get((salt, part))
                if ids is not None:
                    self._known.move_to_end((salt, part))
                found.append(ids)
        return found

    def _keep(self, made: Iterable[tuple[str, npt.NDArray[np.int32]]], salt: str) -> None:
        with self._lock:
            for part, ids in made:
                if (salt, part) not in self._known:
                    self._known[salt, part] = ids
                    self.num_bytes += _size(part, ids)
            while self.num_bytes > self._max_bytes:
                (_, part), ids = self._known.popitem(last=False)
                self.num_bytes -= _size(part, ids)


def _size(part: str, ids: npt.NDArray[np.int32]) -> int:
    return part.__sizeof__() + ids.nbytes + _ENTRY_BYTES


def any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the words in a text, the first and there the longest, as tokenizers do. None of none.

    Words that begin alike share what they begin with: a vocabulary may have a thousand of them.
    """
    words = sorted({word for word in words if word})
    return re.compile(_branches(words)) if words else None


def _branches(words: Sequence[str]) -> str:
    """`words`: sorted, without the empty one."""
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
