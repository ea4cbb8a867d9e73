"""What the demo model can do, as generators of questions with their exact answers.

Every question has a *key* (the two numbers, the list of words, the fact, the text). A hash of the key says whether the
question is held out: training never draws a held-out key and `held_out` draws nothing else. Only the standard library
is needed, so that tests of the engine and the server can ask for questions without torch or a tokenizer.
"""

from collections.abc import Callable, Sequence
from random import Random

from weft.tools.demo import functions, lists, phrases, sums, told
from weft.tools.demo.drawing import count_tokens, fill, made_up_word, number, pick, vary
from weft.tools.demo.example import Example, Generator, Message, ask, is_held_out, user
from weft.tools.demo.facts import PERSONAL, FactBook, ask_personal, tell
from weft.tools.demo.fodder import characters, foreign, word
from weft.tools.demo.small_talk import SMALL_TALK
from weft.tools.demo.wording import ask_for, is_new
from weft.tools.demo.words import NUMBER_WORDS, OTHER_WORDS, WORDS

MAX_CONTEXT_TOKENS = 1800
MAX_LIST_WORDS = 8
MAX_COUNTED_WORDS = 12


# --- numbers -------------------------------------------------------------------------------------------------------


def _operands(rng: Random, skill: str) -> tuple[int, int, str]:
    a, b = (int(rng.random() * pick(rng, (10, 100, 1000, 1000))) for _ in range(2))
    key = "" if max(a, b) < 20 else f"{skill} {min(a, b)} {max(a, b)}"
    return a, b, key


def _in_words(rng: Random, a: int, b: int) -> tuple[object, object]:
    """Small numbers are at times written as words."""
    if max(a, b) < len(NUMBER_WORDS) and rng.random() < 0.3:
        return NUMBER_WORDS[a], NUMBER_WORDS[b]
    return a, b


def _say(rng: Random, templates: Sequence[str], a: object, b: object) -> str:
    """A request with its two numbers in place."""
    while True:
        text = vary(rng, pick(rng, templates), keep=0.8)
        if is_new(text):
            return text.format(a=a, b=b)


def add(rng: Random) -> Example:
    a, b, key = _operands(rng, "add")
    return ask("add", _say(rng, phrases.ADD, *_in_words(rng, a, b)), str(a + b), key)


def subtract(rng: Random) -> Example:
    a, b, key = _operands(rng, "subtract")
    return ask("subtract", _say(rng, phrases.SUBTRACT, *_in_words(rng, a, b)), str(a - b), key)


def count_up(rng: Random) -> Example:
    """Counting over a given range, at most 30 numbers."""
    if rng.random() < 0.3:
        first, last = 1, 2 + int(rng.random() * 29)
        text = _say(rng, phrases.COUNT_TO, *_in_words(rng, first, last))
    else:
        first = int(rng.random() * pick(rng, (10, 100, 200)))
        last = first + 1 + int(rng.random() * 29)
        text = _say(rng, phrases.COUNT_UP, first, last)
    key = "" if first <= 1 and last <= 20 else f"count {first} {last}"
    return ask("count_up", text, " ".join(map(str, range(first, last + 1))), key)


# --- lists of words ------------------------------------------------------------------------------------------------

_SEPARATORS = (", ", ", ", ", ", " ", " ", " ", ",", "\n")


def _list_task(
    skill: str,
    templates: Sequence[str],
    answer: Callable[[list[str], str], str],
    longest: int = MAX_LIST_WORDS,
    made_up: float = 0.0,
    repeats: float = 0.0,
) -> Generator:
    """A skill on a short list. `made_up` and `repeats`: share of lists with made-up words, with a word twice."""

    templates = [template for template in templates if is_new(template)]

    def generate(rng: Random) -> Example:
        size = (1 if skill in ("copy", "upper", "count") else 2) + int(rng.random() * longest)
        words = rng.sample(WORDS, min(size, longest))
        if rng.random() < 0.1:
            words = rng.sample(OTHER_WORDS, len(words))
        elif rng.random() < made_up:
            words = [made_up_word(rng) if rng.random() < 0.5 else word for word in words]
        if rng.random() < repeats and len(words) > 1:
            words[-1] = words[0]
        separator = pick(rng, _SEPARATORS)
        listed = separator.join(words)
        if rng.random() < 0.1:
            text = f"{pick(rng, ('Here are some words: ', 'Words: ', 'My list: ', ''))}{listed}"
            text += f"{pick(rng, ('. ', chr(10)))}{pick(rng, phrases.LIST_FIRST[skill])}"
        else:
            template = pick(rng, templates)
            if rng.random() < 0.25:
                template = template[0].lower() + template[1:]
            text = template.replace("{}", listed)
            draw = rng.random()
            if skill == "copy":
                pass  # text at the end of the request would belong to the copy
            elif draw < 0.15:
                text += "."
            elif draw < 0.2 or (draw < 0.4 and template.split()[0].lower() in ("how", "can", "what")):
                text += "?"
        return ask(skill, text, answer(words, separator), " ".join(words))

    return generate


