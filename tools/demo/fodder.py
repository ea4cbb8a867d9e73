"""Texts without a meaning, to be copied, spelled, looked up or not understood: words, codes, numbers, any script."""

import string
from random import Random

from weft.tools.demo.drawing import made_up_word, number, pick
from weft.tools.demo.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLORS,
    COMMON,
    FOODS,
    FRUITS,
    NAMES,
    OBJECTS,
    OTHER_WORDS,
    TOPICS,
    WORDS,
)

_SCRIPTS = (
    (0x00E0, 0x00FF),  # Latin with accents
    (0x0391, 0x03C9),  # Greek
    (0x0410, 0x044F),  # Cyrillic
    (0x05D0, 0x05EA),  # Hebrew
    (0x3041, 0x3094),  # Hiragana
    (0x4E00, 0x9FA0),  # CJK
    (0xAC00, 0xD7A0),  # Hangul
    (0x1F300, 0x1F5FF),  # pictures
    (0x1F600, 0x1F64F),  # faces
    (0x1F680, 0x1F6C5),  # vehicles
)
_LETTERS = string.ascii_lowercase
_MIXED = string.ascii_lowercase + string.digits
_CODE = string.ascii_uppercase + string.digits


def foreign(rng: Random) -> str:
    """A few characters of one script, or a word with an accent in it."""
    low, high = pick(rng, _SCRIPTS)
    if low == 0x00E0:
        word = made_up_word(rng)
        at = int(rng.random() * len(word))
        return word[:at] + chr(low + int(rng.random() * (high - low))) + word[at + 1 :]
    size = 1 + int(rng.random() * (2 if low > 0xFFFF else 5))
    return "".join([chr(low + int(rng.random() * (high - low))) for _ in range(size)])


def characters(rng: Random, alphabet: str, low: int, high: int) -> str:
    """`low` to `high` characters of an alphabet."""
    return "".join([pick(rng, alphabet) for _ in range(low + int(rng.random() * (high - low + 1)))])


def word(rng: Random) -> str:
    """A lower-case word: one of the lists, a common one, or a made-up one."""
    draw = rng.random()
    if draw < 0.3:
        return pick(rng, WORDS)
    if draw < 0.65:
        return pick(rng, COMMON)
    if draw < 0.73:
        return pick(rng, OTHER_WORDS)
    if draw < 0.78:
        return pick(rng, NAMES).lower()
    if draw < 0.9:
        return made_up_word(rng)
    return characters(rng, _LETTERS, 2, 9)


def code(rng: Random) -> str:
    """An unguessable code: digits and letters, perhaps in groups."""
    draw = rng.random()
    if draw < 0.25:
        return characters(rng, _MIXED, 3, 10)
    if draw < 0.4:
        return characters(rng, _CODE, 2, 8)
    if draw < 0.55:
        groups = [
            characters(rng, pick(rng, (_CODE, string.digits, _LETTERS)), 2, 4) for _ in range(2 + int(rng.random() * 2))
        ]
        return pick(rng, "--._/").join(groups)
    if draw < 0.75:
        return characters(rng, string.digits, 1, 9)
    if draw < 0.85:
        return word(rng) + characters(rng, string.digits, 1, 4)
    if draw < 0.92:
        return f"{word(rng)}@{word(rng)}.{pick(rng, ('com', 'org', 'de', 'net'))}"
    if draw < 0.96:
        return f"{word(rng)}_{word(rng)}"
    return word(rng) + word(rng).capitalize()


def sentence(rng: Random) -> str:
    """Words in a row, as a hurried or a careful person writes them."""
    words = [word(rng) for _ in range(2 + int(rng.random() * 7))]
    draw = rng.random()
    if draw < 0.15:
        words[int(rng.random() * len(words))] = number(rng, 1 + int(rng.random() * 4))
    elif draw < 0.22:
        words = [part.capitalize() for part in words]
    elif draw < 0.3:
        words[int(rng.random() * len(words))] = pick(rng, NAMES)
    if rng.random() < 0.2:
        at = int(rng.random() * len(words))
        words[at] += pick(rng, ",,,;:")
        words[-1] = words[-1].rstrip(",;:") or "so"
    text = " ".join(words)
    if rng.random() < 0.3:
        text = text[0].upper() + text[1:] + pick(rng, ("", ".", "!", "?"))
    return text


def anything(rng: Random) -> str:
    """A text to copy: a sentence, words of a list, a code, digits, any script."""
    draw = rng.random()
    if draw < 0.35:
        return sentence(rng)
    if draw < 0.45:
        return word(rng)
    if draw < 0.6:
        return code(rng)
    if draw < 0.7:
        return " ".join([code(rng) if rng.random() < 0.5 else word(rng) for _ in range(2 + int(rng.random() * 4))])
    if draw < 0.8:
        digits = [characters(rng, string.digits, 1, pick(rng, (1, 1, 3))) for _ in range(2 + int(rng.random() * 9))]
        return pick(rng, (" ", " ", " ", ", ", "-")).join(digits)
    if draw < 0.88:
        words = [foreign(rng) if rng.random() < 0.5 else word(rng) for _ in range(1 + int(rng.random() * 5))]
        return " ".join(words)
    if draw < 0.93:
        return ", ".join([f"{pick(rng, COLORS)} {pick(rng, WORDS)}" for _ in range(1 + int(rng.random() * 3))])
    words = [pick(rng, (word(rng), number(rng, 2), pick(rng, NAMES))) for _ in range(2 + int(rng.random() * 4))]
    return " ".join(words)


_LISTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("animals", ANIMALS),
    ("fruits", FRUITS),
    ("colors", COLORS),
    ("names", NAMES),
    ("cities", CITIES),
    ("foods", FOODS),
    ("things", OBJECTS),
    ("adjectives", ADJECTIVES),
    ("topics", TOPICS),
    ("words", WORDS),
    ("words", WORDS),
    ("words", OTHER_WORDS),
    ("words", COMMON),
    ("words", COMMON),
)


def items(rng: Random, size: int) -> tuple[list[str], str]:
    """Different things of one kind, and what they are called together."""
    kind, words = pick(rng, _LISTS)
    return rng.sample(words, min(size, len(words))), kind
