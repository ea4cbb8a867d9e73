"""The real daemon with its real engine process, over HTTP: start, load, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_port import free_port
from live import Daemon, patched, running, stopped

from weft.engine.wire.stacks import threads

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
LONG = {"prompt": "What is 12 + 30?", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


async def read_stream(http: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event | None = None) -> list[Any]:
    events: list[Any] = []
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
                if begun is not None:
                    begun.set()
    return events


@contextlib.asynccontextmanager
async def open_streams(daemon: Daemon, count: int) -> AsyncIterator[list[asyncio.Task[list[Any]]]]:
    """Long streams, once all of them have started."""
    begun = [asyncio.Event() for _ in range(count)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=daemon.url, timeout=240, limits=limits) as http:
        tasks = [asyncio.create_task(read_stream(http, LONG, event)) for event in begun]
        async with asyncio.timeout(240):
            await asyncio.gather(*(event.wait() for event in begun))
        yield tasks


async def exit_code(daemon: Daemon, timeout: float) -> int:
    return await asyncio.to_thread(daemon.process.wait, timeout)


async def until_not_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(240):
        while (await http.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)


async def test_requests_sent_at_once_are_answered(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        response = httpx.post(
            daemon.url + "/v1/chat/completions", json={"model": "demo", "messages": QUESTION}, timeout=240
        )
        assert "42" in response.json()["choices"][0]["message"]["content"]


def test_the_ready_line_has_a_working_command(daemon: Daemon) -> None:
    command = shlex.split(daemon.curl_line.removeprefix("try: "))
    answer = subprocess.run([*command, "--silent"], capture_output=True, check=True, text=True, timeout=240)
    assert json.loads(answer.stdout)["object"] == "chat.completion"


def test_port_answers_while_the_model_loads(tmp_path: Path) -> None:
    port = free_port()
    daemon = Daemon(tmp_path / "stderr", "--port", str(port))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:

            def answers() -> tuple[int, int]:
                while True:
                    assert daemon.process.poll() is None, daemon.stderr()
                    with contextlib.suppress(httpx.ConnectError):
                        return http.get("/health").status_code, http.get("/ready").status_code
                    time.sleep(0.02)

            with stopped(daemon.engine_pid):  # it does not load meanwhile
                assert answers() == (200, 503)
            while (found := answers()) == (200, 503):
                time.sleep(0.02)
            assert found == (200, 200)
    finally:
        daemon.end()


async def test_64_clients_at_once_get_the_answers_they_get_alone(daemon: Daemon) -> None:
    questions = [f"What is {i} + {i + 3}?" for i in range(16)]
    greedy = {"temperature": 0, "max_tokens": 24}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=daemon.url, timeout=240, limits=limits) as http:

        async def ask(question: str, stream: bool) -> str:
            body = {"prompt": question, **greedy}
            if stream:
                *chunks, done = await read_stream(http, body)
                assert done == "[DONE]"
                return "".join(chunk["choices"][0]["text"] for chunk in chunks)
            response = await http.post("/v1/completions", json=body)
            return response.json()["choices"][0]["text"]

        alone = {question: await ask(question, False) for question in questions}
        requested = [(questions[i % 16], bool(i // 16 % 2)) for i in range(64)]
        together = await asyncio.gather(*(ask(*one) for one in requested))
    assert [alone[question] for question, _ in requested] == together


async def test_sequences_differ_and_seeds_repeat(daemon: Daemon) -> None:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=240) as http:

        async def texts(**extra: Any) -> list[str]:
            body = {"prompt": "Tell me", "max_tokens": 24, "temperature": 1.5, "ignore_eos": True, **extra}
            response = await http.post("/v1/completions", json=body)
            return [choice["text"] for choice in response.json()["choices"]]

        assert len(set(await texts(n=4))) == 4
        assert await texts(n=3, seed=7) == await texts(n=3, seed=7)
        assert len(set(await texts(n=3, seed=7))) == 3


async def test_a_client_that_disconnects_frees_its_request(daemon: Daemon) -> None:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=240) as http:
        async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            await anext(response.aiter_lines())
        wanted = (
            "weft_requests_running 0.0",
            'weft_aborted_total{cause="disconnect"} 1.0',
            "weft_kv_cache_usage_ratio 0.0",
        )
        async with asyncio.timeout(240):
            text = ""
            while not all(line in text for line in wanted):
                await asyncio.sleep(0.02)
                text = (await http.get("/metrics")).text


async def test_generated_tokens_score_the_same_as_a_prompt(daemon: Daemon) -> None:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=240) as http:
        prompt = (await http.post("/tokenize", json={"prompt": "What is 12 + 30?"})).json()["tokens"]
        base = {"temperature": 0, "logprobs": 1, "return_token_ids": True}
        requested = {**base, "prompt": prompt, "max_tokens": 8}
        generated = (await http.post("/v1/completions", json=requested)).json()["choices"][0]
        requested = {**base, "prompt": prompt + generated["token_ids"], "echo": True, "max_tokens": 0}
        scored = (await http.post("/v1/completions", json=requested)).json()["choices"][0]
    scores, tail = generated["logprobs"], slice(len(prompt), None)
    assert scored["logprobs"]["tokens"][tail] == scores["tokens"]
    assert scored["logprobs"]["token_logprobs"][tail] == pytest.approx(scores["token_logprobs"], abs=1e-3)


async def test_engine_death_reaches_every_client_and_ends_the_daemon(tmp_path: Path) -> None:
    with running(tmp_path, "--no-restart-engine") as daemon:
        async with open_streams(daemon, 20) as streams:
            os.kill(daemon.engine_pid, signal.SIGKILL)
            results = await asyncio.gather(*streams)
            assert [events[-1]["error"]["code"] for events in results] == ["engine_dead"] * 20
            assert await exit_code(daemon, 240) == 1
        daemon.wait_for_log("SIGKILL")
        assert "Traceback" not in daemon.stderr()


async def test_sigterm_lets_open_streams_finish_and_accepts_no_new_ones(tmp_path: Path) -> None:
    with running(tmp_path, "--drain-timeout", "240") as daemon:  # a busy machine may be slow
        async with open_streams(daemon, 4) as streams:
            async with httpx.AsyncClient(base_url=daemon.url, timeout=240) as http:
                with daemon.held():
                    daemon.process.send_signal(signal.SIGTERM)
                    await until_not_ready(http)
                    refused = await http.post("/v1/completions", json=LONG)
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
            for events in await asyncio.gather(*streams):
                assert events[-1] == "[DONE]"
        assert await exit_code(daemon, 240) == 0
        assert "Traceback" not in daemon.stderr()


@pytest.mark.parametrize(
    "signals", [pytest.param(1, id="drain timeout", marks=pytest.mark.nightly), pytest.param(2, id="second signal")]
)
async def test_streams_that_do_not_finish_get_an_error_event(tmp_path: Path, signals: int) -> None:
    with running(tmp_path, "--drain-timeout", "0.1" if signals == 1 else "60") as daemon:
        async with open_streams(daemon, 4) as streams:
            with daemon.held():
                daemon.process.send_signal(signal.SIGTERM)
                if signals == 2:
                    async with httpx.AsyncClient(base_url=daemon.url, timeout=240) as http:
                        await until_not_ready(http)  # two signals at once would be one
                    daemon.process.send_signal(signal.SIGTERM)
                ends = await asyncio.gather(*streams)
            for events in ends:
                assert events[-1]["error"]["code"] == "draining"
        assert await exit_code(daemon, 240) == 0
        assert "Traceback" not in daemon.stderr()


def test_sigint_while_loading_ends_quietly(tmp_path: Path) -> None:
    port = free_port()
    daemon = Daemon(tmp_path / "stderr", "--port", str(port))
    try:
        with stopped(daemon.engine_pid):  # or it might have loaded
            with httpx.Client(timeout=240) as http:
                while daemon.process.poll() is None:
                    with contextlib.suppress(httpx.ConnectError):
                        http.get(f"http://127.0.0.1:{port}/health")
                        break
                    time.sleep(0.02)
            daemon.process.send_signal(signal.SIGINT)
            assert daemon.process.wait(240) == 0
        assert daemon.stderr() == ""
    finally:
        daemon.end()


def test_an_api_process_that_has_not_started_does_not_keep_a_daemon(tmp_path: Path) -> None:
    code = """
