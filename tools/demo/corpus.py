"""Training rows: conversations and plain texts of mixed skills, as token ids with a weight for each token.

A row is one conversation from its first token, as the model will serve it. Its turns fill the row: every skill is
practiced at every position, after any other.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from weft.tools.demo import functions, phrases, skills
from weft.tools.demo.drawing import fill, pick, vary
from weft.tools.demo.example import Example, Generator, Message, is_held_out
from weft.tools.demo.facts import PERSONAL, QUESTIONS, RELATIONS, Fact, FactBook, fact_value
from weft.tools.demo.facts import ask_personal as _ask_personal
from weft.tools.demo.facts import tell as _tell
from weft.tools.demo.functions import offer, written
from weft.tools.demo.lists import known
from weft.tools.demo.skills import SKILLS, held_out
from weft.tools.demo.tokenizer import ASSISTANT_ID, BEGIN_ID, END_ID, PAD_ID, SYSTEM_ID, TOOL_ID, USER_ID
from weft.tools.demo.told import ask_personal_wide, personal_wide, told
from weft.tools.demo.wording import is_new
from weft.tools.demo.words import WORDS

__all__ = ["SKILLS", "Batch", "Corpus", "Example", "held_out", "prompt_ids"]

IGNORED, PROMPT, ANSWER = 0, 1, 2
"""Role of a token in the loss: none (padding, markers), text of others, or text the model must write."""

Batch = tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]
"""Token ids and loss kinds, each [rows, tokens]."""

_HEADS = {"system": SYSTEM_ID, "user": USER_ID, "assistant": ASSISTANT_ID, "tool": TOOL_ID}

TURN_MIX = {
    "add": 12,
    "subtract": 14,
    "sums": 18,
    "multiply": 5,
    "then": 10,
    "compare": 5,
    "sort": 10,
    "reverse": 5,
    "copy": 3,
    "upper": 4,
    "count": 6,
    "count_up": 2,
    "count_down": 5,
    "lists": 26,
    "letters": 16,
    "repeat": 13,
    "known": 10,
    "echo": 4,
    "chat": 6,
    "unknown": 7,
    "recall": 5,
    "personal": 9,
    "facts": 5,
    "told": 9,
}
"""Weight of each kind of turn in a conversation."""

ROW_MIX = {"turns": 54, "facts": 20, "plain": 10, "story": 3, "tools": 13}
"""Weight of each kind of row."""


_BARE = ("code", "number", "key", "price", "password", "secret", "value", "secret word", "magic number", "color")


class Turns(NamedTuple):
    """The sources of a row's turns."""

    known: list[str]
    """Words that are one token."""
    mix: dict[str, int]


class Segment(NamedTuple):
    """A stretch of text with the marker before it and, perhaps, the end token after it."""

    head: int | None
    text: str
    kind: int
    end: int | None  # the loss kind of the end token; None for no end token


def system(text: str) -> Segment:
    return Segment(SYSTEM_ID, text, PROMPT, IGNORED)


def asked(text: str) -> Segment:
    return Segment(USER_ID, text, PROMPT, IGNORED)


def answered(text: str) -> Segment:
    return Segment(ASSISTANT_ID, text, ANSWER, ANSWER)


def turn(example: Example) -> Iterator[Segment]:
    for message in example.messages:
        text = said(message)
        yield answered(text) if message["role"] == "assistant" else given(message["role"], text)
    yield answered(example.answer)


def given(role: str, text: str) -> Segment:
    """Text that the model reads."""
    return Segment(_HEADS[role], text, PROMPT, IGNORED)


def said(message: Message) -> str:
    """A message's text, as the chat template writes it."""
    calls = [written(call["function"]) for call in message.get("tool_calls", ())]
    return "\n".join([*([message["content"]] if message["content"] else []), *calls])


