"""Requests put together from parts: a greeting, how it is asked, what for, and how carefully it is typed.

A pattern is one line: what kind of request it is, then its words, with alternatives in brackets, which may nest
(`! [add|sum] {a} and {b}`). The kinds: `!` an order ("sort ..."), `?` a question ("what is ..."), `:` a thing ("the sum
of ..."), which both can ask for, and `=` nothing to be added to.
"""

import json
from functools import cache
from importlib.resources import files
from itertools import count
from random import Random
from typing import Union

from weft.tools.demo.drawing import pick

_Part = Union[str, "_Choice"]
_Sequence = tuple[_Part, ...]


class _Choice(tuple[_Sequence, ...]):
    """Alternatives."""

    __slots__ = ()


SLOTS = {"{}": "\x00", "{a}": "\x01", "{b}": "\x02", "{c}": "\x03"}
"""A slot is one character while the words around it are typed, so that no change of case reaches it."""


def patterns(text: str) -> tuple[str, ...]:
    """The lines of a block of patterns."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


@cache
def _parse(text: str) -> _Sequence:
    for name, slot in SLOTS.items():
        text = text.replace(name, slot)
    text = text.replace("\\n", "\n")
    sequence, at = _read(text, 0)
    assert at == len(text), text
    return sequence


def _read(text: str, at: int) -> tuple[_Sequence, int]:
    parts: list[_Part] = []
    plain = ""
    while at < len(text) and text[at] not in "|]":
        if text[at] != "[":
            plain += text[at]
            at += 1
            continue
        options: list[_Sequence] = []
        while text[at] != "]":
            option, at = _read(text, at + 1)
            options.append(option)
        at += 1
        parts += [plain, _Choice(options)]
        plain = ""
    return (*parts, plain), at


def _spin(rng: Random, sequence: _Sequence) -> str:
    return "".join([part if isinstance(part, str) else _spin(rng, pick(rng, part)) for part in sequence])


def spin(rng: Random, text: str) -> str:
    """One of the texts that a pattern without a kind stands for."""
    return _spin(rng, _parse(text))


_GREETING = (
    "[hi|hello|hey|hey there|ok|okay|so|now|well|good morning|thanks|great|alright|right|listen|weft][,|,|!|.|] "
)
_ORDER = (
    "[please|can you|could you|could you please|can you please|would you|will you|i want you to|i'd like you to|just|"
    "now|kindly|go ahead and|i need you to|you should|try to|help me|help me to|can u|pls|ok now|then|quickly|"
    "your task is to|would you mind to|may i ask you to|let's|your job: ] "
)
_ORDER_END = "[ please| for me| for me please| now|, please|, thanks| thanks|, will you| pls| quickly| for me, thanks]"
_QUESTION = (
    "[tell me,|tell me|can you tell me|do you know|could you tell me|quick question:|question:|i wonder|i wonder,|"
    "i want to know|i need to know|please tell me|hey can u tell me|and|any idea|say,|do you happen to know|"
    "i would like to know|just wondering,|help me out,|for a test:|please,|let me know] "
)
_QUESTION_END = "[ please| please| then| exactly|, please|, do you know| again| right now| in total| now|, tell me]"
_SUBJECT_END = "[ please|, please|, thanks| for me| pls| please]"
"""What may follow a subject without being taken for a part of it."""
_THING = (
    "[what is|what's|whats|what is|tell me|give me|find|show me|i need|i want|can you give me|could you give me|"
    "can you tell me|please give me|please tell me|work out|what would be|i'd like|get me|calculate|let me have|"
    "could you find|can you find|return|print|write|do you know|i would like|now|and|] "
)


def skeleton(text: str) -> str:
    """A request without its numbers and words, which are `_` or slots: to tell wordings apart."""
    return " ".join(text.lower().translate(_BARE).split())


_BARE = str.maketrans(dict.fromkeys(SLOTS.values(), "_") | dict.fromkeys(',.!?:;"\u201c\u201d'))


@cache
def held_out_wordings() -> frozenset[str]:
    """The wordings of the questions in `held_out.jsonl`: no training text is asked in any of them."""
    rows = (files(__package__) / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return frozenset(skeleton(json.loads(row)["masked"]) for row in rows) - {""}


def is_new(text: str) -> bool:
    """Whether training may ask in these words. `text` has slots, or `{}`, `{a}` ..., where its subject goes."""
    for name, slot in SLOTS.items():
        text = text.replace(name, slot)
    return skeleton(text) not in held_out_wordings()


def ask_for(rng: Random, pattern: str, *fillings: object, tight_end: bool = False) -> str:
    """A request of this pattern, in no held-out wording, with its slots filled in order.

    `tight_end`: nothing may follow a slot at its end.
    """
    for tries in count():
        text, kind, closed = _words(rng, pattern, tight_end)
        text = _type(rng, text, kind, closed)
        if tries > 3:  # the pattern may have no other words
            text = pick(rng, ("ok, ", "now: ", "so, ", "and ")) + text
        if skeleton(text) not in held_out_wordings():
            break
    for slot, filling in zip(SLOTS.values(), fillings, strict=False):
        text = text.replace(slot, str(filling))
    return text


def _words(rng: Random, pattern: str, tight_end: bool) -> tuple[str, str, bool]:
    kind, text = pattern[0], spin(rng, pattern[2:])
    ends_open = "\x00" <= text[-1] <= "\x03"
    closed = tight_end and ends_open
    draw = rng.random()
    if kind == ":":
        text = spin(rng, _THING).lstrip() + text
        kind = "?" if text.startswith(("wh", "do ", "can ", "could ")) else "!"
    elif kind == "!" and draw < 0.4:
        text = spin(rng, _ORDER) + text
    elif kind == "?" and draw < 0.3:
        text = spin(rng, _QUESTION) + text
    if kind != "=" and not closed and rng.random() < 0.22:
        text += spin(rng, _SUBJECT_END if ends_open else _ORDER_END if kind == "!" else _QUESTION_END)
    if kind != "=" and rng.random() < 0.12:
        text = spin(rng, _GREETING) + text
    return text.replace("  ", " "), kind, closed


def _type(rng: Random, text: str, kind: str, closed: bool) -> str:
    """As people type: with care, in lower case, without a mark at the end, or shouting."""
    draw = rng.random()
    if draw < 0.55:
        text = text[0].upper() + text[1:]
        text = text.replace(" i ", " I ").replace(" i'", " I'")
        text = text.replace("! ", "! \x04").replace(". ", ". \x04")
        if "\x04" in text:
            first, *rest = text.split("\x04")
            text = first + "".join(part[:1].upper() + part[1:] for part in rest)
    elif draw > 0.97:
        text = text.upper()
    if not closed and kind != "=":
        draw = rng.random()
        asks = kind == "?" or text[:3].lower() in ("can", "cou", "wou", "wil", "do ")
        if draw < 0.5:
            text += "?" if asks else "."
        elif draw > 0.96:
            text += pick(rng, ("!", "??", "...", " :)", "!!", " ?"))
    return text
