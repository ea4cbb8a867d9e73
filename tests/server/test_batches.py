"""`/v1/files` and `/v1/batches`: through the official client, over restarts, with lower priority than all other
requests."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from live import Daemon
from stub import Script, Server, serving

from weft.engine.wire.messages import EngineStats, SchedulerStats
from weft.server.batches import files as files_module
from weft.server.batches import runner
from weft.server.batches.lines import ENDPOINTS
from weft.server.batches.records import Folder

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "POLL_SECONDS", 0.02)
        patch.setattr(runner, "LONGEST_WAIT", 0.1)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with serving(files_dir=str(tmp_path_factory.mktemp("files"))) as server:
        yield server


def lines(count: int, **body: Any) -> bytes:
    message = {"role": "user", "content": "hi"}
    body = {"model": "stub", "messages": [message], **body}
    each = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return b"".join(json.dumps({"custom_id": f"r{i}", **each}).encode() + b"\n" for i in range(count))


async def with_client(server: Server, do: Callable[[openai.OpenAI], Any], key: str = "none") -> Any:
    def work() -> Any:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as api:
            return do(api)

    return await asyncio.to_thread(work)


def until(api: openai.OpenAI, id: str, *statuses: str) -> Any:
    end = time.monotonic() + 240
    while (batch := api.batches.retrieve(id)).status not in statuses:
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def make(api: openai.OpenAI, content: bytes, **options: Any) -> Any:
    file = api.files.create(file=("in.jsonl", content), purpose="batch")
    given: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return api.batches.create(input_file_id=file.id, **given)


async def test_files_through_the_official_client(kept: Server) -> None:
    def calls(api: openai.OpenAI) -> None:
        content = os.urandom(3 * 2**20) + b"\r\n--boundary\r\n"
        file = api.files.create(
            file=("größe.jsonl", io.BytesIO(content)),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )
        assert (file.bytes, file.filename, file.purpose) == (len(content), "größe.jsonl", "batch")
        assert file.expires_at == file.created_at + 7200
        assert api.files.retrieve(file.id) == file
        assert api.files.content(file.id).read() == content
        others = [api.files.create(file=b"x", purpose="batch").id for _ in range(2)]
        assert [f.id for f in api.files.list(limit=1)][::-1] == [f.id for f in api.files.list(order="asc")]
        assert {f.id for f in api.files.list()} >= {file.id, *others}
        for id in (file.id, *others):
            assert api.files.delete(id).deleted
            with pytest.raises(openai.NotFoundError):
                api.files.retrieve(id)

    await with_client(kept, calls)


async def upload(server: Server, filename: bytes, content: bytes = b"0123456789") -> dict[str, Any]:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n%s\r\n--b--\r\n'
    ) % (filename, content)
    kind = {"content-type": "multipart/form-data; boundary=b"}
    response = await server.http.post("/v1/files", content=form, headers=kind)
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize(
    ("given", "kept_as", "disposition"),
    [
        (b"in.jsonl", "in.jsonl", 'attachment; filename="in.jsonl"'),
        (b"../../etc/x", "x", 'attachment; filename="x"'),
        (rb"C:\\Users\\me\\in.jsonl", "in.jsonl", 'attachment; filename="in.jsonl"'),
        (b"/a/..", "file", 'attachment; filename="file"'),
        (b"a\tb\x00c\x7f", "abc", 'attachment; filename="abc"'),
        ("größe €.jsonl".encode(), "größe €.jsonl",
         "attachment; filename=\"gr__e _.jsonl\"; filename*=UTF-8''gr%C3%B6%C3%9Fe%20%E2%82%AC.jsonl"),
        (rb'a\"; b=\"c%41', 'a"; b="c%41',
         "attachment; filename=\"a_; b=_c_41\"; filename*=UTF-8''a%22%3B%20b%3D%22c%2541"),
    ],
)  # fmt: skip
async def test_a_file_is_downloaded_under_a_name_without_a_path(
    kept: Server, given: bytes, kept_as: str, disposition: str
) -> None:
    file = await upload(kept, given)
    assert file["filename"] == kept_as
    response = await kept.http.get(f"/v1/files/{file['id']}/content")
    assert response.headers["content-disposition"] == disposition


async def test_a_range_outside_of_a_file_is_an_error_with_its_size(kept: Server) -> None:
    path = f"/v1/files/{(await upload(kept, b'in.jsonl'))['id']}/content"
    for requested in ("bytes=10-", "bytes=99999999999999999999-", "bytes=-0"):
        response = await kept.http.get(path, headers={"range": requested})
        assert (response.status_code, response.headers["content-range"]) == (416, "bytes */10")
        assert response.json()["error"]["code"] == "range_not_satisfiable"
    for requested in ("bytes=5-3", "items=0-1", "bytes", "bytes=x", "bytes="):
        response = await kept.http.get(path, headers={"range": requested})
        assert (response.status_code, response.text) == (200, "0123456789")
    for requested, part in {"bytes=2-4": "234", "bytes=7-99": "789", "bytes=-3": "789"}.items():
        response = await kept.http.get(path, headers={"range": requested})
        assert (response.status_code, response.text) == (206, part)


async def test_a_batch_through_the_official_client(kept: Server) -> None:
    kept.engine.script = Script("one two")

    def calls(api: openai.OpenAI) -> None:
        content = lines(5) + lines(6, temperature=9).splitlines(True)[5]
        batch = make(api, content, metadata={"who": "me"})
        assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"who": "me"})
        batch = until(api, batch.id, "completed")
        assert batch.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
        assert batch.completed_at >= batch.finalizing_at >= batch.in_progress_at >= batch.created_at
        answers = [json.loads(line) for line in api.files.content(batch.output_file_id).text.splitlines()]
        assert {a["custom_id"] for a in answers} == {f"r{i}" for i in range(5)}
        assert {a["response"]["body"]["choices"][0]["message"]["content"] for a in answers} == {"one two"}
        (failed,) = [json.loads(line) for line in api.files.content(batch.error_file_id).text.splitlines()]
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("r5", 400)
        assert api.files.retrieve(batch.output_file_id).purpose == "batch_output"
        assert next(iter(api.batches.list())).id == batch.id
        with pytest.raises(openai.ConflictError):
            api.batches.cancel(batch.id)

    await with_client(kept, calls)
    metrics = (await kept.http.get("/metrics")).text
    assert 'weft_requests_total{endpoint="/v1/batches",status="200"}' in metrics


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_batch_may_use_every_endpoint_of_a_line(kept: Server, endpoint: str) -> None:
    prompts = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
    if endpoint == "/v1/embeddings":
        del prompts["messages"]  # an alternative to `input`
    body = {"model": "stub", **prompts}  # fields that an endpoint does not support are ignored
    line = {"custom_id": "r0", "method": "POST", "url": endpoint, "body": body}

    def calls(api: openai.OpenAI) -> None:
        batch = until(api, make(api, json.dumps(line).encode(), endpoint=endpoint).id, "completed")
        assert batch.request_counts.model_dump() == {"total": 1, "completed": 1, "failed": 0}

    await with_client(kept, calls)


async def test_a_batch_waits_for_all_other_requests(kept: Server) -> None:
    kept.engine.added.clear()
    kept.engine.stats = EngineStats(scheduler=SchedulerStats(waiting=1))

    def first(api: openai.OpenAI) -> str:
        batch = make(api, lines(3, priority=1500) + lines(4).splitlines(True)[3])
        until(api, batch.id, "in_progress")
        time.sleep(0.2)
        return str(batch.id)

    id = await with_client(kept, first)
    assert not kept.engine.added, "somebody waits, and the batch adds to it"
    kept.engine.stats = EngineStats()
    await with_client(kept, lambda api: until(api, id, "completed"))
    assert sorted(m.priority for m in kept.engine.added) == [1000] + [1500] * 3


async def test_a_batch_fills_most_slots_and_no_more(tmp_path: Path) -> None:
    async with serving(max_num_seqs=16, files_dir=str(tmp_path)) as server:
        gate = asyncio.Event()
        server.engine.script = Script("a", gate=gate)
        batch = await with_client(server, lambda api: make(api, lines(40)))
        await server.settle(lambda: server.engine.num_open == 14)
        await asyncio.sleep(0.2)
        assert server.engine.num_open == 14
        gate.set()
        await with_client(server, lambda api: until(api, batch.id, "completed"))


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_cancelled_and_expired_batches_keep_their_answers(tmp_path: Path, status: str) -> None:
    async with serving(max_num_seqs=8, files_dir=str(tmp_path)) as server:
        engine, gate = server.engine, asyncio.Event()
        play = engine._play

        async def play_four(request: Any, script: Script) -> None:
            if engine.added.index(request) >= 4:
                await gate.wait()
            await play(request, script)

        engine._play = play_four  # type: ignore[method-assign]
        batch = await with_client(server, lambda api: make(api, lines(20)))
        await server.settle(lambda: len(engine.added) == 11)
        if status == "cancelled":
            assert (await with_client(server, lambda api: api.batches.cancel(batch.id))).status == "cancelling"
        else:
            (work,) = server.front.config.app.state.runner._works.values()  # type: ignore[union-attr]
            work.batch.expires_at = 1
        ended = await with_client(server, lambda api: until(api, batch.id, status))
        assert ended.request_counts.model_dump() == {"total": 20, "completed": 4, "failed": 16}
        assert len(engine.aborted) == 7, "what was under way is dropped"
        ids = (ended.output_file_id, ended.error_file_id)
        content = await with_client(server, lambda api: "".join(api.files.content(id).text for id in ids))
        found = [json.loads(line) for line in content.splitlines()]
        assert sorted(a["custom_id"] for a in found) == sorted(f"r{i}" for i in range(20))
        assert [a["error"]["code"] for a in found if a["response"] is None] == [f"batch_{status}"] * 16


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", 1),
        (b"{\n", "invalid_json_line", 1),
        (lines(1) + lines(1), "duplicate_custom_id", 2),
        (lines(1).replace(b"chat/", b""), "invalid_url", 1),
    ],
)
async def test_a_wrong_file_fails_the_batch_with_its_line(kept: Server, content: bytes, code: str, line: int) -> None:
    def calls(api: openai.OpenAI) -> None:
        batch = until(api, make(api, content).id, "failed")
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line)

    await with_client(kept, calls)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"completion_window": "1y"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"metadata": {"a": "x" * 600}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_wrong_batches_are_refused(kept: Server, options: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h", **options}
    response = await kept.post("/v1/batches", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_wrong_uploads_are_refused(kept: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    post = kept.http.post
    for options, status in [
        ({"files": {"file": b"x"}}, 400),
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, 400),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch", "file": ""}}, 400),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, 400),
        ({"json": {"purpose": "batch"}}, 400),
        ({"content": b"--x\r\nnothing", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[anchor]": "now"}}, 400),
        ({"files": {"file": b"x"}, "data": {f"f{i}": "" for i in range(40)}}, 400),
    ]:
        response = await post("/v1/files", **options)  # type: ignore[arg-type]
        assert (response.status_code, "error" in response.json()) == (status, True), response.text
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 2**21)
    response = await post("/v1/files", files={"file": bytes(2**21 + 1)}, data={"purpose": "batch"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "files_full")
    monkeypatch.setattr(files_module, "MAX_FILES", 0)
    response = await post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
    assert response.status_code == 413
    folder: Folder = kept.front.config.app.state.folder  # type: ignore[union-attr]
    assert not [*folder.files._partial.iterdir()], "what was refused is gone"


async def test_keys_see_only_their_own_files_and_their_batches_end_with_them(tmp_path: Path) -> None:
    async with serving(api_key=["a", "b"], files_dir=str(tmp_path)) as server:
        batch = await with_client(server, lambda api: until(api, make(api, lines(2)).id, "completed"), "a")
        assert [m.tenant for m in server.engine.added] == [0, 0]

        def stranger(api: openai.OpenAI) -> None:
            assert [*api.files.list()] == [*api.batches.list()] == []
            for call in (api.files.retrieve, api.files.content, api.files.delete):
                with pytest.raises(openai.NotFoundError):
                    call(batch.input_file_id)
            with pytest.raises(openai.NotFoundError):
                api.batches.cancel(batch.id)
            with pytest.raises(openai.BadRequestError):
                api.batches.create(
                    input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
                )

        await with_client(server, stranger, "b")
        server.service.engine_died(restarting=True)  # so that no line starts
        batch = await with_client(server, lambda api: make(api, lines(2)), "a")
        await with_client(server, lambda api: until(api, batch.id, "in_progress"), "a")
        keys, server.service.keys[0] = server.service.keys[0], b""
        server.service.attach(server.engine, server.engine.describe(), server.engine.tokenizer)
        folder: Folder = server.front.config.app.state.folder  # type: ignore[union-attr]
        await server.settle(lambda: not folder.batches.open())
        server.service.keys[0] = keys
        ended = await with_client(server, lambda api: api.batches.retrieve(batch.id), "a")
        assert (ended.status, ended.errors.data[0].code) == ("failed", "invalid_api_key")


async def test_a_dying_engine_is_waited_out(tmp_path: Path) -> None:
    async with serving(files_dir=str(tmp_path)) as server:
        gate = asyncio.Event()
        server.engine.script = Script("a", gate=gate)
        batch = await with_client(server, lambda api: make(api, lines(3)))
        await server.settle(lambda: server.engine.num_open == 3)
        server.engine.script = Script("b")
        for stream in list(server.engine._streams.values()):
            stream._dead = "the engine ended"
            stream.wake()
        ended = await with_client(server, lambda api: until(api, batch.id, "completed"))
        assert ended.request_counts.completed == 3


async def test_a_server_error_is_the_answer_of_its_line(kept: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.service.loaded.text, "encode", lambda *_, **__: 1 / 0)
    body = {"model": "stub", "prompt": "hi"}
    line = {"custom_id": "r0", "method": "POST", "url": "/v1/completions", "body": body}

    def calls(api: openai.OpenAI) -> None:
        batch = until(api, make(api, json.dumps(line).encode(), endpoint="/v1/completions").id, "completed")
        assert batch.request_counts.model_dump() == {"total": 1, "completed": 0, "failed": 1}
        (failed,) = [json.loads(line) for line in api.files.content(batch.error_file_id).text.splitlines()]
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("r0", 500)
        assert failed["response"]["body"]["error"]["code"] == "internal_error"

    await with_client(kept, calls)


async def test_every_operation_has_its_own_name(kept: Server) -> None:
    """Client generators make methods of these names."""
    paths = (await kept.http.get("/openapi.json")).json()["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert sorted(set(names)) == sorted(names)


async def test_without_a_folder_the_endpoints_do_not_exist() -> None:
    async with serving() as server:
        assert (await server.http.get("/v1/files")).status_code == 404
        assert "/v1/batches" not in (await server.http.get("/openapi.json")).json()["paths"]


@pytest.mark.slow
async def test_a_killed_daemon_resumes_and_every_line_is_there_once(tmp_path: Path) -> None:
    options = ("--files-dir", str(tmp_path / "files"), "--api-workers", "2", "--no-ui")
    body = {"messages": [{"role": "user", "content": "What is 123 + 456?"}], "max_tokens": 8, "temperature": 0}
    each = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    content = b"".join(json.dumps({"custom_id": f"r{i}", **each}).encode() + b"\n" for i in range(200))
    daemon = Daemon(tmp_path / "log", *options, "--max-num-seqs", "1")
    try:
        daemon.wait_ready()
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as api:
            batch = make(api, content)
            out = tmp_path / "files" / "batches" / f"{batch.id}.out"
            end = time.monotonic() + 240
            while not out.exists() or out.read_bytes().count(b"\n") < 20:
                assert time.monotonic() < end
                time.sleep(0.01)
    finally:
        daemon.end()  # SIGKILL
    before = out.read_bytes().count(b"\n")
    assert 0 < before < 200
    daemon = Daemon(tmp_path / "log", *options)
    try:
        daemon.wait_ready()
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as api:
            # Any process may answer, even one of them that is killed.
            for _ in range(4):
                assert api.batches.retrieve(batch.id).id == batch.id
            ended = until(api, batch.id, "completed")
            answers = [json.loads(line) for line in api.files.content(ended.output_file_id).text.splitlines()]
    finally:
        daemon.end()
    assert sorted(a["custom_id"] for a in answers) == sorted(f"r{i}" for i in range(200))
    assert {a["response"]["body"]["choices"][0]["message"]["content"] for a in answers} == {"579"}
