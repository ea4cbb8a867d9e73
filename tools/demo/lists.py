"""Lists, letters and copies in people's own words: words, names, numbers and strings that nobody has seen."""

from collections.abc import Sequence
from random import Random

from weft.tools.demo import asking
from weft.tools.demo.drawing import made_up_word, pick
from weft.tools.demo.example import Example, ask
from weft.tools.demo.fodder import anything, characters, items, word
from weft.tools.demo.wording import ask_for
from weft.tools.demo.words import NAMES, VOWELS

_FORMS = (*[", "] * 6, *[" "] * 4, ",", "\n", "and", "and", "and", ", and", " and ", "; ", "article", "dash", " or ")


def listed(rng: Random, words: list[str], nouns: bool = False) -> tuple[str, str]:
    """A list as people write it, and what its answer has between the items."""
    form = pick(rng, _FORMS)
    if form == "article" and not nouns:
        form = ", "
    if form == "article":
        words = [f"{'an' if part[0] in VOWELS else 'a'} {part}" for part in words]
        form = "and"
    if form in ("and", ", and"):
        return f"{', '.join(words[:-1])}{', and ' if form == ', and' else ' and '}{words[-1]}", ", "
    if form == "dash":
        return "\n" + "\n".join([f"- {part}" for part in words]), "\n"
    if form == "\n":
        return pick(rng, ("", "\n")) + "\n".join(words), "\n"
    return form.join(words), ", " if form in (" and ", "; ", " or ") else form


def _numbers(rng: Random, size: int) -> list[str]:
    top = pick(rng, (10, 10, 30, 100, 100, 1000))
    return [str(int(rng.random() * top)) for _ in range(size)]


def lists(rng: Random) -> Example:
    """Sorting, reversing, counting, upper-casing, the first and the last of a list."""
    kind = pick(rng, _KINDS)
    if kind == "upper":
        return _upper(rng)
    size = 2 + int(rng.random() * (6 if kind == "sort" else 8))
    if kind == "ascending" or kind == "descending":
        return _sort_numbers(rng, kind, min(size, 6))
    draw = rng.random()
    noun = "words"
    if draw < 0.2 and kind != "sort":
        words, noun = _numbers(rng, size), "numbers"
    elif draw < 0.26:
        words, noun = rng.sample("abcdefghijklmnopqrstuvwxyz", size), "letters"
    elif draw < 0.36 and kind != "sort":
        words = [word(rng) for _ in range(size)]
    else:
        words, noun = items(rng, size)
    if kind == "count" and rng.random() < 0.15:
        words[-1] = words[0]
    if kind == "count" and rng.random() < 0.1:
        words = [words[0]] * len(words)
    text, by = listed(rng, words, nouns=noun in ("animals", "fruits", "things"))
    patterns, answer = {
        "sort": (asking.SORT, by.join(sorted(words, key=str.lower))),
        "reverse": (asking.REVERSE, by.join(words[::-1])),
        "count": (asking.COUNT, str(len(words))),
        "first": (asking.FIRST, words[0]),
        "last": (asking.LAST, words[-1]),
    }[kind]
    if noun == "topics" or rng.random() < 0.15:
        noun = "words"
    return ask("lists", ask_for(rng, pick(rng, patterns), text, "", noun), answer, f"{kind} {' '.join(words)}")


_KINDS = (
    *["sort"] * 4, *["ascending"] * 3, "descending", *["reverse"] * 4, *["count"] * 4, *["upper"] * 3, "first", "last"
)  # fmt: skip


def _sort_numbers(rng: Random, kind: str, size: int) -> Example:
    top = pick(rng, (10, 30, 100, 100, 1000))
    numbers = rng.sample(range(top), min(size, top))
    form = pick(rng, (*[", "] * 3, *[" "] * 3, ",", "and", "\n"))
    down = kind == "descending"
    shown = sorted(numbers, reverse=down)
    if form == "and":
        text, by = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}", ", "
    else:
        text, by = form.join(map(str, numbers)), form
    request = ask_for(rng, pick(rng, asking.DESCENDING if down else asking.ASCENDING), text)
    return ask("lists", request, by.join(map(str, shown)), f"{kind} {numbers}")


def _upper(rng: Random) -> Example:
    draw = rng.random()
    if draw < 0.4:
        text, _ = listed(rng, items(rng, 1 + int(rng.random() * 4))[0])
        text = text.strip()
    else:
        text = " ".join([word(rng) for _ in range(1 + int(rng.random() * (1 if draw < 0.65 else 5)))])
    return ask("lists", ask_for(rng, pick(rng, asking.UPPER), text, tight_end=True), text.upper(), f"upper {text}")


def _one_word(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.08:
        return pick(rng, NAMES)
    if draw < 0.16:
        return characters(rng, "abcdefghijklmnopqrstuvwxyz0123456789", 2, 7)
    if draw < 0.22:
        return characters(rng, "0123456789", 2, 6)
    if draw < 0.26:
        return characters(rng, "abcdef", 3, 6)
    return word(rng)


def letters(rng: Random) -> Example:
    """Spelling a word, backwards too, its letters counted, its first and its last."""
    draw = rng.random()
    return _letters_of(rng, draw, _one_word(rng))


def _letters_of(rng: Random, draw: float, text: str) -> Example:
    if text.isdigit() and draw >= 0.45:
        text = made_up_word(rng)
    shown = f"{quote}{text}{quote}" if (quote := pick(rng, ("", "", "", "", '"', "'"))) else text
    if draw < 0.45:
        if rng.random() < 0.08:
            text = f"{word(rng)} {text}"
            shown = f'"{text}"'
        patterns, answer, kind = asking.BACKWARDS, text[::-1], "backwards"
    elif draw < 0.7:
        patterns, answer, kind = asking.SPELL, " ".join(text), "spell"
    elif draw < 0.85:
        patterns, answer, kind = asking.LETTER_COUNT, str(len(text)), "length"
    elif draw < 0.93:
        patterns, answer, kind = asking.FIRST_LETTER, text[0], "first"
    else:
        patterns, answer, kind = asking.LAST_LETTER, text[-1], "last"
    return ask("letters", ask_for(rng, pick(rng, patterns), shown), answer, f"{kind} {text}")


def known(rng: Random, vocabulary: Sequence[str]) -> Example:
    """Copying, spelling and upper-casing the words that the tokenizer knows, which no other turn may say."""
    draw = rng.random()
    if draw < 0.2:
        return _letters_of(rng, rng.random(), pick(rng, vocabulary))
    words = [pick(rng, vocabulary) if rng.random() < 0.75 else word(rng) for _ in range(1 + int(rng.random() * 7))]
    if draw < 0.4:
        text = " ".join(words[:4]).lower()
        return ask("lists", ask_for(rng, pick(rng, asking.UPPER), text, tight_end=True), text.upper(), f"upper {text}")
    return repeat(rng, " ".join(words))


def repeat(rng: Random, text: str = "") -> Example:
    """Copying any text as it stands."""
    text = text or anything(rng)
    quote = pick(rng, ("", "", "", "", '"', '"', "'"))
    shown = f"{quote}{text}{quote}" if quote not in text else text
    gap = pick(rng, ("", "", "", "", "", "\n"))
    request = ask_for(rng, pick(rng, asking.REPEAT), gap + shown, tight_end=True)
    if gap:
        request = request.replace(" \n", "\n")
    return ask("repeat", request, text, text)