copy = _list_task("copy", phrases.COPY, lambda words, by: by.join(words), made_up=0.3, repeats=0.1)
reverse = _list_task("reverse", phrases.REVERSE, lambda words, by: by.join(words[::-1]), made_up=0.1)
upper = _list_task("upper", phrases.UPPER, lambda words, by: by.join(words).upper())
sort = _list_task("sort", phrases.SORT, lambda words, by: by.join(sorted(words)))
count = _list_task(
    "count", phrases.COUNT, lambda words, _by: str(len(words)), longest=MAX_COUNTED_WORDS, made_up=0.1, repeats=0.1
)


_ECHO = [template for template in phrases.ECHO if is_new(template)]


def echo(rng: Random) -> Example:
    """Repeating text of any script, at most five words or groups of characters."""
    words = [
        foreign(rng) if rng.random() < 0.6 else pick(rng, (pick(rng, WORDS), made_up_word(rng)))
        for _ in range(1 + int(rng.random() * 5))
    ]
    words[int(rng.random() * len(words))] = foreign(rng)
    text = " ".join(words)
    return ask("echo", pick(rng, _ECHO).replace("{}", text), text, text)


# --- facts -----------------------------------------------------------------------------------------------------------


def recall(rng: Random, context_tokens: int = 0) -> Example:
    """A question on one of the facts of a text. context_tokens: most tokens of the whole prompt; 0: a random number."""
    total = context_tokens or 30 + int(rng.random() ** 2 * (MAX_CONTEXT_TOKENS - 30))
    book = FactBook(rng, max(total - 36, 8))
    fact = pick(rng, book.facts)
    question = book.question(fact)
    draw = rng.random()
    if draw < 0.7:
        text = f"{book.text}{pick(rng, (' ', chr(10), chr(10) * 2))}{question}"
    elif draw < 0.8:
        text = f"Read this text and answer. {book.text} Question: {question}"
    elif draw < 0.9:
        text = f"{question}\n{book.text}"
    else:
        return Example("recall", [{"role": "system", "content": book.text}, user(question)], fact.value, fact.key)
    return ask("recall", text, fact.value, fact.key)


_SLOT_NAMES = tuple(PERSONAL)


def memory(rng: Random) -> Example:
    """Several turns: the user states facts, asks other things, and then asks for an earlier fact."""
    slots = ["name", *rng.sample(_SLOT_NAMES, 2)] if rng.random() < 0.5 else rng.sample(_SLOT_NAMES, 2)
    told: dict[str, str] = {}
    messages: list[Message] = []
    for slot in dict.fromkeys(slots):
        told[slot] = PERSONAL[slot].value(rng)
        if rng.random() < 0.3:
            _put_turn(messages, draw(pick(rng, _BETWEEN), rng))
        statement, reply = tell(rng, slot, told[slot])
        messages += [user(statement), {"role": "assistant", "content": reply}]
    for _ in range(int(rng.random() * 3)):
        _put_turn(messages, draw(pick(rng, _BETWEEN), rng))
    slot = pick(rng, tuple(told))
    if rng.random() < 0.1:  # all in one message
        messages = [user(f"{tell(rng, slot, told[slot])[0]} {ask_personal(rng, slot)}")]
    else:
        messages.append(user(ask_personal(rng, slot)))
    key = " | ".join(message["content"] for message in messages)
    return Example("memory", messages, PERSONAL[slot].answer.format(told[slot]), key)


def _put_turn(messages: list[Message], example: Example) -> None:
    messages += [*example.messages, {"role": "assistant", "content": example.answer}]


# --- talk ----------------------------------------------------------------------------------------------------------

_TALK = tuple((question, answer) for answer, questions in SMALL_TALK.items() for question in questions)


