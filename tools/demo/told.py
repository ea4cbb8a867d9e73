# ruff: noqa: E501
"""Facts that people state and ask for later, in their own words."""

from collections.abc import Callable
from random import Random

from weft.tools.demo import phrases
from weft.tools.demo.drawing import number, pick
from weft.tools.demo.example import Example, Message, user
from weft.tools.demo.facts import PERSONAL, fact_value, tell
from weft.tools.demo.fodder import code, word
from weft.tools.demo.wording import SLOTS, ask_for, patterns, spin
from weft.tools.demo.words import ANIMALS, COLORS, FRUITS, NAMES, OBJECTS, WORDS

_RELATIONS = (
    "code",
    "code",
    "number",
    "key",
    "price",
    "password",
    "secret",
    "value",
    "pin",
    "id",
    "address",
    "phone",
    "size",
    "date",
    "score",
)
_PLACES = (
    "room",
    "box",
    "locker",
    "door",
    "gate",
    "seat",
    "table",
    "house",
    "page",
    "item",
    "user",
    "order",
    "bus",
    "shelf",
)


def _thing(rng: Random, kind: int) -> str:
    if kind == 0:
        return f"{pick(rng, _PLACES)} {number(rng, pick(rng, (1, 1, 2, 2, 3)))}"
    if kind == 1:
        return f"{pick(rng, WORDS)}{int(rng.random() * pick(rng, (10, 100)))}"
    if kind == 2:
        return pick(rng, NAMES)
    if kind == 3:
        return f"the {pick(rng, WORDS)}"
    if kind == 4:
        return word(rng)
    return pick(rng, WORDS)


def _things(rng: Random, size: int) -> list[str]:
    """Things of one kind. Numbered things share a word, like the rooms of a house."""
    kind = int(rng.random() * 7)
    if kind < 2 and rng.random() < 0.8:
        base = pick(rng, _PLACES) + " " if kind == 0 else pick(rng, WORDS)
        first = int(rng.random() * 90)
        numbers = range(first, first + size) if rng.random() < 0.4 else rng.sample(range(200), size)
        return [f"{base}{n}" for n in numbers]
    return list(dict.fromkeys(_thing(rng, kind) for _ in range(size)))


_STYLES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("the {r} [of|for|to] {t} is {v}", "the {r} [of|for|to] {t} is {v}", "{t}'s {r} is {v}", "{t} has [the |]{r} {v}", "{v} is the {r} [of|for] {t}", "{t} {r} is {v}", "the {t} {r} is {v}"),
        patterns("""
? [what is|what's|what was|whats] the {b} [of|for|to] {a}[| again]
? [what is|what's|what was|whats] {a}'s {b}
? [which|what] {b} [does {a} have|has {a}|is for {a}|did i give for {a}|did i say for {a}|belongs to {a}|do i need for {a}|goes with {a}|did i tell you for {a}]
! [tell|give|remind] me [of |]the {b} [of|for] {a}[| again]
? do you [remember|know|still know|still have] the {b} [of|for|to] {a}
? what did i say the {b} [of|for] {a} [is|was]
: the {b} [of|for] {a}
= [and |]the {b} [of|for] {a}[|?]
= {a} {b}[|?]
"""),
    ),
    (
        ("{t}: {v}", "{t} is {v}", "{t} = {v}", "{t} - {v}", "{t} -> {v}", "{t} has {v}", "{t} gets {v}"),
        patterns("""
? [what is|what's|whats|what was|which is] {a}[| again]
? what [does {a} have|is the value of {a}|do we have for {a}|did i say for {a}|goes with {a}|is next to {a}|belongs to {a}]
! [tell|give] me {a}
= [and |]{a}[|?]
= [what about|how about|value of] {a}[|?]
"""),
    ),
    (
        ("{t} opens with {v}", "you open {t} with {v}", "to open {t} use {v}", "{v} opens {t}"),
        patterns("""
? [how do i|how can i|how to|what do i need to|with what do i|how would i|how do you] open {a}
? what opens {a}
? which [code|key|number|one] opens {a}
"""),
    ),
    (
        ("{t} costs {v}", "the price of {t} is {v}", "{t} is {v} dollars", "{t} was {v}", "you pay {v} for {t}", "{t}: {v}"),
        patterns("""
? how much [is|was|costs|does] {a}[| cost]
? [what does {a} cost|what is the price of {a}|what do i pay for {a}|what did {a} cost|how expensive is {a}]
= price of {a}[|?]
"""),
    ),
)  # fmt: skip

