"""`Customers`: clients that know the right answers and record the outcome of every request."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from ledger import Ledger

PATIENCE_SECONDS = 300.0
"""seconds that a client waits for the end of an answer, far above every limit of the daemon: a busy machine is no
hang"""
FRUIT = ("apple", "pear", "fig", "kiwi", "plum", "lime", "peach", "mango", "grape", "melon", "cherry", "lemon")
SHOWN = re.compile(r"(?<=base64,)[\w+/=]{40,}")  # pictures are left out
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Question:
    """A request with a fixed answer: greedy, in float32."""

    path: str
    body: dict[str, Any]
    status: int = 200
    host: str = "localhost"
    headers: str = ""
    """further headers, each with its line end"""

    def __hash__(self) -> int:
        return hash(json.dumps(self.body, sort_keys=True))

    def __str__(self) -> str:
        return f"{self.path} {SHOWN.sub('…', str(self.body))}"


def questions(rng: Random, count: int) -> list[Question]:
    """Questions of several kinds: short and long prompts, streams, several choices, constrained answers, refusals."""
    return [KINDS[i % len(KINDS)](rng) for i in range(count)]


def _sum(rng: Random) -> Question:
    text = f"What is {rng.randrange(500)} plus {rng.randrange(400)}?"
    return Question(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0})


def _sum_streamed(rng: Random) -> Question:
    question = _sum(rng)
    return Question(CHAT, question.body | {"stream": True, "stream_options": {"include_usage": True}})


def _recall(rng: Random) -> Question:
    """A long text shared by many requests, so that its pages move between tiers."""
    facts = Random(rng.randrange(12))
    codes = {name: facts.randrange(1000, 9999) for name in FRUIT}
    text = " ".join(f"The code of {name} is {code}." for name, code in codes.items())
    filler = " ".join("The fox runs over the fence." for _ in range(facts.randrange(10, 40)))
    requested = rng.choice(FRUIT)
    content = f"{text} {filler} What is the code of {requested}?"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return Question(CHAT, body | {"stream": rng.random() < 0.5})


def _count(rng: Random) -> Question:
    """Many tokens, one at a time."""
    begin = rng.randrange(1, 60)
    prompt = " ".join(map(str, range(begin, begin + 4)))
    return Question(COMPLETIONS, {"prompt": prompt, "max_tokens": 80, "temperature": 0, "stream": True})


def _several(rng: Random) -> Question:
    prompts = [f"{rng.randrange(99)} + {rng.randrange(99)} =" for _ in range(3)]
    return Question(COMPLETIONS, {"prompt": prompts, "max_tokens": 5, "temperature": 0, "n": 2})


def _choice(rng: Random) -> Question:
    body = _sum(rng).body | {"structured_outputs": {"choice": ["yes", "no", "maybe"]}, "max_tokens": 12}
    return Question(CHAT, body)


def _refused(rng: Random) -> Question:
    return Question(COMPLETIONS, {"prompt": "x", "max_tokens": -rng.randrange(1, 9)}, 400)


def _cross_site(rng: Random) -> Question:
    """As a browser sends it for a page of another site."""
    return replace(_sum(rng), status=403, headers=rng.choice(("Sec-Fetch-Site: cross-site\r\n", "Origin: null\r\n")))


def _rebound(rng: Random) -> Question:
    """As a browser sends it for a page whose name leads here."""
    return replace(_sum(rng), status=403, host="evil.example")


KINDS = (
    _sum, _sum_streamed, _recall, _count, _several, _choice, _recall, _sum, _refused, _cross_site, _rebound,
)  # fmt: skip
REFUSALS = (400, 403, 404)


class Broken(Exception):
    """The connection ended before the answer did."""


class Customers:
    """Sends `count` requests at a time, without end, until `stop`. `answers`: the right ones of each question."""

    def __init__(self, port: int, ledger: Ledger, answers: dict[Question, set[str]], rng: Random) -> None:
        self._port, self.ledger, self._answers, self._rng = port, ledger, answers, rng
        self._asked: Sequence[Question] = list(answers)
        self._crowd: list[asyncio.Task[None]] = []
        self._stopping = False

    def come(self, count: int) -> None:
        self._crowd += [asyncio.create_task(self._ask_on(Random(self._rng.random()))) for _ in range(count)]

    async def burst(self, count: int, **fields: Any) -> None:
        """`count` requests at once, one per client, with `fields` that do not change the answer."""
        rng = Random(self._rng.random())
        await asyncio.gather(*(self._ask(rng.choice(self._asked), rng, **fields) for _ in range(count)))

    async def stop(self) -> None:
        """Wait until every client has its answer."""
        self._stopping = True
        await asyncio.gather(*self._crowd)

    async def _ask_on(self, rng: Random) -> None:
        while not self._stopping:
            served = await self._ask(rng.choice(self._asked), rng)
            await asyncio.sleep(rng.uniform(0, 0.2) if served else rng.uniform(0.2, 1.0))

    async def _ask(self, question: Question, rng: Random, **fields: Any) -> bool:
        """Return whether it was served."""
        ledger, path = self.ledger, question.path
        data = request(replace(question, body=question.body | fields), keep_alive=False)
        leaves = rng.uniform(0, 0.3) if rng.random() < 0.05 else None
        got = await exchange(self._port, ledger, path, data, f"{question}", leaves)
        if got is None:
            return leaves is not None
        status, body = got
        if status not in (200, *REFUSALS):
            return False
        text = refusal(status, body) if status in REFUSALS else answer(body)
        if text is None:  # a stream that sent its error before its end
            return False
        if text in (right := self._answers[question]):
            ledger.right += 1
        else:
            said = body.decode(errors="replace") if status in REFUSALS else repr(text)
            ledger.wrong.append(f"{question}: {said} instead of {' or '.join(sorted(right))!r}")
        return True


async def exchange(
    port: int, ledger: Ledger, path: str, data: bytes, what: str, leave_after: float | None = None
) -> tuple[int, bytes] | None:
    """Send a request on its own connection, and return status and body. None, counted under `path`, if there is no
    answer or the client leaves after `leave_after` seconds. `what` names a request that gets none in time."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        ledger.refused += 1
        return None
    try:
        writer.write(data)
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            ledger.left[path] += 1
            return None
        status, body = await asyncio.wait_for(whole(reader), PATIENCE_SECONDS)
    except TimeoutError:
        ledger.unanswered.append(what)
        return None
    except (Broken, OSError):
        ledger.broken[path] += 1
        return None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    ledger.answered[path, str(status)] += 1
    return status, body