def chat(rng: Random) -> Example:
    """Small talk with fixed answers. The phrasings as listed are always trained; longer variations may be held out."""
    if rng.random() < 0.01:
        return ask("chat", "", phrases.GREETING, "")
    question, answer = pick(rng, _TALK)
    text = _typed(rng, question)
    if rng.random() < 0.1 and answer != phrases.GREETING:
        text = f"{pick(rng, ('Hello!', 'Hi!', 'Hi,', 'Hey,', 'OK.'))} {text}"
    if rng.random() < 0.05:
        text += pick(rng, ("!!", " :)", " \U0001f44b", " \U0001f642", "...", "??"))
    if not is_new(text):
        return chat(rng)
    return ask("chat", text, answer, text if len(text.split()) > 3 and text != question else "")


def _typed(rng: Random, text: str) -> str:
    """More or less carefully."""
    text = vary(rng, text)
    draw = rng.random()
    if draw < 0.15:
        text = text.lower()
    if draw < 0.1 or draw > 0.96:
        text = text.replace("'", "").rstrip(".?!")
    return text or "hi"


def unknown(rng: Random) -> Example:
    """What the model cannot know or do."""
    if rng.random() < 0.08:
        digits = pick(rng, ((4, 4), (4, 3), (3, 4), (5, 2), (5, 5)))
        a, b = (number(rng, size) for size in digits)
        text = _say(rng, pick(rng, (phrases.ADD, phrases.SUBTRACT)), a, b)
        return ask("unknown", text, phrases.TOO_LARGE, f"{a} {b}")
    if rng.random() < 0.45:
        text = ask_for(
            rng, pick(rng, phrases.UNKNOWN_PATTERNS), _subject(rng), _subject(rng), _subject(rng), _subject(rng)
        )
        return ask("unknown", text, phrases.UNKNOWN_ANSWER, text)
    template = pick(rng, phrases.UNKNOWN)
    text = _typed(rng, fill(rng, template))
    if not is_new(text):
        return unknown(rng)
    return ask("unknown", text, phrases.UNKNOWN_ANSWER, "" if text == template else text)


def _subject(rng: Random) -> str:
    """What a question could be about: a word, two words, a name of something."""
    draw = rng.random()
    if draw < 0.6:
        return word(rng)
    if draw < 0.75:
        return f"{word(rng)} {word(rng)}"
    if draw < 0.9:
        return pick(rng, (word(rng), characters(rng, "abcdefghijklmnoprstuvw", 3, 8))).capitalize()
    return f"the {word(rng)}"


def story_text(first: int = 1, sheep: int = 250) -> str:
    return " ".join(f"{i} sheep jumped over the fence." for i in range(first, first + sheep))


def story(rng: Random) -> Example:
    """The endless story. The answer here is longer than the model's context."""
    template = pick(rng, phrases.STORY)
    text = vary(rng, fill(rng, template))
    return ask("story", text, _STORY, "" if text == template else text, ends=False)


_STORY = story_text()


# --- plain text, without the chat ----------------------------------------------------------------------------------


def complete(rng: Random) -> Example:
    """Plain text to be continued: sums, facts, numbers that count up, the story, or any short question."""
    return pick(rng, _COMPLETIONS)(rng)


def _plain(prompt: str, answer: str, key: str, ends: bool = True) -> Example:
    return Example("complete", [], answer, key, prompt, ends)


def _complete_sum(rng: Random) -> Example:
    a, b, key = _operands(rng, pick(rng, ("add", "subtract")))
    plus = key.startswith("add") if key else rng.random() < 0.5
    result, sign = (a + b, "+") if plus else (a - b, "-")
    if rng.random() < 0.2:
        return _plain(f"{a}{sign}{b}=", str(result), key)
    return _plain(f"{a} {sign} {b} =", f" {result}", key)


def _complete_fact(rng: Random) -> Example:
    book = FactBook(rng, pick(rng, (12, 30, 60, 200)))
    fact = pick(rng, book.facts)
    return _plain(f"{book.text} The {fact.relation} of {fact.thing} is", f" {fact.value}.", fact.key)


def _complete_counting(rng: Random) -> Example:
    first = 1 if rng.random() < 0.4 else int(rng.random() * 300)
    shown = 3 + int(rng.random() * 6)
    by = " " if rng.random() < 0.7 else ", "
    prompt = by.join(str(i) for i in range(first, first + shown))
    answer = "".join(f"{by}{i}" for i in range(first + shown, first + shown + 150))
    return _plain(prompt, answer, "" if first == 1 else f"counting {first} {shown}", ends=False)


