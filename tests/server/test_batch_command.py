"""`weft batch`: every request is answered exactly once, despite kills, refusals and errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from stub import Script, Server, serving

from weft.engine.errors import ConfigError, WeftError
from weft.server.batches.lines import AnswerFile, LineError, NoAnswers, RequestFile, failure, parse
from weft.server.commands import batch_client
from weft.server.commands.batch_client import BatchClient
from weft.server.commands.endpoint import Refused
from weft.server.daemon.cli import main

pytestmark = pytest.mark.asyncio(loop_scope="module")


def request(i: int, **body: Any) -> dict[str, Any]:
    if i % 2:
        requested = {"url": "/v1/completions", "body": {"model": "stub", "prompt": f"number {i}", **body}}
    else:
        messages = [{"role": "user", "content": f"number {i}"}]
        requested = {"url": "/v1/chat/completions", "body": {"model": "stub", "messages": messages, **body}}
    return {"custom_id": f"r{i}", "method": "POST", **requested}


def write(path: Path, requests: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in requests))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def batch(*words: str | Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "weft.server", "batch", *map(str, words),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
async def test_a_batch_killed_and_restarted_answers_every_line_once(server: Server, tmp_path: Path) -> None:
    server.engine.script = Script("one two three", delay=0.003)
    requests = [request(i) for i in range(240)]
    requests[7]["body"]["temperature"] = "hot"
    file, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    words = (file, out, "--url", server.url, "--concurrency", "8")
    process = await batch(*words)
    await server.settle(lambda: out.exists() and out.read_bytes().count(b"\n") >= 60)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    written = out.read_bytes()
    assert 60 <= written.count(b"\n") < 240
    # A kill in the middle of a write leaves this.
    out.write_bytes(written + written.splitlines()[3][:50])
    process = await batch(*words)
    output, complained = await process.communicate()
    assert process.returncode == 1, complained
    assert b"240 requests: 239 answered, 1 failed" in output
    assert b"are answered; resuming" in complained
    found = answers(out)
    assert sorted(a["custom_id"] for a in found) == sorted(r["custom_id"] for r in requests)
    by_id = {a["custom_id"]: a for a in found}
    assert by_id["r7"]["response"]["status_code"] == 400
    assert by_id["r7"]["response"]["body"]["error"]["param"] == "temperature"
    good = by_id["r8"]["response"]
    assert (good["status_code"], good["body"]["object"]) == (200, "chat.completion")
    assert good["request_id"]
    assert by_id["r9"]["response"]["body"]["choices"][0]["text"] == "one two three"
    # The third run has nothing to do.
    requested = len(server.engine.added)
    again = await batch(*words)
    assert b"0 in this run" in (await again.communicate())[0]
    assert len(server.engine.added) == requested


async def ask(url: str, file: Path, out: Path, *, patience: float = 60) -> None:
    requests, written = RequestFile(file), AnswerFile(out)
    try:
        await BatchClient(url, None, written, patience=patience, on_answer=lambda: None).run(requests, 8)
    finally:
        written.close()
        requests.close()


async def test_overload_is_waited_out(tmp_path: Path) -> None:
    async with serving(max_queued_requests=0, max_num_seqs=2) as server:
        server.engine.script = Script("a b", delay=0.01)
        file, out = write(tmp_path / "in", [request(i) for i in range(12)]), tmp_path / "out"
        await ask(server.url, file, out)
        assert [a["response"]["status_code"] for a in answers(out)] == [200] * 12


async def test_a_request_that_loses_every_connection_gets_that_as_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_client, "PAUSE_SECONDS", (0.01, 0.02))

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    file, out = write(tmp_path / "in", [request(1)]), tmp_path / "out"
    await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", file, out)
    (answer,) = answers(out)
    assert answer["response"] is None
    assert answer["error"]["code"] == "connection_broken"
    server.close()


async def test_a_server_that_exited_is_given_up_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_client, "PAUSE_SECONDS", (0.01, 0.02))
    file, out = write(tmp_path / "in", [request(i) for i in range(5)]), tmp_path / "out"
    with pytest.raises(Refused, match="no response for"):
        await ask("http://127.0.0.1:9", file, out, patience=0.05)
    assert out.read_bytes() == b""
    with pytest.raises(WeftError, match="0 of 5 are answered; run the same command to resume"):
        await asyncio.to_thread(_run, [str(file), str(out), "--url", "http://127.0.0.1:9"])


def _run(words: list[str]) -> None:
    from weft.server.commands.batch import run
    from weft.server.daemon.cli import _parser

    run(_parser().parse_args(["batch", *words]))


async def test_a_wrong_key_ends_the_batch_instead_of_failing_every_line(tmp_path: Path) -> None:
    async with serving(api_key=["secret"]) as server:
        file, out = write(tmp_path / "in", [request(i) for i in range(5)]), tmp_path / "out"
        with pytest.raises(Refused, match="--api-key"):
            await ask(server.url, file, out)
        assert out.read_bytes() == b""


async def test_the_first_of_several_keys_in_the_environment_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_API_KEY", "first, second")  # as `weft serve` reads it
    async with serving(api_key=["first", "second"]) as server:
        file, out = write(tmp_path / "in", [request(1)]), tmp_path / "out"
        await asyncio.to_thread(_run, [str(file), str(out), "--url", server.url])
        assert [a["response"]["status_code"] for a in answers(out)] == [200]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"url": "/v1/completions", "body": {}}', "needs a custom_id"),
        (b'{"custom_id": "a", "url": "/v1/images", "body": {}}', "has the url /v1/images, not"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": []}', "needs a body"),
        (b'{"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}', "method other than POST"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "asks for a stream"),
    ],
)
async def test_a_line_that_is_not_a_request_is_named(line: bytes, message: str) -> None:
    with pytest.raises(LineError, match=message):
        parse(line)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1 is missing: the file has no request"),
        ('{"custom_id": 1}\n', "line 1 needs a custom_id"),
        (json.dumps(request(1)) + "\n\n" + json.dumps(request(1)) + "\n", "line 3 repeats the custom_id 'r1'"),
    ],
)
async def test_a_file_with_a_wrong_line_is_refused_before_any_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(content)
    assert main(["batch", str(file), str(tmp_path / "out"), "--url", "http://127.0.0.1:9"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


async def test_answers_of_another_batch_are_not_appended_to(tmp_path: Path) -> None:
    file, out = write(tmp_path / "in", [request(1)]), tmp_path / "out"
    for content, why in [
        ("hello\n", "line 1 is not"),
        (failure("x", "c", "m").decode(), "has responses to other req"),
        ('{"learning_rate": 0.1}', "line 1 is not part of a batch answer"),
        (file.read_text(), "line 1 is not"),
        (file.read_text().strip(), "line 1 is not"),
    ]:
        out.write_text(content)
        with pytest.raises(ConfigError, match=why):
            _run([str(file), str(out)])
        assert out.read_text() == content
    out.unlink()
    held = AnswerFile(out)
    with pytest.raises(NoAnswers, match="another process"):
        AnswerFile(out)
    held.close()


@pytest.mark.parametrize("which", ["requests", "answers"])
async def test_a_pipe_is_not_a_batch_file(tmp_path: Path, which: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    file = write(tmp_path / "in", [request(1)])
    words = [pipe, tmp_path / "out"] if which == "requests" else [file, pipe]
    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        _run(list(map(str, words)))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--url", "http://127.0.0.1:99999"], "--url http://127.0.0.1:99999: must be like"),
        (["--url", "http://[::1"], r"--url http://\[::1: must be like"),
        (["--api-key", "a\nb"], "--api-key: must not contain line breaks"),
        (["--patience", "nan"], "--patience at least 0"),
    ],
)
async def test_an_impossible_option_is_named(tmp_path: Path, options: list[str], why: str) -> None:
    file = write(tmp_path / "in", [request(1)])
    with pytest.raises(ConfigError, match=why):
        _run([str(file), str(tmp_path / "out"), *options])


async def test_requests_that_change_meanwhile_end_it_with_a_line(server: Server, tmp_path: Path) -> None:
    file, out = write(tmp_path / "in", [request(1)]), tmp_path / "out"
    requests, written = RequestFile(file), AnswerFile(out)
    file.write_text("{")
    with pytest.raises(LineError, match="is not JSON"):
        await BatchClient(server.url, None, written, patience=60, on_answer=lambda: None).run(requests, 8)
    written.close()
    requests.close()


async def test_a_batch_may_run_its_own_model(tmp_path: Path) -> None:
    file = write(tmp_path / "in", [request(1), request(2, model="other")])
    with pytest.raises(ConfigError, match="names 2 models"):
        _run([str(file), str(tmp_path / "out"), "--model", "demo"])
    with pytest.raises(ConfigError, match="give --model or --url, not both"):
        _run([str(file), str(tmp_path / "out"), "--model", "demo", "--url", "x"])


@pytest.mark.slow
async def test_its_own_model_is_served_under_the_name_in_the_lines(tmp_path: Path) -> None:
    requested = [request(0, model="gpt-9", max_tokens=16, temperature=0)]
    requested[0]["body"]["messages"][0]["content"] = "What is 123 + 456?"
    file, out = write(tmp_path / "in", requested), tmp_path / "out"
    process = await batch(file, out, "--model", "demo")
    output, complained = await process.communicate()
    assert process.returncode == 0, complained
    assert b"1 requests: 1 answered" in output
    body = answers(out)[0]["response"]["body"]
    assert (body["model"], "579" in body["choices"][0]["message"]["content"]) == ("gpt-9", True)