async def references(port: int, requested: Sequence[Question]) -> dict[Question, set[str]]:
    """The answers of an undisturbed daemon, requested in sequence."""
    found: dict[Question, set[str]] = {}
    for question in requested:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(question, keep_alive=False))
        status, body = await whole(reader)
        writer.close()
        text = refusal(status, body) if status in REFUSALS else answer(body)
        assert status == question.status, (status, body)
        assert text is not None, body
        found[question] = {text}
    return found


def request(question: Question, *, keep_alive: bool) -> bytes:
    data = json.dumps(question.body).encode()
    connection = b"" if keep_alive else b"Connection: close\r\n"
    return (
        b"POST %s HTTP/1.1\r\nHost: %s\r\n%s%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % (question.path.encode(), question.host.encode(), question.headers.encode(), connection, len(data))
    ) + data


async def whole(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body. Raises `Broken` if the answer is incomplete."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        if headers.get("transfer-encoding") != "chunked":
            return status, await reader.readexactly(int(headers["content-length"]))
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        return status, body
    except (asyncio.IncompleteReadError, IndexError, ValueError) as error:
        raise Broken(str(error)) from None


def refusal(status: int, body: bytes) -> str:
    """The status of a refusal; with its message if that is not one line."""
    message = json.loads(body)["error"]["message"]
    return f"{status}" if message and message.isprintable() else f"{status} {message!r}"


def answer(body: bytes) -> str | None:
    """The tokens or the text of a 200 response, by choice; None for a stream that ended with an error event. Raises
    `Broken` without an end."""
    if not body.startswith((b"data:", b":")):
        choices = json.loads(body)["choices"]
        return json.dumps([c.get("token_ids") or c.get("text") or c["message"]["content"] for c in choices])
    output: dict[int, str] = {}
    ended = False
    for event in body.decode().split("\n\n"):
        if not event.startswith("data: "):
            continue
        if event == "data: [DONE]":
            ended = True
            continue
        message = json.loads(event.removeprefix("data: "))
        if "error" in message:
            return None
        for choice in message["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            output[choice["index"]] = output.get(choice["index"], "") + text
    if not ended:
        raise Broken("no [DONE]")
    return json.dumps([output[i] for i in sorted(output)])