import os, signal
from weft.server.daemon import daemon
daemon.STOP_SECONDS = 10_000
start = daemon.ApiProcess.start
async def stopped(*arguments, **options):
    process = await start(*arguments, **options)
    os.kill(process.pid, signal.SIGSTOP)
    return process
daemon.ApiProcess.start = stopped
"""
    daemon = Daemon(tmp_path / "stderr", env=patched(tmp_path / "site", code, of="weft.server"))
    try:
        while not any(" T " in threads(pid) for pid in daemon.children("weft.server.daemon.worker")):
            assert daemon.process.poll() is None
            time.sleep(0.02)
        daemon.process.terminate()
        assert daemon.process.wait(60) == 0
    finally:
        daemon.end()


def test_a_taken_port_is_a_one_line_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon = Daemon(tmp_path / "stderr", "--port", str(taken.getsockname()[1]))
        assert daemon.process.wait(240) == 2
        assert re.fullmatch(r"weft: cannot listen on .* already in use.*--port\n", daemon.stderr())


@pytest.mark.parametrize("files", [None, {}, {"config.json": '{"architectures": ["Nope"], "model_type": "nope"}'}])
def test_a_model_that_cannot_load_is_a_one_line_error(tmp_path: Path, files: dict[str, str] | None) -> None:
    model = tmp_path / "model"
    if files is not None:
        model.mkdir()
        for name, text in files.items():
            (model / name).write_text(text)
    daemon = Daemon(tmp_path / "stderr", str(model))
    try:
        assert daemon.process.wait(240) == (2 if files is None else 1)
        assert re.fullmatch(r"weft serve: .+\n", daemon.stderr())
    finally:
        daemon.end()
