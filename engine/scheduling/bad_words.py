"""`BadWords`: texts that must not occur in a request's output, and the tokens that would complete one of them.

Words may start and end inside tokens, so an Aho-Corasick automaton follows the bytes of the output. Its state is the
longest suffix of the output that is a prefix of a bad word. Each state has the tokens that would complete a word.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from weft.engine.scheduling.grammar import Mask

KEPT_STATES = 256  # states whose tokens are cached

TokenIds = npt.NDArray[np.int32]


class Vocabulary:
    """The bytes of every token, searchable. Special tokens have none."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self.bytes = [
            b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)
        ][:vocab_size]
        self.size = vocab_size
        order = sorted((data, i) for i, data in enumerate(self.bytes) if data)
        self._sorted = [data for data, _ in order]
        self._ids = np.array([i for _, i in order], np.int32)
        self._text = b"".join(self._sorted)
        self._ends = np.cumsum([len(data) for data in self._sorted])

    def starting_with(self, prefix: bytes) -> TokenIds:
        low = bisect_left(self._sorted, prefix)
        stem = prefix.rstrip(b"\xff")
        high = bisect_left(self._sorted, stem[:-1] + bytes([stem[-1] + 1])) if stem else len(self._sorted)
        return self._ids[low:high]

    def containing(self, word: bytes) -> TokenIds:
        found, at = [], self._text.find(word)
        while at >= 0:
            token = int(np.searchsorted(self._ends, at, "right"))
            end = int(self._ends[token])
            if at + len(word) <= end:
                found.append(token)
                at = end - 1  # one match per token is enough
            at = self._text.find(word, at + 1)
        return self._ids[found]


class BadWords:
    """The automaton, shared by requests with the same words. Each request has a state, initially 0."""

    def __init__(self, words: Sequence[str], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._words = sorted({word.encode("utf-8", "surrogatepass") for word in words})
        self._next: list[dict[int, int]] = [{}]
        self._depth = [0]
        self._range = [(0, len(self._words))]  # by state, the range of words that pass through it
        for i, word in enumerate(self._words):
            self._insert(i, word)
        self._fail = self._link()  # by state, the state of the next shorter suffix that is a prefix of a word
        self._banned: OrderedDict[int, TokenIds] = OrderedDict()
        allowed = np.ones(vocabulary.size, np.bool_)
        for word in self._words:
            allowed[vocabulary.containing(word)] = False
        self.allowed = as_mask(allowed)  # mask of the tokens that contain no word

    def _insert(self, i: int, word: bytes) -> None:
        state = 0
        for byte in word:
            following = self._next[state].get(byte)
            if following is None:
                following = self._next[state][byte] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._range.append((i, i + 1))
            state = following
            self._range[state] = self._range[state][0], i + 1  # words are sorted

    def _link(self) -> list[int]:
        fail, queue = [0] * len(self._next), deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for byte, following in self._next[state].items():
                fail[following] = self._step(fail, fail[state], byte)
                queue.append(following)
        return fail

    def _step(self, fail: list[int], state: int, byte: int) -> int:
        while byte not in self._next[state]:
            if not state:
                return 0
            state = fail[state]
        return self._next[state][byte]

    def after(self, state: int, token: int) -> int:
        for byte in self._vocabulary.bytes[token] if token < len(self._vocabulary.bytes) else b"":
            state = self._step(self._fail, state, byte)
        return state

    def banned(self, state: int) -> TokenIds:
        """Return the tokens that would complete a word from this state."""
        known = self._banned.get(state)
        if known is None:
            known = self._banned[state] = self._completing(state)
            if len(self._banned) > KEPT_STATES:
                self._banned.popitem(last=False)
        return known

    def _completing(self, state: int) -> TokenIds:
        found = [np.zeros(0, np.int32)]
        while state:
            low, high = self._range[state]
            for word in self._words[low:high]:
                if end := word[self._depth[state] :]:
                    found.append(self._vocabulary.starting_with(end))
            state = self._fail[state]
        return np.unique(np.concatenate(found))


def as_mask(allowed: npt.NDArray[np.bool_]) -> Mask:
    """Convert `allowed [V]` to a mask."""
    words = -(-len(allowed) // 32)
    padded = np.zeros(32 * words, np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


def only(token_ids: Sequence[int], vocab_size: int) -> Mask:
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[np.asarray(token_ids, np.int64)] = True
    return as_mask(allowed)


def without(mask: Mask, token_ids: TokenIds) -> Mask:
    out = mask.copy()
    bits = np.left_shift(np.uint32(1), (token_ids & 31).astype(np.uint32))
    np.bitwise_and.at(out.view(np.uint32), token_ids >> 5, ~bits)
    return out
