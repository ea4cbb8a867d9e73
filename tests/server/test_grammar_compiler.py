"""Grammars of clients are tried in a process that can be stopped: none waits for another client's, and no memory is
exhausted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from weft.engine.demo import MODEL_PATH
from weft.engine.errors import RequestError
from weft.engine.wire import grammar_text
from weft.server.errors import ApiError
from weft.server.tools import grammar_compiler
from weft.server.tools.grammar_compiler import GrammarCompiler

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

VOCABULARY = (MODEL_PATH / "tokenizer.json").read_text()


def bomb(k: int) -> str:
    """Sixty bytes that take minutes and gigabytes to compile."""
    return grammar_text.json_schema({"type": "integer", "multipleOf": 4999999 - 2 * k})


class Compiler(GrammarCompiler):
    """A compiler with a record of its outcomes and processes."""

    def __init__(self, vocabulary: str = VOCABULARY) -> None:
        self.seen: list[tuple[str, float]] = []
        super().__init__(lambda: vocabulary, 2048, (1,), lambda outcome, seconds: self.seen.append((outcome, seconds)))
        self.slow.seconds = 0.5
        self.memory_bytes = 2**32

    @property
    def outcomes(self) -> list[str]:
        return [outcome for outcome, _ in self.seen]

    def children(self) -> list[str]:
        assert self._process is not None
        pid = self._process.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    async def settle(self, children: int) -> None:
        """Wait until `children` processes are compiling and hold as many slots. A slot becomes free once the end of its
        process is noticed."""
        async with asyncio.timeout(240):
            while not len(self.children()) == len(self.quick.running) + len(self.slow.running) == children:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def compiling(vocabulary: str = VOCABULARY) -> AsyncIterator[Compiler]:
    compiler = Compiler(vocabulary)
    try:
        yield compiler
    finally:
        compiler.close()
        if compiler._reading is not None:
            await asyncio.wait((compiler._reading,))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Compiler]:
    async with compiling() as compiler:
        yield compiler


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more CPU time on a busy machine."""
    monkeypatch.setattr(grammar_compiler, "WAIT_SECONDS", 200.0)


@pytest.fixture
def compiler(shared: Compiler) -> Compiler:
    shared.seen.clear()
    return shared


async def test_a_good_grammar_is_tried_once_and_measured(compiler: Compiler) -> None:
    small = await compiler.verify(grammar_text.regex("[a-z]{3}"), "a")
    large = await compiler.verify(grammar_text.json_schema({"const": "a" * 50_000}), "a")
    assert large > 2**22 > small
    assert await compiler.verify(grammar_text.json_schema({"const": "a" * 50_000}), "b") == large
    assert compiler.outcomes == ["compiled", "compiled"]
    assert compiler.seen[1][1] > 0


async def test_an_invalid_grammar_has_a_reason_and_is_remembered(compiler: Compiler) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="Invalid type: nonsense"):
            await compiler.verify(grammar_text.json_schema({"type": "nonsense"}), "a")
    with pytest.raises(RequestError, match="Expected token"):
        await compiler.verify("no grammar at all", "a")
    assert compiler.outcomes == ["invalid", "invalid"]


async def test_time_and_memory_are_bounded(compiler: Compiler) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=r"more than 0\.5 s"):
            await compiler.verify(bomb(0), "a")
    assert compiler.outcomes == ["too_large"]
    await compiler.settle(0)
    async with compiling() as small:
        small.memory_bytes, small.slow.seconds = 2**24, 240.0
        with pytest.raises(RequestError, match="more than 16 MiB"):
            await small.verify(grammar_text.json_schema({"type": "integer", "multipleOf": 100003}), "a")
        assert await small.verify(grammar_text.choice(["yes", "no"]), "a") >= 0


async def test_other_clients_do_not_wait_for_slow_grammars(compiler: Compiler) -> None:
    bombs = [asyncio.create_task(compiler.verify(bomb(k), "mallory")) for k in range(1, 21)]
    await asyncio.sleep(0.05)
    for k in range(5):
        await compiler.verify(grammar_text.choice(["w", f"v{k}"]), "alice")
    assert sum(task.done() for task in bombs) < 10, "alice's came between"
    for task in bombs:
        task.cancel()
    await asyncio.wait(bombs)
    await compiler.settle(0)
    assert compiler.outcomes.count("abandoned") + compiler.outcomes.count("too_large") == 20
    assert await compiler.verify(grammar_text.choice(["mallory", "too"]), "mallory") >= 0


