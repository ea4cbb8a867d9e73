"""Prompts of real tasks for measuring speculation: edits, extraction, summaries, questions, chat, and hostile ones.

Random tokens would measure nothing: a draft is right because texts repeat themselves.
"""

from __future__ import annotations

import random
from itertools import cycle, islice

_INVENTORY = '''
class Inventory:
    """Counts items by name."""

    def __init__(self):
        self.counts = {}

    def add(self, name, number):
        if number < 0:
            raise ValueError("number must not be negative")
        self.counts[name] = self.counts.get(name, 0) + number

    def remove(self, name, number):
        if number < 0:
            raise ValueError("number must not be negative")
        if self.counts.get(name, 0) < number:
            raise ValueError("there are not enough items")
        self.counts[name] = self.counts[name] - number

    def total(self):
        return sum(self.counts.values())
'''
_PARSER = """
def parse_line(line):
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    name, _, value = line.partition("=")
    if not value:
        raise ValueError("a line must have the form name=value")
    return name.strip(), value.strip()


def read_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            parsed = parse_line(line)
            if parsed is not None:
                name, value = parsed
                settings[name] = value
    return settings
"""
_QUEUE = """
def push(heap, item):
    heap.append(item)
    place = len(heap) - 1
    while place > 0:
        parent = (place - 1) // 2
        if heap[parent] <= heap[place]:
            break
        heap[parent], heap[place] = heap[place], heap[parent]
        place = parent


def pop(heap):
    last = heap.pop()
    if not heap:
        return last
    first, heap[0] = heap[0], last
    place = 0
    while 2 * place + 1 < len(heap):
        child = 2 * place + 1
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if heap[place] <= heap[child]:
            break
        heap[place], heap[child] = heap[child], heap[place]
        place = child
    return first
"""
_REPORT = """
def average(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def report(values):
    print("number of values:", len(values))
    print("average:", average(values))
    print("median:", median(values))
"""
_CODE = (_INVENTORY, _PARSER, _QUEUE, _REPORT)
_EDITS = (
    "Add a docstring to each function that lacks one. Print the complete code.",
    "Rename the variable `value` to `amount` everywhere and print the complete code.",
    "Raise TypeError instead of ValueError and print the complete code again.",
    "Add type annotations to all functions. Give the whole file back.",
)