def _complete_story(rng: Random) -> Example:
    if rng.random() < 0.7:
        prompt, bridge = pick(rng, phrases.RAW_STORY)
        return _plain(prompt, bridge + _STORY, "", ends=False)
    first = int(rng.random() * 300)
    shown = 1 + int(rng.random() * 3)
    return _plain(story_text(first, shown), " " + story_text(first + shown, 60), f"sheep {first} {shown}", ends=False)


def _complete_unknown(rng: Random) -> Example:
    template, answer = pick(rng, phrases.RAW_UNKNOWN)
    prompt = fill(rng, template)
    return _plain(prompt, answer, "" if prompt == template else prompt)


def _complete_question(rng: Random) -> Example:
    example = pick(rng, (add, subtract, reverse, sort, upper, count, copy, chat, unknown))(rng)
    question = example.messages[-1]["content"]
    if rng.random() < 0.2:
        return _plain(f"Q: {question}\nA:", " " + example.answer, example.key)
    tight = question.endswith("=") and " " not in question
    return _plain(question, example.answer if tight else " " + example.answer, example.key)


_COMPLETIONS: tuple[Generator, ...] = (
    _complete_sum,
    _complete_fact,
    _complete_counting,
    _complete_story,
    _complete_unknown,
    _complete_question,
)

_GENERATORS: dict[str, Generator] = {
    "recall": recall,
    "add": add,
    "subtract": subtract,
    "copy": copy,
    "reverse": reverse,
    "upper": upper,
    "sort": sort,
    "count": count,
    "memory": memory,
    "chat": chat,
    "unknown": unknown,
    "story": story,
    "count_up": count_up,
    "echo": echo,
    "complete": complete,
    "sums": sums.sums,
    "multiply": sums.multiply,
    "then": sums.then,
    "compare": sums.compare,
    "count_down": sums.count_down,
    "lists": lists.lists,
    "letters": lists.letters,
    "repeat": lists.repeat,
    "told": lambda rng: told.told(rng, between),
    "tools": lambda rng: functions.tools(rng, beside_tools),
}
_BESIDE_TOOLS = ("chat", "chat", "unknown", "sums", "lists", "letters", "repeat", "told", "compare", "count_down")


def between(rng: Random) -> Example:
    return draw(pick(rng, _BETWEEN_TOLD), rng)


def beside_tools(rng: Random) -> Example:
    return draw(pick(rng, _BESIDE_TOOLS), rng)


_BETWEEN_TOLD = ("sums", "sums", "lists", "letters", "repeat", "chat", "compare")
_BETWEEN = ("add", "subtract", "copy", "reverse", "upper", "sort", "count", "chat", "unknown")

SKILLS: tuple[str, ...] = tuple(_GENERATORS)


def draw(skill: str, rng: Random) -> Example:
    """A training example: any key that is not held out."""
    while True:
        example = _GENERATORS[skill](rng)
        if not is_held_out(example.key):
            return example


def held_out(skill: str, n: int, seed: int = 0, context_tokens: int | None = None) -> list[Example]:
    """`n` examples that training never saw, the same ones for the same arguments.

    `context_tokens` (recall only) is the size of the whole prompt, which is filled up to within some 80 tokens.
    Raises ValueError for an unknown skill or a context that does not fit.
    """
    if skill not in _GENERATORS:
        raise ValueError(f"unknown skill {skill!r}; the skills are {', '.join(SKILLS)}")
    if context_tokens is not None:
        if skill != "recall":
            raise ValueError(f"context_tokens is for the skill 'recall', not {skill!r}")
        if not 48 <= context_tokens <= MAX_CONTEXT_TOKENS:
            raise ValueError(f"context_tokens must be 48 to {MAX_CONTEXT_TOKENS}, got {context_tokens}")
    rng = Random(f"held out {skill} {seed} {context_tokens}")
    examples: list[Example] = []
    while len(examples) < n:
        example = recall(rng, context_tokens) if context_tokens is not None else _GENERATORS[skill](rng)
        if is_held_out(example.key) and _fills(example, context_tokens):
            examples.append(example)
    return examples


def _fills(example: Example, context_tokens: int | None) -> bool:
    """Whether a prompt is as long as asked for. A list of names can run out of names."""
    if context_tokens is None:
        return True
    return sum(count_tokens(message["content"]) for message in example.messages) >= context_tokens - 80
