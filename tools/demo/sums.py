"""Sums, products, comparisons and counting in people's own words, also over several turns."""

from random import Random

from weft.tools.demo import asking, phrases
from weft.tools.demo.drawing import pick
from weft.tools.demo.example import Example, Message, ask, user
from weft.tools.demo.wording import ask_for
from weft.tools.demo.words import ANIMALS, FRUITS, NUMBER_WORDS, OBJECTS

_TENS = {20: "twenty", 30: "thirty", 40: "forty", 50: "fifty", 60: "sixty", 70: "seventy", 80: "eighty", 90: "ninety"}
_TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_SPOKEN = dict(enumerate(NUMBER_WORDS)) | {13 + i: word for i, word in enumerate(_TEENS)} | _TENS
LARGEST_FACTOR = 12


def _small(rng: Random) -> int:
    return int(rng.random() * pick(rng, (10, 20, 100, 100, 1000, 1000)))


def _spoken(rng: Random, numbers: tuple[int, ...]) -> tuple[object, ...]:
    """Small numbers are at times written as words."""
    if rng.random() < 0.12 and all(number in _SPOKEN for number in numbers):
        return tuple(_SPOKEN[number] for number in numbers)
    return tuple(_SPOKEN[number] if number in _SPOKEN and rng.random() < 0.04 else number for number in numbers)


def _things(rng: Random) -> str:
    return pick(
        rng, ("dollars", "euros", "points", "coins", *[f"{pick(rng, kind)}s" for kind in (FRUITS, OBJECTS, ANIMALS)])
    )


def sums(rng: Random) -> Example:
    """Two numbers to be added or subtracted, or three."""
    draw = rng.random()
    if draw < 0.15:
        return _three(rng)
    if draw < 0.22:
        return _double(rng)
    a, b = _small(rng), _small(rng)
    if draw < 0.6:
        key = "" if max(a, b) < 20 else f"add {min(a, b)} {max(a, b)}"
        text = ask_for(rng, pick(rng, asking.SUM), "", *_spoken(rng, (a, b)), _things(rng))
        return ask("sums", text, str(a + b), key)
    if rng.random() < 0.7:
        a, b = max(a, b), min(a, b)
    key = "" if max(a, b) < 20 else f"subtract {min(a, b)} {max(a, b)}"
    pattern = pick(rng, asking.DIFFERENCE)
    if "how far apart" in pattern or "difference" in pattern or "how much [more" in pattern:
        a, b = max(a, b), min(a, b)
        if "how much [more" not in pattern and rng.random() < 0.5:
            return ask("sums", ask_for(rng, pattern, "", *_spoken(rng, (b, a))), str(a - b), key)
    return ask("sums", ask_for(rng, pattern, "", *_spoken(rng, (a, b)), _things(rng)), str(a - b), key)


def _three(rng: Random) -> Example:
    top = pick(rng, (10, 20, 100, 100))
    numbers = [1 + int(rng.random() * top) for _ in range(3 if rng.random() < 0.9 else 4)]
    key = f"three {numbers}"
    if rng.random() < 0.15:
        a, b, c = numbers[:3]
        first, second = pick(rng, (("+", "-"), ("-", "+"), ("-", "-")))
        by = pick(rng, ("", " ", " "))
        result = a + (b if first == "+" else -b) + (c if second == "+" else -c)
        text = ask_for(
            rng,
            pick(rng, ("! calculate {}", "? [what is|what's|how much is] {}", "= {}[| =|=|?]")),
            f"{a}{by}{first}{by}{b}{by}{second}{by}{c}",
        )
        return ask("sums", text, str(result), f"three {text}")
    text = ask_for(rng, pick(rng, asking.THREE), listed_numbers(rng, numbers, sums=True))
    return ask("sums", text, str(sum(numbers)), key)


def listed_numbers(rng: Random, numbers: list[int], sums: bool = False) -> str:
    by = pick(rng, ("+", " + ", " + ", " plus ", ", ", " and ")) if sums else pick(rng, (", ", " ", " ", ",", " and "))
    *first, last = map(str, numbers)
    if by == ", " and rng.random() < 0.7:
        return f"{by.join(first)}{pick(rng, (' and ', ', and '))}{last}"
    return by.join([*first, last])


def _double(rng: Random) -> Example:
    n = 1 + int(rng.random() * 100)
    if rng.random() < 0.75:
        text, answer = ask_for(rng, pick(rng, asking.DOUBLE), "", *_spoken(rng, (n,))), 2 * n
    else:
        text, answer = ask_for(rng, pick(rng, asking.HALF), "", *_spoken(rng, (2 * n,))), n
    return ask("sums", text, str(answer), text if len(text.split()) > 4 else "")


