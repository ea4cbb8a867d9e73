"""Drawing words, numbers and phrasings at random. Standard library only."""

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from weft.tools.demo.words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    FOODS,
    NAMES,
    STATEMENT_WORDS,
    SYLLABLES,
    TOPICS,
    VERBS,
    WORDS,
)

T = TypeVar("T")


def pick(rng: Random, items: Sequence[T]) -> T:
    """One item, uniformly. Several times faster than `Random.choice`, and training draws billions."""
    return items[int(rng.random() * len(items))]


def made_up_word(rng: Random) -> str:
    return "".join(pick(rng, SYLLABLES) for _ in range(1 + int(rng.random() * 3) + (rng.random() < 0.8)))


def number(rng: Random, digits: int) -> str:
    """A number of exactly `digits` digits that does not start with 0."""
    low = 10 ** (digits - 1)
    return str(low + int(rng.random() * 9 * low))


def fill(rng: Random, template: str) -> str:
    """Puts a random word of the named kind into each `{kind}` of a template."""
    if "{" not in template:
        return template
    return _SLOT.sub(lambda match: _SLOTS[match[1]](rng), template)


_SLOT = re.compile(r"\{(\w+)\}")
_SLOTS: dict[str, Callable[[Random], str]] = {
    "noun": lambda rng: pick(rng, WORDS),
    "city": lambda rng: pick(rng, CITIES),
    "name": lambda rng: pick(rng, NAMES),
    "color": lambda rng: pick(rng, COLORS),
    "topic": lambda rng: pick(rng, TOPICS),
    "food": lambda rng: pick(rng, FOODS),
    "made": made_up_word,
    "m": lambda rng: number(rng, 1 + int(rng.random() * 3)),
    "n": lambda rng: number(rng, 1 + int(rng.random() * 2)),
}


def vary(rng: Random, text: str, keep: float = 0.6) -> str:
    """The same request as a hurried person types it: no capital, no full stop, or a "please" at the end."""
    draw = rng.random()
    if draw < keep:
        return text
    if draw < keep + 0.2 and text[1:2].islower():
        text = text[0].lower() + text[1:]
    if draw > keep + 0.1 and text[-1] in ".?!":
        text = text[:-1]
    if draw > 0.95 and text[-1].isalnum():
        text += " please"
    return text


def count_tokens(text: str) -> int:
    """About how many tokens a text has: one per known word, letter of another word, digit, punctuation mark and run of
    spaces."""
    pieces = _PIECE.findall(text)
    return sum([1 if len(piece) == 1 or piece.lower().lstrip() in _KNOWN else len(piece) for piece in pieces])


_PIECE = re.compile(r" ?[^\W\d_]+|\d| ?[^\w\s]|\s+")
_KNOWN = frozenset(STATEMENT_WORDS).union(word.lower() for word in (*WORDS, *NAMES, *CITIES, *ADJECTIVES, *VERBS)) | {
    "",
    "-",
    ".",
}