_BARE = (
    "password",
    "secret word",
    "secret",
    "code",
    "key",
    "pin",
    "door code",
    "magic number",
    "magic word",
    "token",
    "address",
    "phone number",
    "ticket number",
    "room number",
    "username",
    "answer",
    "flight number",
    "router password",
    "number",
    "meeting point",
    "wifi password",
    "passphrase",
)
_BARE_TELL = (
    "the {r} is {v}",
    "my {r} is {v}",
    "{r}: {v}",
    "our {r} is {v}",
    "the {r} for today is {v}",
    "{v} is the {r}",
    "[remember|note|keep in mind|save this|don't forget|listen]: the {r} is {v}",
    "please remember the {r} {v}",
    "the new {r} is {v}",
)
_BARE_ASK = patterns("""
? [what is|what's|what was|whats] [the|my|our] {b}[| again]
! [tell|give|remind] me [of |]the {b}
? do you [remember|know|still know] [the|my] {b}
? what did i say the {b} [is|was]
? which {b} did i [tell you|give you|mention|say]
= [and |][the|my] {b}[|?]
""")
_KEEP = (
    "remember this {r}: {v}",
    "remember the {r} {v}",
    "please remember {v}",
    "keep this {r} in mind: {v}",
    "keep {v} in mind",
    "remember {v} for me",
    "memorize {v}",
    "memorize this: {v}",
    "note this down: {v}",
    "don't forget {v}",
    "save this {r}: {v}",
    "here is a {r} to remember: {v}",
    "can you remember {v} for me?",
    "i will ask you for this later: {v}",
)
_KEEP_ASK = patterns("""
? [what|which {b}] did i [ask you to remember|tell you to remember|tell you before|give you|say|ask you to keep|mention|want you to remember]
? [what is|what's|what was] the {b}[| that i gave you| i told you| again| i asked you to remember| to remember]
? what [did you memorize|should you remember|were you asked to remember|do you remember|was it|was it again]
? do you [still know|remember|still remember] [the {b}|it|what i told you|my {b}]
! [tell|give] me the {b}[| again| that you remember| from before]
""")
_OWN = (
    "{t} has {v}",
    "{t} owns {v}",
    "{t} bought {v}",
    "{v} belongs to {t}",
    "{t} got {v}",
    "{t} likes {v}",
    "{t} took {v}",
)
_OWN_ASK = {
    "has": ("who has {}", "who's got {}", "which person has {}", "who has got {}"),
    "owns": ("who owns {}", "who is the owner of {}", "who has {}"),
    "bought": ("who bought {}", "who has bought {}"),
    "belongs": ("who owns {}", "who does {} belong to", "whose is {}", "who has {}"),
    "got": ("who got {}", "who has {}"),
    "likes": ("who likes {}", "which one likes {}"),
    "took": ("who took {}", "who has {}", "who has taken {}"),
}
_OWN_WHAT = (
    "what does {a} have",
    "what does {a} own",
    "what did {a} buy",
    "what does {a} have",
    "what did {a} get",
    "what does {a} like",
    "what did {a} take",
)

_WIDE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "name": (
        ("[hi |hello |hey |hi, |hello, |hey there, |]i'm {}", "[hi |hello |]im {}", "[hi |hey |]i am {}", "my name's {}", "they call me {}", "{} is my name", "you can call me {}", "[hi|hello], {} here", "people call me {}", "this is {}", "please call me {}", "my name is {}", "i am called {}", "the name is {}"),
        patterns("""
? [what is|what's] my name[| again]
? [what am i called|how am i called|what do people call me|who am i|who am i again|what did i say my name is|what did i say my name was|what name did i tell you|what name did i give you|what should you call me|which name do i have]
? do you [remember|know|still know|still remember] [my name|who i am|what my name is|what i am called|how i am called]
! [tell me my name|say my name|remind me of my name|tell me who i am]
= [my name|and my name|who am i][|?]
"""),
    ),
    "city": (
        ("i live in {}", "i'm living in {}", "my home is {}", "i am from {}", "i come from {}", "i'm from {}", "i moved to {}", "my house is in {}", "i have a flat in {}", "home for me is {}"),
        patterns("""
? [where do i live|where am i from|where is my home|where do i come from|what city do i live in|which city do i live in|where did i say i live|which city am i from|which city is my home|where am i living|what is my home city|where is my house]
? do you [remember|know] [where i live|where i am from|my city|where i come from]
! [tell me where i live|tell me my city|remind me where i live]
= [my city|and where do i live][|?]
"""),
    ),
    "age": (
        ("i am {} years old", "i'm {} years old", "i am {}", "i'm {}", "my age is {}", "i turned {} this year", "i just turned {}", "i'm {} by the way", "i am {} years of age", "im {} years old"),
        patterns("""
? [how old am i|what is my age|what's my age|how many years old am i|what age am i|how old did i say i was|what age did i tell you|how old did i tell you i am|how many years am i]
? do you [remember|know] [how old i am|my age|what age i am]
! [tell me my age|tell me how old i am|say my age]
= [my age|and my age][|?]
"""),
    ),
}  # fmt: skip
for _kind in ("color", "animal", "fruit", "food", "city", "number"):
    _names = f"[{_kind}|colour]" if _kind == "color" else _kind
    _WIDE[f"favorite {_kind}"] = (
        (f"my [favorite|favourite] {_names} is {{}}", f"my [favorite|favourite] {_names} is {{}}", f"the {_names} i like [best|most] is {{}}", f"i like {{}} best of all {_names}s", f"{{}} is my [favorite|favourite] {_names}", f"as for {_names}s, i like {{}} most"),
        patterns(f"""
? [what is|what's|which is|whats] my [favorite|favourite] {_names}
? [which|what] {_names} [do i like best|do i prefer|is my favorite|is my favourite|do i love most|do i like the most|did i say i like best]
? do you [remember|know] [my [favorite|favourite] {_names}|which {_names} i like best]
! tell me my [favorite|favourite] {_names}
= my [favorite|favourite] {_names}[|?]
"""),
    )  # fmt: skip
