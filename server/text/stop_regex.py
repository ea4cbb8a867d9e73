"""Stop patterns: regular expressions matched in text that arrives in pieces, in time linear in the text.

Python's `re` backtracks, so a client's pattern could occupy the process for years. Here a pattern becomes the positions
of its characters (Glushkov's automaton), at most `MAX_POSITIONS` of them, and each character of the text costs at most
that many steps. The syntax is that of `re` without what such an automaton lacks: look-around, back-references, anchors.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial, reduce
from operator import or_
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

MAX_POSITIONS = 128  # of all patterns of a request; `a{100}` has 100
MAX_MATCH_CHARS = 4096  # longer matches are not found, so that no more text is held back
_CLASSES = {
    op.CATEGORY_DIGIT: r"\d", op.CATEGORY_NOT_DIGIT: r"\D", op.CATEGORY_SPACE: r"\s", op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w", op.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
_CACHED = 1024  # entries of each cache of a search

Accepts = Callable[[str], bool]  # whether a position accepts a character


class _Part(NamedTuple):
    """A part of a pattern: bits of the positions that it may begin and end with; whether it matches the empty text."""

    first: int
    last: int
    empty: bool


class StopPatterns:
    """Compiled patterns. Raises `ValueError` for patterns that are invalid, unsupported, too large or match nothing."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self.accepts: list[Accepts] = []
        self.follow: list[int] = []  # the positions that may follow each position, as bits
        self.first = 0  # bits of the positions that begin a match
        self.ends: list[tuple[int, str]] = []  # bits of the positions that end each pattern
        for pattern in patterns:
            try:
                with warnings.catch_warnings(action="ignore"):
                    part = self._part(parser.parse(pattern))
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
            if part.empty:
                raise ValueError(f"{pattern!r} matches the empty text, which would end every answer at once")
            self.first |= part.first
            self.ends.append((part.last, pattern))

    def _part(self, tree: Any, flags: int = 0) -> _Part:
        """Add the positions of a parsed sequence."""
        whole = _Part(0, 0, empty=True)
        for kind, value in tree:
            whole = self._then(whole, self._node(kind, value, flags | tree.state.flags))
        return whole

    def _then(self, before: _Part, after: _Part) -> _Part:
        self._connect(before.last, after.first)
        return _Part(
            before.first | after.first if before.empty else before.first,
            before.last | after.last if after.empty else after.last,
            before.empty and after.empty,
        )

    def _connect(self, last: int, first: int) -> None:
        for position in _bits(last):
            self.follow[position] |= first

    def _node(self, kind: Any, value: Any, flags: int) -> _Part:
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            if len(self.accepts) == MAX_POSITIONS:
                raise ValueError(f"the patterns need more than {MAX_POSITIONS} positions; make them simpler")
            self.accepts.append(_accepts(kind, value, flags))
            self.follow.append(0)
            here = 1 << len(self.accepts) - 1
            return _Part(here, here, empty=False)
        if kind is op.SUBPATTERN:
            _, on, off, inner = value
            return self._part(inner, (flags | on) & ~off)
        if kind is op.BRANCH:
            parts = [self._part(inner, flags) for inner in value[1]]
            first, last = (
                reduce(or_, bits) for bits in ([part.first for part in parts], [part.last for part in parts])
            )
            return _Part(first, last, any(part.empty for part in parts))
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            return self._repeated(inner, flags, least, None if most is op.MAXREPEAT else most)
        raise ValueError(
            f"{str(kind).lower()} is not supported: no look-around, back-references, anchors or boundaries"
        )

    def _repeated(self, inner: Any, flags: int, least: int, most: int | None) -> _Part:
        """Copies of a part: the required ones, then the optional ones, or one that repeats itself."""
        whole = _Part(0, 0, empty=True)
        for number in range(max(least, 1) if most is None else most):
            part = self._part(inner, flags)
            if not part.first:
                break  # nothing to repeat
            if most is None and number >= least - 1:
                self._connect(part.last, part.first)
            whole = self._then(whole, part._replace(empty=part.empty or number >= least))
        return whole


def _bits(number: int) -> Iterator[int]:
    """The positions of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _accepts(kind: Any, value: Any, flags: int) -> Accepts:
    if kind is op.ANY:
        return (lambda _: True) if flags & re.DOTALL else (lambda char: char != "\n")
    items = [(op.LITERAL, value)] if kind in (op.LITERAL, op.NOT_LITERAL) else value
    negated = kind is op.NOT_LITERAL or items[0][0] is op.NEGATE
    tests = [_test(name, argument, flags) for name, argument in items if name is not op.NEGATE]
    if flags & re.IGNORECASE:
        return lambda char: negated != any(t(c) for t in tests for c in (char, char.lower(), char.upper()))
    return lambda char: negated != any(test(char) for test in tests)


def _test(name: Any, argument: Any, flags: int) -> Accepts:
    if name is op.CATEGORY:
        return partial(_matches, re.compile(_CLASSES[argument], flags & re.ASCII))
    low, high = argument if name is op.RANGE else (argument, argument)
    return lambda char: len(char) == 1 and low <= ord(char) <= high


def _matches(compiled: re.Pattern[str], char: str) -> bool:
    return compiled.fullmatch(char) is not None


class PatternSearch:
    """Searches one text for `StopPatterns`: the match that ends first, from its earliest beginning."""

    def __init__(self, patterns: StopPatterns) -> None:
        self._patterns = patterns
        self._accepting = lru_cache(_CACHED)(
            lambda char: sum(1 << at for at, accepts in enumerate(patterns.accepts) if accepts(char))
        )
        self._following = lru_cache(_CACHED)(lambda bits: reduce(or_, (patterns.follow[at] for at in _bits(bits))))
        self.reset()

    def reset(self) -> None:
        """Forget the text, so that matches begin after it."""
        self._active: dict[int, int] = {}
        """The beginnings of possible matches, oldest first, and the bits of their positions. A position counts only for
        the oldest beginning that reaches it."""
        self._length = 0  # characters read

    @property
    def held(self) -> int:
        """Characters at the end of the text that may belong to a match."""
        return self._length - next(iter(self._active), self._length)

    def feed(self, text: str) -> tuple[int, int, str] | None:
        """Read more text. Returns a match: characters from its beginning to the end of `text`, characters of `text`
        after it, and its pattern."""
        for number, char in enumerate(text, start=1):
            accepted, before, oldest = self._accepting(char), self._active, self._length - MAX_MATCH_CHARS
            self._active, left = {}, accepted
            if accepted:
                for start, bits in before.items():
                    if start > oldest and (bits := self._following(bits) & left):
                        self._active[start] = bits
                        left &= ~bits
                if bits := self._patterns.first & left:
                    self._active[self._length] = bits
            self._length += 1
            for start, bits in self._active.items():
                for last, pattern in self._patterns.ends:
                    if bits & last:
                        rest = len(text) - number
                        return self._length - start + rest, rest, pattern
        return None