def prompt_ids(tokenizer: Tokenizer, example: Example) -> list[int]:
    """The tokens the model sees before it answers: the chat template, or the plain prompt."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    ids = [BEGIN_ID, *encode(example.prompt)]
    messages = list(example.messages)
    if example.tools:
        first = [messages.pop(0)["content"]] if messages[0]["role"] == "system" else []
        messages.insert(0, {"role": "system", "content": "\n\n".join([*first, offer(example.tools)])})
    for message in messages:
        ids += [_HEADS[message["role"]], *encode(said(message)), END_ID]
    return [*ids, ASSISTANT_ID] if example.messages else ids


class Corpus:
    """Draws training rows. The same seed and index always give the same batch."""

    def __init__(self, tokenizer_file: str, seed: int, practice: Mapping[str, int] | None = None) -> None:
        """`practice`: other weights for some kinds of turns (`TURN_MIX`)."""
        self.tokenizer = Tokenizer.from_file(tokenizer_file)
        self.seed = seed
        self.turns = Turns(known_words(self.tokenizer), TURN_MIX | dict(practice or {}))

    def batch(self, index: int, rows: int, length: int) -> Batch:
        rng = Random(f"train {self.seed} {index}")
        ids = np.full((rows, length), PAD_ID, dtype=np.uint16)
        kinds = np.zeros((rows, length), dtype=np.uint8)
        for row in range(rows):
            row_ids, row_kinds = self._row(rng, length)
            ids[row, : len(row_ids)] = row_ids
            kinds[row, : len(row_kinds)] = row_kinds
        return ids, kinds

    def _row(self, rng: Random, length: int) -> tuple[list[int], list[int]]:
        ids, kinds = [BEGIN_ID], [IGNORED]
        for segment in _ROWS[_weighted(rng, ROW_MIX)](rng, length, self.turns):
            if segment.head is not None:
                ids.append(segment.head)
                kinds.append(IGNORED)
            text_ids = self._encode(segment.text)
            ids += text_ids
            kinds += [segment.kind] * len(text_ids)
            if segment.end is not None:
                ids.append(END_ID)
                kinds.append(segment.end)
            if len(ids) >= length:
                break
        return ids[:length], kinds[:length]

    def _encode(self, text: str) -> list[int]:
        if len(text) < 60:
            return self._encode_short(text)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    @lru_cache(maxsize=50_000)  # noqa: B019  (a corpus lives as long as its process)
    def _encode_short(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def known_words(tokenizer: Tokenizer) -> list[str]:
    """The words of two letters and more that are one token, with or without the space before it."""
    tokens = {token.removeprefix("\u0120") for token in tokenizer.get_vocab()}
    return sorted(token for token in tokens if len(token) > 1 and token.isascii() and token.isalpha())


def _weighted(rng: Random, mix: dict[str, int]) -> str:
    at = rng.random() * sum(mix.values())
    for name, weight in mix.items():
        at -= weight
        if at < 0:
            return name
    return name


class _Memory:
    """Facts that the user stated in a conversation, and turns that state or ask for them."""

    def __init__(self) -> None:
        self.personal: dict[str, str] = {}
        self.facts: dict[str, Fact] = {}
        self.things: set[str] = set()
        self.more_was_told = False
        """The user said things about themselves that are not in `personal`."""

    def personal_turn(self, rng: Random) -> Iterator[Segment]:
        slot = pick(rng, tuple(self.personal)) if self.personal and rng.random() < 0.7 else None
        slot = slot or pick(rng, tuple(PERSONAL))
        personal = PERSONAL[slot]
        draw = rng.random()
        ask_personal, tell = (_ask_personal, _tell) if rng.random() < 0.45 else (ask_personal_wide, personal_wide)
        if slot in self.personal and draw < 0.9:
            yield asked(ask_personal(rng, slot))
            yield answered(personal.answer.format(self.personal[slot]))
        elif slot not in self.personal and draw < 0.08 and not self.more_was_told:
            yield asked(ask_personal(rng, slot))
            yield answered(phrases.NOT_TOLD)
        else:
            self.personal[slot] = personal.value(rng)
            statement, reply = tell(rng, slot, self.personal[slot])
            if draw < 0.2:
                yield asked(f"{statement} {ask_personal(rng, slot)}")
                yield answered(personal.answer.format(self.personal[slot]))
            else:
                yield asked(statement)
                yield answered(reply)

    def facts_turn(self, rng: Random) -> Iterator[Segment]:
        if self.facts and rng.random() < 0.75:
            if rng.random() < 0.06:
                yield from self.missing_fact(rng)
                return
            fact = pick(rng, tuple(self.facts.values()))
            yield asked(vary(rng, fact.put(pick(rng, QUESTIONS)), keep=0.85))
            yield answered(fact.value)
        else:
            book = FactBook(rng, pick(rng, (10, 10, 25, 60, 150)), made_up=0.1)
            yield asked(book.text)
            yield answered(phrases.NOTED)
            self.learn(book)

    def recall_turn(self, rng: Random, length: int) -> Iterator[Segment]:
        """Facts and a question on them in one message."""
        if rng.random() < 0.2:
            yield from self.bare_fact_turn(rng)
            return
        book = FactBook(rng, pick(rng, (12, 40, 80, 160 if length > 300 else 60)), made_up=0.1)
        self.learn(book)
        fact = pick(rng, book.facts)
        if not is_held_out(fact.key):
            parts = [book.text, book.question(fact)]
            if rng.random() < 0.35:
                parts.reverse()
            yield asked(pick(rng, (" ", "\n", "\n\n")).join(parts))
            yield answered(fact.value)
        else:
            yield asked(book.text)
            yield answered(phrases.NOTED)

    def told_turns(self, rng: Random) -> Iterator[Segment]:
        """Facts in people's own words. They replace earlier facts about the same things."""
        while is_held_out((example := told(rng, skills.between, personal=False)).key):
            pass
        text = example.key
        for thing in [thing for thing in self.facts if thing in text]:
            del self.facts[thing]
        yield from turn(example)

    @staticmethod
    def bare_fact_turn(rng: Random) -> Iterator[Segment]:
        """Facts that name no thing: "The password is ..."."""
        relations = rng.sample(_BARE, 1 + int(rng.random() * 3))
        values = [fact_value(rng) for _ in relations]
        facts = " ".join(f"The {relation} is {value}." for relation, value in zip(relations, values, strict=True))
        at = int(rng.random() * len(values))
        yield asked(f"{facts} {pick(rng, ('What is the', 'What was the', 'Tell me the'))} {relations[at]}?")
        yield answered(values[at])

    def missing_fact(self, rng: Random) -> Iterator[Segment]:
        fact = Fact(pick(rng, RELATIONS), pick(rng, WORDS), "")
        if fact.thing not in self.things:
            yield asked(vary(rng, fact.put(pick(rng, QUESTIONS)), keep=0.85))
            yield answered(phrases.NOT_TOLD)

    def learn(self, book: FactBook) -> None:
        """Later facts replace earlier ones. A held-out fact is never asked for."""
        for fact in book.facts:
            self.things.add(fact.thing)
            self.facts.pop(fact.thing, None)
            if not is_held_out(fact.key):
                self.facts[fact.thing] = fact