async def test_a_small_grammar_does_not_wait_for_slow_ones_of_the_same_client(compiler: Compiler) -> None:
    compiler.slow.seconds = 60.0
    bombs = [asyncio.create_task(compiler.verify(bomb(k), "mallory")) for k in range(30, 33)]
    while not compiler.slow.running:
        await asyncio.sleep(0.01)
    assert await compiler.verify(grammar_text.choice(["small"]), "mallory") >= 0
    assert not any(task.done() for task in bombs)
    for task in bombs:
        task.cancel()
    await asyncio.wait(bombs)
    compiler.slow.seconds = 0.5


async def test_a_client_that_disconnects_frees_its_slot(compiler: Compiler) -> None:
    compiler.slow.seconds = 60.0
    first, second = (asyncio.create_task(compiler.verify(bomb(40), client)) for client in "ab")
    while not compiler.slow.running:
        await asyncio.sleep(0.01)
    await compiler.settle(1)
    first.cancel()
    await asyncio.sleep(0.05)
    await compiler.settle(1)  # another client waits for the same
    second.cancel()
    await compiler.settle(0)
    assert compiler.outcomes == ["abandoned"]
    compiler.slow.seconds = 0.5


async def test_the_time_of_the_tokenizer_is_not_charged_to_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several engines that start share the processors with it."""
    monkeypatch.setattr(grammar_compiler, "WAIT_SECONDS", 0.05)

    def read() -> str:
        time.sleep(0.3)
        monkeypatch.setattr(grammar_compiler, "WAIT_SECONDS", 200.0)
        return VOCABULARY

    async with compiling() as compiler:
        compiler._tokenizer = read
        assert await compiler.verify(grammar_text.regex("[a-z]{4}"), "a")
        assert compiler.outcomes == ["compiled"]


async def test_a_grammar_that_arrives_while_the_tokenizer_is_read_waits_for_it() -> None:
    """The process has started by then, and its first message is the vocabulary."""
    reading, came = threading.Event(), threading.Event()

    def read() -> str:
        reading.set()
        came.wait(240)
        return VOCABULARY

    async with compiling() as compiler:
        compiler._tokenizer = read
        first = asyncio.create_task(compiler.verify(grammar_text.regex("[a-z]{4}"), "a"))
        await asyncio.to_thread(reading.wait, 240)
        second = asyncio.create_task(compiler.verify(grammar_text.regex("[a-z]{5}"), "b"))
        await asyncio.sleep(0)  # it has been sent
        came.set()
        assert all(await asyncio.gather(first, second))
        assert compiler.outcomes == ["compiled", "compiled"]


async def test_a_tokenizer_that_never_loads_is_waited_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "START_SECONDS", 0.05)
    wanted = threading.Event()

    def hang() -> str:
        wanted.wait(60)
        return VOCABULARY

    async with compiling() as compiler:
        compiler._tokenizer = hang
        with pytest.raises(ApiError) as busy:
            await compiler.verify(grammar_text.regex("[a-z]{4}"), "a")
        wanted.set()
    assert (busy.value.status, busy.value.code) == (503, "grammar_compilers_busy")


async def test_a_busy_answer_has_a_time_to_retry(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "WAIT_SECONDS", 0.2)
    compiler.slow.seconds = 60.0
    with pytest.raises(ApiError) as busy:
        await compiler.verify(bomb(50), "a")
    assert (busy.value.status, busy.value.code) == (503, "grammar_compilers_busy")
    assert busy.value.retry_after
    await compiler.settle(0)
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 3)
    monkeypatch.setattr(grammar_compiler, "WAIT_SECONDS", 200.0)
    waiting = [asyncio.create_task(compiler.verify(bomb(k), "a")) for k in range(60, 70)]
    async with asyncio.timeout(240):
        while sum(task.done() for task in waiting) < 5:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    done = [task for task in waiting if task.done()]
    assert [task.exception().status for task in done] == [503] * 5  # type: ignore[union-attr]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await compiler.settle(0)
    compiler.slow.seconds = 0.5


async def test_a_child_whose_parent_died_before_the_handshake_ends() -> None:
    """It once continued, with the pipe that signals the parent's end open."""
    script = (
        "import os, time\n"
        "from weft.engine.wire.child import end_with_parent\n"
        "parent = os.getpid()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "while os.getppid() == parent:\n"
        "    time.sleep(0.005)\n"
        "end_with_parent(parent)\n"
        "os.write(1, b'alive')\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", script, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 240)
    assert output == b""