def multiply(rng: Random) -> Example:
    """The table up to 12 times 12; all of it is trained, so what is held out is how it is asked."""
    pattern = pick(rng, asking.PRODUCT)
    if rng.random() < 0.08:
        a, b = 2 + int(rng.random() * 98), 13 + int(rng.random() * 900)
        if a in (2, 10):
            a += 1
        if rng.random() < 0.5:
            a, b = b, a
        return ask("multiply", ask_for(rng, pattern, "", a, b, _things(rng)), phrases.TIMES_TOO_LARGE, f"times {a} {b}")
    a, b = (int(rng.random() * (LARGEST_FACTOR + 1)) for _ in range(2))
    text = ask_for(rng, pattern, "", *_spoken(rng, (a, b)), _things(rng))
    return ask("multiply", text, str(a * b), text if len(text.split()) > 5 else "")


def then(rng: Random) -> Example:
    """A sum, and what becomes of its result over one to four turns."""
    messages: list[Message] = []
    value = 0
    while not 0 < value < 1000:
        example = pick(rng, (sums, sums, sums, multiply))(rng)
        if example.answer.lstrip("-").isdigit():
            value = int(example.answer)
    messages += [*example.messages, {"role": "assistant", "content": str(value)}]
    for _ in range(int(rng.random() ** 2 * 4)):
        text, value = _follow(rng, value)
        messages += [user(text), {"role": "assistant", "content": str(value)}]
    text, value = _follow(rng, value)
    messages.append(user(text))
    return Example("then", messages, str(value), " | ".join(message["content"] for message in messages))


def _follow(rng: Random, value: int) -> tuple[str, int]:
    """What is asked about the last result, and the next one. Results stay between 0 and 1,998."""
    kinds = ["+"] * 5 * (value < 1000) + ["-"] * 5 + ["1"] * (value < 1000)
    if 0 <= value <= 100:
        kinds += ["2"]
    if 0 <= value <= LARGEST_FACTOR:
        kinds += ["*"] * 4
    kind = pick(rng, kinds)
    n = 1 + int(rng.random() * pick(rng, (10, 20, 100, max(1, min(value, 999)))))
    if kind == "-" and n > value and rng.random() < 0.9:
        n = 1 + int(rng.random() * max(1, min(value, 999)))
    if kind == "*":
        n = 1 + int(rng.random() * LARGEST_FACTOR)
    result = {"+": value + n, "-": value - n, "1": value + 1, "2": 2 * value, "*": value * n}[kind]
    if kind == "-" and result < 0:
        return _follow(rng, value) if value > 0 else ("plus 1", value + 1)
    return ask_for(rng, pick(rng, asking.FOLLOW[kind]), "", *_spoken(rng, (n,))), result


def compare(rng: Random) -> Example:
    """The largest or the smallest of some numbers."""
    largest = rng.random() < 0.5
    pattern = pick(rng, asking.LARGEST if largest else asking.SMALLEST)
    size = 2 if "{b}" in pattern else 2 + int(rng.random() * 5)
    top = pick(rng, (10, 100, 100, 1000))
    numbers = rng.sample(range(top), size)
    if rng.random() < 0.2:  # close together, or the digits of one another
        low = int(rng.random() * (top - 9))
        numbers = rng.sample(range(low, low + 9), size)
    text = ask_for(rng, pattern, listed_numbers(rng, numbers), numbers[0], numbers[1])
    return ask("compare", text, str((max if largest else min)(numbers)), f"{'max' if largest else 'min'} {numbers}")


def count_down(rng: Random) -> Example:
    """Counting down, at most 30 numbers, and up in people's own words."""
    up = rng.random() < 0.4
    first = int(rng.random() * pick(rng, (6, 20, 100, 200)))
    last = first + 1 + int(rng.random() * pick(rng, (6, 12, 29)))
    if rng.random() < 0.35:
        first = 1
        patterns = asking.COUNT_TO if up else asking.COUNT_DOWN_TO_ONE
    else:
        patterns = asking.COUNT_UP if up else asking.COUNT_DOWN
    last = min(last, first + 29)
    numbers = list(range(first, last + 1))
    shown = (first, last) if up else (last, first)
    text = ask_for(rng, pick(rng, patterns), "", *_spoken(rng, shown))
    return ask(
        "count_down",
        text,
        " ".join(map(str, numbers if up else numbers[::-1])),
        f"count {up} {first} {last}" if last > 12 else "",
    )
