"""Facts to be recalled: facts that a text states about things, and facts that people state about themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from weft.tools.demo import phrases
from weft.tools.demo.drawing import count_tokens, made_up_word, number, pick, vary
from weft.tools.demo.wording import is_new
from weft.tools.demo.words import ADJECTIVES, ANIMALS, CITIES, COLORS, FOODS, FRUITS, NAMES, PLACES, VERBS, WORDS

RELATIONS = ("code", "code", "code", "number", "key", "price", "password", "secret", "value")
_STATEMENTS = (
    "The {r} of {t} is {v}.",
    "The {r} of {t} is {v}.",
    "The {r} of {t} is {v}.",
    "The {r} for {t} is {v}.",
    "The {t} {r} is {v}.",
    "Remember that the {r} of {t} is {v}.",
    "The {r} of the {t} is {v}.",
)
QUESTIONS = (
    "What is the {r} of {t}?",
    "What is the {r} of {t}?",
    "What is the {r} of the {t}?",
    "What is the {r} for {t}?",
    "What's the {r} of {t}?",
    "What is the {t} {r}?",
    "Tell me the {r} of {t}.",
    "Which {r} does {t} have?",
    "Give me the {r} of {t}.",
    "The {r} of {t}?",
)


@dataclass(frozen=True)
class Fact:
    relation: str
    thing: str
    value: str

    @property
    def key(self) -> str:
        return f"{self.thing}={self.value}"

    def put(self, template: str) -> str:
        return template.replace("{r}", self.relation).replace("{t}", self.thing).replace("{v}", self.value)


def fact_value(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.6:
        return number(rng, 4)
    if draw < 0.75:
        return number(rng, pick(rng, (2, 3, 5, 6)))
    if draw < 0.9:
        return pick(rng, WORDS)
    if draw < 0.94:
        return made_up_word(rng) + number(rng, 1 + int(rng.random() * 3))
    return f"{pick(rng, COLORS)}-{number(rng, 3)}"


def filler(rng: Random) -> str:
    """A sentence that states no fact of the kind asked for."""
    return pick(rng, _FILLERS)(rng)


_FILLERS: tuple[Callable[[Random], str], ...] = (
    lambda rng: f"The {pick(rng, ADJECTIVES)} {pick(rng, WORDS)} {pick(rng, VERBS)} the {pick(rng, WORDS)}.",
    lambda rng: f"A {pick(rng, COLORS)} {pick(rng, WORDS)} is {pick(rng, PLACES)}.",
    lambda rng: f"{pick(rng, NAMES)} {pick(rng, VERBS)} the {pick(rng, ADJECTIVES)} {pick(rng, ANIMALS)}.",
    lambda rng: f"{pick(rng, NAMES)} and {pick(rng, NAMES)} live in {pick(rng, CITIES)}.",
    lambda rng: f"It is {pick(rng, ADJECTIVES)} in {pick(rng, CITIES)} today.",
    lambda _rng: "There is nothing to see here.",
)


class FactBook:
    """A text of facts and filler of a given length. Things and values are random, so that nothing can be memorized."""

    def __init__(self, rng: Random, text_tokens: int, made_up: float = 0.0) -> None:
        self.rng = rng
        self.facts: list[Fact] = []
        kinds = rng.random()
        lines = rng.random() < 0.15
        filler_share = rng.random() * 0.9 if rng.random() < 0.7 else 0.0
        relation = pick(rng, RELATIONS) if rng.random() < 0.5 else ""
        statement = pick(rng, _STATEMENTS) if rng.random() < 0.5 else ""
        used: set[str] = set()
        sentences: list[str] = []
        tokens = 0
        while True:
            fact = None
            if not self.facts or lines or rng.random() >= filler_share:
                fact = Fact(relation or pick(rng, RELATIONS), self._thing(kinds, made_up), fact_value(rng))
            if fact is None or fact.thing in used:
                sentence = "" if lines else filler(rng)
            else:
                sentence = f"{fact.thing}: {fact.value}" if lines else fact.put(statement or pick(rng, _STATEMENTS))
            tokens += count_tokens(sentence) + 1 if lines else count_tokens(sentence)
            if self.facts and tokens > text_tokens:
                break
            if fact and fact.thing not in used:
                used.add(fact.thing)
                self.facts.append(fact)
            if sentence:
                sentences.append(sentence)
        self.text = ("\n" if lines else " ").join(sentences)

    def _thing(self, kinds: float, made_up: float) -> str:
        rng = self.rng
        if rng.random() < made_up:
            return made_up_word(rng)
        if kinds < 0.7:
            return pick(rng, WORDS)
        if kinds < 0.85:
            return f"{pick(rng, COLORS)} {pick(rng, WORDS)}"
        return pick(rng, NAMES)

    def question(self, fact: Fact) -> str:
        return vary(self.rng, fact.put(pick(self.rng, QUESTIONS)), keep=0.85)


def other_name(rng: Random) -> str:
    return pick(rng, NAMES) if rng.random() < 0.7 else made_up_word(rng).capitalize()


@dataclass(frozen=True)
class Personal:
    """Something a person says about themselves: how they say it, how they ask for it, and both answers."""

    tell: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    value: Callable[[Random], str]
    noted: str = phrases.NOTED


PERSONAL = (
    {
        "name": Personal(
            (*["My name is {}."] * 2, "I am {}.", "I'm {}.", "Call me {}.", "Hello, my name is {}.", "Hi, I am {}."),
            ("What is my name?", "What's my name?", "Who am I?", "Do you know my name?", "Do you remember my name?"),
            "Your name is {}.",
            other_name,
            "Nice to meet you, {}.",
        ),
        "city": Personal(
            ("I live in {}.", "My home is in {}.", "My city is {}."),
            ("Where do I live?", "In which city do I live?", "What is my city?"),
            "You live in {}.",
            lambda rng: pick(rng, CITIES) if rng.random() < 0.8 else made_up_word(rng).capitalize(),
        ),
        "age": Personal(
            ("I am {} years old.", "I'm {} years old.", "My age is {}."),
            ("How old am I?", "What is my age?", "What's my age?"),
            "You are {} years old.",
            lambda rng: number(rng, 2),
        ),
    }
    | {
        f"favorite {kind}": Personal(
            (f"My favorite {kind} is {{}}.", f"{{}} is my favorite {kind}."),
            (f"What is my favorite {kind}?", f"What's my favorite {kind}?", f"Which {kind} do I like best?"),
            f"Your favorite {kind} is {{}}.",
            value,
        )
        for kind, value in {
            "color": lambda rng: pick(rng, COLORS),
            "animal": lambda rng: pick(rng, ANIMALS),
            "fruit": lambda rng: pick(rng, FRUITS),
            "food": lambda rng: pick(rng, FOODS),
            "city": lambda rng: pick(rng, CITIES),
            "number": lambda rng: number(rng, pick(rng, (1, 2, 3, 4))),
        }.items()
    }
    | {
        f"my {animal}": Personal(
            (f"My {animal} is called {{}}.", f"My {animal}'s name is {{}}.", f"The name of my {animal} is {{}}."),
            (f"What is my {animal} called?", f"What is the name of my {animal}?", f"What is my {animal}'s name?"),
            f"Your {animal} is called {{}}.",
            other_name,
        )
        for animal in ("dog", "cat", "horse")
    }
)


def tell(rng: Random, slot: str, value: str) -> tuple[str, str]:
    """The user's statement and the model's reply."""
    personal = PERSONAL[slot]
    statement = vary(rng, pick(rng, personal.tell).format(value), keep=0.8)
    return statement, personal.noted.format(value)


def ask_personal(rng: Random, slot: str) -> str:
    while True:
        text = vary(rng, pick(rng, PERSONAL[slot].ask), keep=0.8)
        if is_new(text):
            return text
