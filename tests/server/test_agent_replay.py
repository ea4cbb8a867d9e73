"""A conversation of an agent in each API format, twelve turns by day, forty at night: computed prefixes are found
again.

Each turn sends the whole history again, with a new nonce in its system prompt, as coding agents do, and the results of
tools that the previous answer called.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import claude_code
import httpx
import pytest
from live import LOADS_ALL, Daemon, patched, running

pytestmark = pytest.mark.slow

OUTPUT = 64
"""tokens of an answer at most"""
RESULT = "It is 20."
LEAST_HITS = 0.98
PLACES = ("Paris", "Rome", "Oslo", "Berlin", "Madrid")
WEATHER: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ADD: Any = {"type": "object", "properties": {n: {"type": "number"} for n in ("a", "b")}, "required": ["a", "b"]}
TOOLS = {"get_weather": ("Get the weather for a city.", WEATHER), "add": ("Add two numbers.", ADD)}
FACTS = " ".join(f"The weather in {place} was {sky}." for place in PLACES for sky in ("sunny", "rainy", "cold"))
"""repeated, it is as long as a coding agent's system prompt, for a model of this size"""


def question(i: int) -> str:
    return f"What's the weather in {PLACES[i % 5]}?" if i % 2 else f"What is {i + 10} plus {i + 3}?"


class Turn:
    """The results of one request."""

    def __init__(self, prompt: int, cached: int, output: int, called: bool) -> None:
        self.prompt, self.cached, self.output, self.called = prompt, cached, output, called


class Agent:
    """A client that sends its whole history with every turn."""

    def __init__(self, http: httpx.Client, facts: str) -> None:
        self.http = http
        self._facts = facts
        self._history: list[dict[str, Any]] = []
        self._calls: list[str] = []
        """ids of the calls to be answered next"""

    def ask(self, i: int) -> Turn:
        """Streams every second turn, and reassembles the stream here."""
        raise NotImplementedError

    def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.post(path, json=body).raise_for_status().json()
        return answer

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of Anthropic's stream."""
    message = events[0]["message"]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    blocks: list[dict[str, Any]] = message["content"]
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(blocks)
                blocks.append(block)
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}:
                blocks[-1]["text"] += text
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}}:
                blocks[-1]["input"] = (blocks[-1]["input"] or "") + text
            case {"type": "message_delta", "usage": usage}:
                message["usage"] |= usage
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"] or "{}")
    return dict(message)


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response of a stream, checked against the items of its events."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response: dict[str, Any] = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    for number, item in enumerate(done):
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.delta"
            reported = "".join(e["delta"] for e in events if e["type"] == kind and e["output_index"] == number)
            assert reported == item["arguments"]
    return response