def _drawn(rng: Random, generate: Generator) -> Example:
    """An example without any held-out wording, not even one composed from a pattern and its subject."""
    while True:
        example = generate(rng)
        asked = [message["content"] for message in example.messages if message["role"] == "user"]
        if all(is_new(_NUMBER.sub("_", text)) for text in asked) and not _begins_held_out(example):
            return example


def _begins_held_out(example: Example) -> bool:
    """Whether a conversation on sums begins with a held-out one: its key is the whole conversation."""
    if example.skill != "then":
        return False
    numbers = sorted(map(int, _NUMBER.findall(example.messages[0]["content"])))
    if len(numbers) != 2 or numbers[1] < 20:
        return False
    return any(is_held_out(f"{skill} {numbers[0]} {numbers[1]}") for skill in ("add", "subtract"))


_NUMBER = re.compile(r"\d+")


def _one_turn(rng: Random, memory: _Memory, length: int, turns: Turns) -> Iterator[Segment]:
    kind = _weighted(rng, turns.mix)
    if kind == "known":
        while is_held_out((example := known(rng, turns.known)).key):
            pass
        return turn(example)
    if kind == "personal":
        return memory.personal_turn(rng)
    if kind == "facts":
        return memory.facts_turn(rng)
    if kind == "recall":
        return memory.recall_turn(rng, length)
    if kind == "told":
        return memory.told_turns(rng)
    return turn(_drawn(rng, lambda rng: skills.draw(kind, rng)))


def _turns_row(rng: Random, length: int, turns: Turns) -> Iterator[Segment]:
    """Turns of mixed skills, with facts stated early and asked for late."""
    memory = _Memory()
    if rng.random() < 0.25:
        yield system(fill(rng, pick(rng, phrases.SYSTEM)))
    if (draw := rng.random()) < 0.24:
        memory.more_was_told = True
        yield from turn(_drawn(rng, lambda rng: skills.draw("memory" if draw < 0.04 else "told", rng)))
    while True:
        yield from _one_turn(rng, memory, length, turns)