for _kind in ("dog", "cat", "horse"):
    _WIDE[f"my {_kind}"] = (
        (f"my {_kind} is called {{}}", f"my {_kind}'s name is {{}}", f"i have a {_kind} [named|called] {{}}", f"[and |]my {_kind} is named {{}}", f"{{}} is my {_kind}", f"the name of my {_kind} is {{}}", f"we call our {_kind} {{}}", f"i call my {_kind} {{}}", f"there is also my {_kind} {{}}"),
        patterns(f"""
? [what is|what's|whats] [my|the name of my|the name of the] {_kind}[ called|'s name|]
? [how is my {_kind} called|how do i call my {_kind}|what do i call my {_kind}|which name has my {_kind}|who is my {_kind}|what name did i give my {_kind}]
? do you [remember|know] [the name of my {_kind}|my {_kind}'s name|how my {_kind} is called]
! tell me [the name of my {_kind}|my {_kind}'s name]
= [my|and my] {_kind}'s name[|?]
"""),
    )  # fmt: skip


def _value(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.5:
        return fact_value(rng)
    if draw < 0.65:
        return number(rng, 1 + int(rng.random() * 5))
    if draw < 0.85:
        return code(rng)
    return word(rng)


def _sentence(text: str, careful: bool) -> str:
    return text[0].upper() + text[1:] if careful else text


def _state(rng: Random, template: str, **parts: str) -> str:
    text = spin(rng, template)
    for name, value in parts.items():
        text = text.replace("{" + name + "}", value)
    return text


Told = tuple[list[str], str, str]
"""Statements, the question, its answer."""


def _facts(rng: Random) -> Told:
    style = pick(rng, (0, 0, 0, 1, 2, 3))
    tells, asks = _STYLES[style]
    relation = pick(rng, _RELATIONS)
    things = _things(rng, 1 + int(rng.random() ** 2 * 9))
    values = [number(rng, pick(rng, (1, 2, 3, 4))) if style == 3 else _value(rng) for _ in things]
    one = pick(rng, tells)
    at = int(rng.random() * len(things))
    careful = rng.random() < 0.5
    told = []
    for i, (thing, value) in enumerate(zip(things, values, strict=True)):
        if style == 0 and i == 1 and i != at and "[of" in one and rng.random() < 0.3:
            text = f"and the one for {thing} is {value}"
        else:
            text = _state(rng, one, r=relation, t=thing, v=value)
        told.append(_sentence(text, careful and not one.startswith("{v}")))
    return told, ask_for(rng, pick(rng, asks), "", things[at], relation), values[at]


def _bare(rng: Random) -> Told:
    relations = rng.sample(_BARE, 1 + int(rng.random() * 3))
    values = [_value(rng) for _ in relations]
    at = int(rng.random() * len(relations))
    careful = rng.random() < 0.5
    told = []
    for relation, value in zip(relations, values, strict=True):
        one = pick(rng, _BARE_TELL)
        told.append(_sentence(_state(rng, one, r=relation, v=value), careful and not one.startswith("{v}")))
    return told, ask_for(rng, pick(rng, _BARE_ASK), "", "", relations[at]), values[at]


def _kept(rng: Random) -> Told:
    draw = rng.random()
    if draw < 0.6:
        kind, value = "number", number(rng, 1 + int(rng.random() * 6))
    elif draw < 0.8:
        kind, value = "word", word(rng)
    else:
        kind, value = "code", code(rng)
    told = _sentence(_state(rng, pick(rng, _KEEP), r=kind, v=value), rng.random() < 0.5)
    return [told], ask_for(rng, pick(rng, _KEEP_ASK), "", "", kind), value


def _owners(rng: Random) -> Told:
    owners = rng.sample(NAMES, 1 + int(rng.random() * 4))
    noun = pick(rng, (*ANIMALS, *OBJECTS))
    if rng.random() < 0.5:
        owned = [f"the {color} {noun}" for color in rng.sample(COLORS, len(owners))]
    else:
        owned = [f"the {thing}" for thing in rng.sample((*ANIMALS, *OBJECTS, *FRUITS), len(owners))]
    form = int(rng.random() * len(_OWN))
    told = [_state(rng, _OWN[form], t=owner, v=thing) for owner, thing in zip(owners, owned, strict=True)]
    told = [_sentence(text, True) for text in told]
    at = int(rng.random() * len(owners))
    if rng.random() < 0.7:
        verb = _OWN[form].split()[1]
        return told, ask_for(rng, f"? {pick(rng, _OWN_ASK[verb])}", owned[at]), owners[at]
    return told, ask_for(rng, f"? {_OWN_WHAT[form]}", "", owners[at]), owned[at]


def personal_wide(rng: Random, slot: str, value: str) -> tuple[str, str]:
    """A statement in people's own words and the model's reply."""
    if rng.random() < 0.25:
        return tell(rng, slot, value)
    text = spin(rng, pick(rng, _WIDE[slot][0]))
    draw = rng.random()
    if draw < 0.5:
        text = text[0].upper() + text[1:]
    if draw < 0.35 or draw > 0.9:
        text += "."
    text = text.replace(SLOTS["{}"], value)
    if rng.random() < 0.06:
        text += pick(rng, (" by the way", " btw", ", just so you know", ". Remember that.", " :)"))
    return text, PERSONAL[slot].noted.format(value)


def ask_personal_wide(rng: Random, slot: str) -> str:
    return ask_for(rng, pick(rng, _WIDE[slot][1]))


_FACT_KINDS: tuple[Callable[[Random], Told], ...] = (_facts, _facts, _facts, _bare, _kept, _owners)


def told(rng: Random, between: Callable[[Random], Example], personal: bool = True) -> Example:
    """Facts in one message or over several turns, with other turns in between, and a question on one of them."""
    messages: list[Message] = []
    if personal and rng.random() < 0.25:
        return _two_about_me(rng, messages, between)
    statements, question, answer = pick(rng, _FACT_KINDS)(rng)
    by = pick(rng, (". ", ". ", ". ", "\n", ", ", "; ", " and ")) if len(statements) > 1 else ". "
    if rng.random() < 0.5:
        text = by.join(statements)
        end = "\n" if by == "\n" else ". "
        messages = [user(f"{text}{end}{question}")]
        if rng.random() < 0.1:
            messages = [user(f"{question}\n{text}")]
    else:
        turns = [by.join(statements)] if rng.random() < 0.6 else statements[:4]
        if answer not in " ".join(turns):
            turns = [by.join(statements)]
        for turn in turns:
            messages += [user(turn + pick(rng, ("", "."))), {"role": "assistant", "content": phrases.NOTED}]
            if rng.random() < 0.25:
                _insert(messages, between(rng))
        messages.append(user(question))
    return Example("told", messages, answer, " | ".join(message["content"] for message in messages))


def _insert(messages: list[Message], example: Example) -> None:
    messages += [*example.messages, {"role": "assistant", "content": example.answer}]


def _two_about_me(rng: Random, messages: list[Message], between: Callable[[Random], Example]) -> Example:
    slots = rng.sample(tuple(_WIDE), 1 + int(rng.random() * 3))
    values = {slot: PERSONAL[slot].value(rng) for slot in slots}
    slot = pick(rng, slots)
    if rng.random() < 0.2 and len(slots) > 1:
        first, second = slots[:2]
        statement, reply = personal_wide(rng, first, values[first])
        more, _ = personal_wide(rng, second, values[second])
        if first != "name" and second == "name":
            reply = PERSONAL["name"].noted.format(values["name"])
        slot = pick(rng, (first, second))
        messages += [
            user(f"{statement.rstrip('.')}{pick(rng, (' and ', '. ', ', '))}{more}"),
            {"role": "assistant", "content": reply},
        ]
    else:
        for one in slots:
            statement, reply = personal_wide(rng, one, values[one])
            messages += [user(statement), {"role": "assistant", "content": reply}]
    if rng.random() < 0.4:
        _insert(messages, between(rng))
    if rng.random() < 0.08:
        other = pick(rng, [name for name in _WIDE if name not in slots])
        messages.append(user(ask_personal_wide(rng, other)))
        answer = phrases.NOT_TOLD
    else:
        messages.append(user(ask_personal_wide(rng, slot)))
        answer = PERSONAL[slot].answer.format(values[slot])
    return Example("told", messages, answer, " | ".join(message["content"] for message in messages))