class Chat(Agent):
    """The history in the form of `/v1/chat/completions`."""

    def ask(self, i: int) -> Turn:
        if self._calls:
            results = ({"role": "tool", "tool_call_id": call, "content": RESULT} for call in self._calls)
            self._history += results
        else:
            self._history.append({"role": "user", "content": question(i)})
        system = "\n".join(block["text"] for block in claude_code.system(f"{i:05x}"))
        body = {
            "messages": [{"role": "system", "content": f"{system}\n{self._facts}"}, *self._history],
            "tools": [
                {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
                for name, (about, schema) in TOOLS.items()
            ],
            "prompt_cache_key": "session",
            "temperature": 0,
            "max_tokens": OUTPUT,
        }
        answer = self.whole("/v1/chat/completions", body)
        message, usage = answer["choices"][0]["message"], answer["usage"]
        self._history.append({key: value for key, value in message.items() if value is not None})
        self._calls = [call["id"] for call in message.get("tool_calls") or ()]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Turn(usage["prompt_tokens"], cached, usage["completion_tokens"], bool(self._calls))


class Messages(Agent):
    """The history in the form of `/v1/messages`, as Claude Code sends it."""

    def ask(self, i: int) -> Turn:
        results = [{"type": "tool_result", "tool_use_id": call, "content": RESULT} for call in self._calls]
        self._history.append({"role": "user", "content": results or question(i)})
        body = claude_code.request(self._history, f"{i:05x}", temperature=0, max_tokens=OUTPUT, stream=False)
        body["system"].append({"type": "text", "text": self._facts})
        body["tools"] = [
            {"name": name, "description": about, "input_schema": schema} for name, (about, schema) in TOOLS.items()
        ]
        answer = message_of(self.events("/v1/messages", body)) if i % 2 else self.whole("/v1/messages", body)
        usage = answer["usage"]
        self._history.append({"role": "assistant", "content": answer["content"]})
        self._calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        return Turn(prompt, cached, usage["output_tokens"], bool(self._calls))


class Responses(Agent):
    """The history in the form of `/v1/responses`, sent whole as Codex does."""

    def ask(self, i: int) -> Turn:
        if self._calls:
            results = [{"type": "function_call_output", "call_id": call, "output": RESULT} for call in self._calls]
            self._history += results
        else:
            self._history.append({"role": "user", "content": question(i)})
        body = {
            "instructions": "\n".join(block["text"] for block in claude_code.system(f"{i:05x}")) + f"\n{self._facts}",
            "input": self._history,
            "tools": [
                {"type": "function", "name": name, "description": about, "parameters": schema, "strict": False}
                for name, (about, schema) in TOOLS.items()
            ],
            "prompt_cache_key": "session",
            "store": False,
            "temperature": 0,
            "max_output_tokens": OUTPUT,
        }
        answer = response_of(self.events("/v1/responses", body)) if i % 2 else self.whole("/v1/responses", body)
        usage = answer["usage"]
        self._history += answer["output"]
        self._calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Turn(usage["input_tokens"], cached, usage["output_tokens"], bool(self._calls))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon"), "--page-size", "8") as daemon:
        yield daemon


def share_found(turns: list[Turn]) -> float:
    """The cached share of the tokens that were sent or answered before, turn by turn."""
    return sum(turn.cached for turn in turns[1:]) / sum(before.prompt + before.output for before in turns[:-1])


@pytest.mark.parametrize("dialect", [Chat, Messages, Responses])
@pytest.mark.parametrize(("count", "length"), [(12, 5), pytest.param(40, 1, marks=pytest.mark.nightly)])
def test_earlier_turns_are_found_in_the_cache(daemon: Daemon, dialect: type[Agent], count: int, length: int) -> None:
    with httpx.Client(base_url=daemon.url, timeout=240) as http:
        agent = dialect(http, " ".join([dialect.__name__, *length * [FACTS]]))  # each starts its own conversation
        turns = [agent.ask(i) for i in range(count)]
    reported = json.dumps([vars(turn) for turn in turns])
    assert LEAST_HITS <= share_found(turns) < 1, reported
    assert all(turn.prompt > before.prompt for before, turn in pairwise(turns)), reported
    assert sum(turn.called for turn in turns) >= count / 4, reported


def value(daemon: Daemon, name: str, tier: str) -> float:
    lines = httpx.get(f"{daemon.url}/metrics", timeout=240).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{tier="{tier}"}}'))


def all_spilled(daemon: Daemon) -> float:
    """Wait until every tier has all pages, as it does once they are idle, and return their number. The pool loses
    none."""
    end = time.monotonic() + 240
    while True:
        pages = [value(daemon, "weft_kv_tier_used_pages", tier) for tier in ("gpu", "host", "ssd")]
        if 0 < pages[0] == pages[1] == pages[2]:
            return pages[0]
        assert time.monotonic() < end, pages
        time.sleep(0.05)


@pytest.mark.nightly
def test_idle_conversations_outlive_a_killed_daemon(tmp_path: Path) -> None:
    """Idle pages are on the SSD without a request for it, and are found there."""
    options = ["--page-size", "8", "--host-kv-gib", "0.1", "--ssd-kv-path", str(tmp_path / "kv"), "--ssd-kv-gib", "0.2"]
    options += ["--idle-spill-seconds", "0.5"]
    env = patched(tmp_path / "site", LOADS_ALL)
    agents: list[Agent] = []
    turns: list[Turn] = []
    with running(tmp_path, *options, env=env) as daemon, httpx.Client(base_url=daemon.url, timeout=240) as http:
        for dialect in (Messages, Responses, Chat):
            agent = dialect(http, " ".join([dialect.__name__, *4 * [FACTS]]))
            turns = [agent.ask(i) for i in range(3)]
            agents.append(agent)
        pages = all_spilled(daemon)
        assert pages >= sum(turn.prompt for turn in turns[-1:]) // 8
        assert value(daemon, "weft_kv_tier_idle_spilled_pages_total", "ssd") > 0
        engine = daemon.engine_pid
        daemon.process.kill()
        os.kill(engine, signal.SIGKILL)
    with running(tmp_path, *options, env=env) as daemon, httpx.Client(base_url=daemon.url, timeout=240) as http:
        agents[-1].http = http
        turns.append(agents[-1].ask(3))
        reported = json.dumps([vars(turn) for turn in turns])
        assert LEAST_HITS <= share_found(turns[-2:]) < 1, reported
        assert value(daemon, "weft_kv_tier_used_pages", "ssd") >= pages, "nothing was lost"