def _facts_row(rng: Random, length: int, turns: Turns) -> Iterator[Segment]:
    """A long text of facts, then many questions on it, with other turns in between."""
    memory = _Memory()
    book = FactBook(rng, int((0.25 + 0.63 * rng.random()) * length), made_up=0.1 if rng.random() < 0.3 else 0.0)
    memory.learn(book)
    if not memory.facts:  # all held out
        yield from _turns_row(rng, length, turns)
    first = pick(rng, tuple(memory.facts.values()))
    draw = rng.random()
    if draw < 0.25:
        yield system(f"{fill(rng, pick(rng, phrases.SYSTEM))} {book.text}" if draw < 0.1 else book.text)
    elif draw < 0.4:
        yield asked(book.text)
        yield answered(phrases.NOTED)
    else:
        if draw < 0.5:
            yield system(fill(rng, pick(rng, phrases.SYSTEM)))
        question = book.question(first)
        if draw < 0.75:
            yield asked(f"{book.text}{pick(rng, (' ', chr(10), chr(10) * 2))}{question}")
        elif draw < 0.82:
            yield asked(f"Read this text and answer. {book.text} Question: {question}")
        else:
            yield asked(f"{question}\n{book.text}")
        yield answered(first.value)
    while True:
        if rng.random() < 0.06 or not memory.facts:
            yield from _one_turn(rng, memory, length, turns)
        elif rng.random() < 0.04:
            yield from memory.missing_fact(rng)
        else:
            fact = pick(rng, tuple(memory.facts.values()))
            yield asked(book.question(fact))
            yield answered(fact.value)


def _tools_row(rng: Random, _length: int, _turns: Turns) -> Iterator[Segment]:
    """A conversation in which functions are offered; some of its turns need them."""
    memory = _Memory()
    uses = functions.offered(rng)
    parts = [fill(rng, pick(rng, phrases.SYSTEM))] if rng.random() < 0.35 else []
    yield system("\n\n".join([*parts, offer([use.tool() for use in uses])]))
    while True:
        draw = rng.random()
        if draw < 0.6:
            rounds = list(functions.steps(rng, uses))
            if is_held_out(rounds[0][0]["content"]):
                continue
            for message, answer in rounds:
                yield given(message["role"], message["content"])
                if answer:
                    yield answered(answer)
        elif draw < 0.92:
            example = _drawn(rng, skills.beside_tools)
            if example.skill not in ("told", "memory") and not functions.takes_over(uses, example):
                yield from turn(example)
        else:
            yield from memory.told_turns(rng) if rng.random() < 0.5 else memory.personal_turn(rng)


def _plain_row(rng: Random, length: int, _turns: Turns) -> Iterator[Segment]:
    """Plain texts in sequence, each with its own begin token; or facts stated twice, shuffled the second time."""
    head: int | None = None
    if rng.random() < 0.3:
        yield from _facts_twice(rng, length)
        head = BEGIN_ID
    while True:
        example = skills.draw("complete", rng)
        yield Segment(head, example.prompt, PROMPT, None)
        yield Segment(None, example.answer, ANSWER, ANSWER if example.ends else None)
        head = BEGIN_ID


def _facts_twice(rng: Random, length: int) -> Iterator[Segment]:
    book = FactBook(rng, int(length * 0.5), made_up=0.05)
    yield Segment(None, book.text, PROMPT, None)
    facts = [fact for fact in book.facts if not is_held_out(fact.key)]
    for fact in rng.choices(facts, k=length // 8) if facts else ():
        yield Segment(None, f" The {fact.relation} of {fact.thing} is", PROMPT, None)
        yield Segment(None, f" {fact.value}.", ANSWER, None)


def _story_row(rng: Random, length: int, turns: Turns) -> Iterator[Segment]:
    """The story until the row ends, perhaps after other turns, or cut short by the user (so its end is not learned)."""
    memory = _Memory()
    if rng.random() < 0.2:
        yield system(fill(rng, pick(rng, phrases.SYSTEM)))
    for _ in range(pick(rng, (0, 0, 0, 1, 2, 5))):
        yield from _one_turn(rng, memory, length, turns)
    while True:
        example = skills.draw("story", rng)
        yield asked(example.messages[-1]["content"])
        if rng.random() < 0.3:
            cut = example.answer[: 20 + int(rng.random() * length)]
            yield Segment(ASSISTANT_ID, cut, ANSWER, IGNORED)
            yield from _one_turn(rng, memory, length, turns)
        else:
            yield Segment(ASSISTANT_ID, example.answer, ANSWER, None)


_ROWS = {"turns": _turns_row, "facts": _facts_row, "plain": _plain_row, "story": _story_row, "tools": _tools_row}