async def test_a_killed_process_is_replaced(compiler: Compiler) -> None:
    compiler.slow.seconds = 60.0
    waiting = asyncio.create_task(compiler.verify(bomb(80), "a"))
    while not compiler.slow.running:
        await asyncio.sleep(0.01)
    assert compiler._process is not None
    compiler._process.kill()
    with pytest.raises(ApiError) as busy:
        await waiting
    assert busy.value.status == 503
    assert await compiler.verify(grammar_text.choice(["again"]), "a") >= 0
    compiler.slow.seconds = 0.5


async def test_the_restart_of_a_killed_process_is_not_charged_to_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    back = threading.Event()

    def read() -> str:
        back.wait(60)
        monkeypatch.setattr(grammar_compiler, "WAIT_SECONDS", 200.0)
        return VOCABULARY

    async with compiling() as compiler:
        await compiler.verify(grammar_text.regex("[a-z]{3}"), "a")
        compiler.quick.seconds = 60.0
        bombs = [asyncio.create_task(compiler.verify(bomb(k), "a")) for k in (90, 91)]
        await compiler.settle(2)
        monkeypatch.setattr(grammar_compiler, "WAIT_SECONDS", 2.0)
        behind = asyncio.create_task(compiler.verify(grammar_text.regex("[a-z]{5}"), "b"))
        await asyncio.sleep(0)
        compiler._tokenizer = read
        assert compiler._process is not None
        compiler._process.kill()
        await asyncio.wait(bombs)
        await asyncio.sleep(2.2)
        back.set()
        assert await behind >= 0
        assert [bomb.exception().status for bomb in bombs] == [503] * 2  # type: ignore[union-attr]


async def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    async with compiling("{}") as compiler:
        for text in ("a", "b"):
            with pytest.raises(RequestError, match="tokenizer"):
                await compiler.verify(grammar_text.regex(text), "a")


CHAIN = "\n".join(f"r{i}: r{i + 1}" for i in range(4000))


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        (grammar_text.lark(f'start: r0\n{CHAIN}\nr4000: "a"'), True),
        (grammar_text.lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), False),
        (grammar_text.regex("(" * 20_000 + "a" + ")" * 20_000), False),
        ('{"grammars":[{"json_schema":' + '{"items":' * 5000 + "{}" + "}" * 5002 + "]}", False),
    ],
    ids=["chain of rules", "deep rule", "deep regex", "deep schema"],
)
async def test_hostile_grammars_end_in_an_answer(compiler: Compiler, text: str, usable: bool) -> None:
    if usable:
        assert await compiler.verify(text, "a") >= 0
        return
    with pytest.raises(RequestError) as refused:
        await compiler.verify(text, "a")
    assert "\n" not in str(refused.value)


async def test_a_closed_connection_frees_its_slot() -> None:
    from stub import serving

    async with serving() as server:
        compiler = server.service.loaded.grammars
        compiler.slow.seconds, compiler.memory_bytes = 60.0, 2**32
        schema = {"type": "integer", "multipleOf": 4999999}
        body = json.dumps({"prompt": "hi", "structured_outputs": {"json": schema}}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        await server.settle(lambda: bool(compiler.slow.running))
        writer.close()
        await server.settle(lambda: not compiler.slow.running)
        assert not compiler._trials
        assert server.engine.added == []
        assert (await server.complete(structured_outputs={"choice": ["hello world"]}))["choices"]


async def test_slow_grammars_leave_the_server_unchanged(tmp_path: Path) -> None:
    from live import running

    def engine_mib() -> int:
        return int(Path(f"/proc/{daemon.engine_pid}/statm").read_text().split()[1]) // 256

    def bombed(k: int) -> dict[str, Any]:
        schema = {"type": "integer", "multipleOf": 1234567 + k}
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}

    with running(tmp_path) as daemon:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=240) as http:

            async def chat(**fields: Any) -> httpx.Response:
                body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **fields}
                return await http.post("/v1/chat/completions", json=body)

            assert (await chat(structured_outputs={"choice": ["a", "b"]})).status_code == 200
            before = engine_mib()
            answers = await asyncio.gather(*(chat(**bombed(k)) for k in range(20)))
            assert {answer.status_code for answer in answers} <= {400, 503}
            for answer in answers:
                error = answer.json()["error"]
                assert ("retry-after" in answer.headers) if answer.status_code == 503 else error["param"]
            assert (await chat(structured_outputs={"choice": ["w", "v"]})).status_code == 200
            assert engine_mib() < before + 100