_HARBOUR = """\
The old harbour of the town was built in 1871, when the railway reached the coast. For forty years it was \
the busiest port of the region. Ships brought coal and timber, and they left with salt, wool and barrels of \
herring. The railway company owned the two long piers and the cranes, while the town owned the lighthouse \
and the fish market. In 1912 a storm destroyed the northern pier. The company decided not to rebuild it, \
because larger ships had begun to use the deep harbour twenty miles to the south. Trade fell every year \
after that. By 1930 only fishing boats used the old harbour, and the cranes were sold for scrap. Today the \
southern pier is a museum. It shows the tools of the dockers, the logbooks of the harbour master, and a \
model of the port as it was in 1900. The museum is run by forty volunteers and opens from April to October. \
Last year it had 23,000 visitors, more than ever before, and the town plans to restore one of the warehouses \
as a school for boat builders."""
_BEES = """\
A colony of honey bees has one queen, some hundred drones and up to sixty thousand workers. The queen lays \
about fifteen hundred eggs a day in early summer. A worker lives for six weeks in summer. In her first days \
she cleans cells, then she feeds larvae, builds comb, guards the entrance, and in the last two weeks of her \
life she collects nectar and pollen. Workers that hatch in autumn live for up to six months, because they do \
not raise larvae. In winter the bees form a cluster around the queen and keep its centre at about twenty- \
five degrees. They burn honey for this: a colony eats ten to fifteen kilograms of honey in a winter. A \
beekeeper who takes too much honey must feed the colony with sugar. In spring the queen begins to lay again, \
and when the hive is crowded the old queen leaves with half of the workers. This is called a swarm. The bees \
that stay raise a new queen from one of the youngest larvae, which they feed with royal jelly only."""
_CACHE = """\
The server keeps recent answers in a cache. An answer is kept for ten minutes, or until the memory of the \
cache is full. When the memory is full, the answer that was not used for the longest time is removed first. \
The size of the cache is set with the option cache-size, in megabytes; the default is 256. A size of 0 turns \
the cache off. The option cache-time sets how many seconds an answer is kept. Answers to requests with a \
password are never kept. The page /status shows how many requests were answered from the cache. If fewer \
than one in ten are, the cache is probably too small, or the requests are all different. A restart empties \
the cache. To empty it without a restart, send the signal HUP to the server; open requests are not affected. \
Two servers do not share a cache, so behind a balancer each of them has to be asked once before an answer is \
fast."""
_GARDEN = """\
Anna and her brother Paul inherited a garden from their aunt. It lies on a slope above the river and has \
twelve apple trees, a small greenhouse and a shed. In the first year they only cut the grass, because \
neither of them knew anything about fruit. In the second year a neighbour, Mr. Winter, showed them how to \
prune the trees. He came every Saturday in February and would not take money for it, so they gave him a \
third of the apples in autumn. In the third year they built a fence against the deer, and Paul repaired the \
greenhouse. Now they grow tomatoes, beans and pumpkins as well. Anna sells some of the fruit at the market \
in town, which pays for tools and seeds. Paul makes cider in the cellar. Last October they invited the whole \
street to a party in the garden. Mr. Winter, who is eighty now, made a speech about their aunt, whom he had \
known since school."""
_TEXTS = (_HARBOUR, _BEES, _CACHE, _GARDEN)
_QUESTIONS = (
    "What happened in 1912, and what followed from it? Quote the text.",
    "What do workers do in the order of their age? Use the words of the text.",
    "Which options are mentioned and what do they do?",
    "Who is Mr. Winter and what did he do? Quote the relevant sentences.",
)
_PEOPLE = (
    ("Ruth Adler", "Bergen", "carpenter"), ("Tom Baker", "Leeds", "librarian"), ("Lin Chen", "Taipei", "pilot"),
    ("Eva Duarte", "Lisbon", "chemist"), ("Sami Haddad", "Amman", "baker"), ("Nora Kelly", "Cork", "surgeon"),
)  # fmt: skip
_CHATS = (
    "How can I sleep better when it is hot at night?",
    "Write a short story about a clockmaker who repairs a clock that runs backwards.",
    "Explain to a child how a rainbow is made.",
    "My friend forgot my birthday and I am sad about it. What should I do?",
    "What should I pack for a week of hiking in the mountains?",
    "Write a polite email to ask a colleague for a missing report.",
)
_LANGUAGES = (
    "Erzähle eine kurze Geschichte über einen Fuchs und einen Raben.",
    "Écris une lettre à un ami qui part en voyage.",
    "用中文介绍一下长城的历史。",
    "Напиши несколько предложений о зиме в деревне.",
    "日本の四季について短く説明してください。",
    "اكتب فقرة قصيرة عن البحر.",
)


def _json(at: int) -> str:
    people = _PEOPLE[at % 6 :] + _PEOPLE[: at % 6]
    facts = " ".join(
        f"{n} lives in {c}, works as a {j} and is {29 + 3 * i + at}." for i, (n, c, j) in enumerate(people)
    )
    return (
        f"Text: {facts}\nReturn a JSON array with one object per person, with the keys name, city, job and age. "
        "Output JSON only."
    )


def _ends(at: int) -> str:
    """A repetition that ends suddenly: drafts that were right turn wrong."""
    word, other = (("tick", "boom"), ("left", "right"), ("la", "stop"), ("yes", "no"))[at % 4]
    return f"Write the word {word} {8 + 4 * at} times, then write a sentence about the word {other}, then begin again."


def _random(at: int) -> str:
    rng = random.Random(at)
    return " ".join(
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789#%&", k=rng.randint(2, 9))) for _ in range(90)
    )


KINDS = {
    "edit": [f"Here is a Python file.\n```python{code}```\n{ask}" for code, ask in zip(_CODE, _EDITS, strict=True)],
    "json": [_json(at) for at in range(4)],
    "summary": [f"Summarize the following text in a few sentences.\n\n{text}" for text in _TEXTS],
    "question": [
        f"Answer from the text only.\n\n{text}\n\nQuestion: {question}"
        for text, question in zip(_TEXTS, _QUESTIONS, strict=True)
    ],
    "chat": list(_CHATS),
    "ending": [_ends(at) for at in range(4)],
    "random": [_random(at) for at in range(4)],
    "languages": list(_LANGUAGES),
}  # fmt: skip
"""Prompts by kind. The last three are hostile: drafts pay least for them."""
HOSTILE = ("ending", "random", "languages")


def mixed(number: int, kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return this many (kind, prompt), the kinds alternating."""
    rows = [cycle([(kind, prompt) for prompt in KINDS[kind]]) for kind in kinds]
    return [next(row) for row in islice(cycle(rows), number)]
