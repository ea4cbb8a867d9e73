"""The real daemon on a disk that is full, read-only, broken, slow or gone: every store, every kind of request."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from broken_disk import FAULTS, READS, BrokenDisk
from live import Daemon, patched, running

pytestmark = pytest.mark.slow

KEY = "a-key-that-is-read-from-the-disk"
SECONDS = 240  # for anything to happen, on a busy machine
LINE = '{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"a","max_tokens":2}}\n'
STORES = ("responses", "files")
REOPENS_SOON = "import weft.engine.memory.ssd_tier as tier; tier.REOPEN_SECONDS = 0.2"


class Server(NamedTuple):
    daemon: Daemon
    disk: BrokenDisk
    http: httpx.Client
    response: str
    conversation: str
    file: str
    batch: str

    def failing(self, store: str) -> bool:
        name = f'weft_storage_failing{{store="{store}"}} '
        return any(line.startswith(name) and line.endswith("1.0") for line in self.metrics())

    def ssd_up(self) -> bool:
        return 'weft_kv_tier_up{tier="ssd"} 1.0' in self.metrics()

    def metrics(self) -> list[str]:
        return self.http.get("/metrics").text.splitlines()

    def ask(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2, **fields})


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def upload(http: httpx.Client) -> httpx.Response:
    return http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", LINE.encode())})


def batch_of(http: httpx.Client, file: str) -> httpx.Response:
    return http.post("/v1/batches", json={"input_file_id": file, "endpoint": "/v1/completions"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("broken")
    try:
        disk = BrokenDisk(home / "disk", home / "shim")
    except RuntimeError as error:
        pytest.skip(str(error))
    at = disk.folder
    (at / "keys").write_text(KEY)
    options = {
        "responses-dir": at / "responses", "files-dir": at / "files", "api-key-file": at / "keys", "num-pages": 40,
        "page-size": 16, "host-kv-gib": 0.002, "ssd-kv-path": at / "ssd", "ssd-kv-gib": 0.06, "dtype": "float32",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    env = disk.env | {"XDG_CACHE_HOME": str(at / "cache")} | patched(home / "patch", REOPENS_SOON)
    with running(home, *words, env=env) as daemon:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=daemon.url, headers=headers, timeout=SECONDS) as http:
            made = Server(daemon, disk, http, "", "", "", "")
            items = [{"type": "message", "role": "user", "content": "hi"}]
            file = upload(http).json()["id"]
            batch = batch_of(http, file).json()["id"]
            until(lambda: http.get(f"/v1/batches/{batch}").json()["status"] == "completed")
            yield made._replace(
                response=made.ask().json()["id"],
                conversation=http.post("/v1/conversations", json={"items": items}).json()["id"],
                file=file,
                batch=batch,
            )


@pytest.fixture(params=FAULTS)
def fault(server: Server, request: pytest.FixtureRequest) -> Iterator[int]:
    """The disk fails during a test, and is whole again after it."""
    fails = f"storage of {STORES[0]} fails"
    before = server.daemon.stderr().count(fails)
    server.disk.fail(FAULTS[request.param])
    try:
        yield FAULTS[request.param]
    finally:
        server.disk.work()
    assert server.http.get(f"/v1/responses/{server.response}").status_code == 200
    stored = server.ask().json()
    assert stored["store"] is True
    assert server.http.get(f"/v1/responses/{stored['id']}").json()["id"] == stored["id"]
    assert upload(server.http).status_code == 200
    until(lambda: not any(map(server.failing, STORES)))
    assert server.daemon.stderr().count(fails) <= before + 1, "one line per change"
    assert server.http.get("/ready").status_code == 200


def test_an_answer_says_whether_it_is_stored(server: Server, fault: int) -> None:
    answer = server.ask()
    assert answer.status_code == 200
    assert answer.json()["status"] in ("completed", "incomplete")
    assert answer.json()["store"] is False
    assert answer.headers["x-weft-not-stored"] == ("store_full" if fault == FAULTS["full"] else "store_unusable")
    gone = server.http.get(f"/v1/responses/{answer.json()['id']}")
    assert gone.status_code == (500 if fault == READS else 404)
    with server.http.stream("POST", "/v1/responses", json={"input": "hi", "max_output_tokens": 2, "stream": True}) as s:
        events = [json.loads(line[6:]) for line in s.iter_lines() if line.startswith("data: {")]
    assert events[-1]["response"]["store"] is False
    assert "x-weft-not-stored" not in server.ask(store=False).headers
    until(lambda: server.failing("responses"))
    assert server.http.get("/ready").status_code == 200


def test_connections_opened_on_a_read_only_disk_do_not_stay_read_only(server: Server) -> None:
    for fault in (READS, FAULTS["read-only"]):  # the first closes the connections, the second opens them again
        server.disk.fail(fault)
        for _ in range(2):
            server.ask()
            server.http.get(f"/v1/responses/{server.response}")
    server.disk.work()
    until(lambda: not server.failing("responses"))
    assert server.ask().json()["store"] is True


@pytest.mark.parametrize("fields", [{"background": True}, {"conversation": "stored"}])
def test_work_that_needs_the_store_is_refused_before_it_starts(
    server: Server, fault: int, fields: dict[str, Any]
) -> None:
    server.ask()  # it notices
    if "conversation" in fields:
        fields = {"conversation": server.conversation}
    refused = server.ask(**fields)
    check_error(refused, fault, "store")


def test_a_background_response_outlives_a_failing_disk(server: Server, fault: int) -> None:
    server.disk.work()
    until(lambda: server.ask().json()["store"])
    made = server.ask(background=True, max_output_tokens=100, ignore_eos=True)
    assert made.status_code == 200, made.text
    server.disk.fail(fault)
    until(lambda: "weft_requests_running 0.0" in server.metrics())
    server.disk.work()
    path = f"/v1/responses/{made.json()['id']}"
    until(lambda: server.http.get(path).json()["status"] not in ("queued", "in_progress"))
    assert server.http.get(path).json()["status"] == "incomplete"
    assert server.http.get(path).json()["usage"]["output_tokens"] == 100


def check_error(answer: httpx.Response, fault: int, kind: str) -> None:
    """An OpenAI error with the cause."""
    full = fault == FAULTS["full"]
    assert answer.status_code == (507 if full else 500), answer.text
    error = answer.json()["error"]
    assert error["code"] == f"{kind}_full" if full else f"{kind}_unusable"
    assert error["message"]


WRITES: dict[str, tuple[str, Callable[[Server], httpx.Response]]] = {
    "delete a response": ("store", lambda s: s.http.delete(f"/v1/responses/{s.response}")),
    "create a conversation": ("store", lambda s: s.http.post("/v1/conversations", json={})),
    "change a conversation": (
        "store",
        lambda s: s.http.post(f"/v1/conversations/{s.conversation}", json={"metadata": {"a": "b"}}),
    ),
    "add an item": (
        "store",
        lambda s: s.http.post(
            f"/v1/conversations/{s.conversation}/items",
            json={"items": [{"type": "message", "role": "user", "content": "hi"}]},
        ),
    ),
    "delete a conversation": ("store", lambda s: s.http.delete(f"/v1/conversations/{s.conversation}")),
    "upload a file": ("files", lambda s: upload(s.http)),
    "create a batch": ("files", lambda s: batch_of(s.http, s.file)),
}
READ = (
    "/v1/responses/{0.response}", "/v1/responses/{0.response}/input_items", "/v1/conversations/{0.conversation}",
    "/v1/conversations/{0.conversation}/items", "/v1/files/{0.file}", "/v1/files/{0.file}/content",
    "/v1/batches/{0.batch}",
)  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_a_write_fails_with_its_cause_and_changes_nothing(server: Server, fault: int, write: str) -> None:
    kind, send = WRITES[write]
    check_error(send(server), fault, kind)
    until(lambda: server.failing("responses" if kind == "store" else "files"))


def test_reads_need_no_write(server: Server, fault: int) -> None:
    paths = [path.format(server) for path in READ]
    if fault != READS:
        assert [server.http.get(path).status_code for path in paths] == [200] * len(paths)
        continued = server.ask(previous_response_id=server.response)
        assert (continued.status_code, continued.json()["store"]) == (200, False)
    else:
        statuses = {path: server.http.get(path).status_code for path in paths}
        assert statuses == dict.fromkeys(paths, 500)
    assert server.http.get("/v1/files").status_code == 200
    assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("name", [*FAULTS, "slow", "gone"])
def test_a_key_file_is_read_again_or_the_old_keys_stay(server: Server, name: str) -> None:
    keys = server.disk.folder / "keys"
    readable = name not in ("unreadable", "gone")
    told = "reloaded 1 API keys" if readable else "keeping the old keys"
    before = server.daemon.stderr().count(told)
    if name == "gone":
        keys.rename(keys.with_name("away"))
    elif name == "slow":
        server.disk.hang()
    else:
        server.disk.fail(FAULTS[name])
    try:
        os.kill(server.daemon.process.pid, signal.SIGHUP)
        server.daemon.wait_for_log(told, before + 1)
        assert server.http.get("/v1/models").status_code == 200
    finally:
        server.disk.work()
        if name == "gone":
            keys.with_name("away").rename(keys)


def test_a_batch_waits_for_the_disk(server: Server, fault: int) -> None:
    server.disk.work()
    file = upload(server.http).json()["id"]
    batch = batch_of(server.http, file).json()["id"]
    server.disk.fail(fault)
    assert server.ask().status_code == 200
    server.disk.work()
    path = f"/v1/batches/{batch}"
    until(lambda: server.http.get(path).json().get("status") in ("completed", "failed"))
    found = server.http.get(path).json()
    assert (found["status"], found["request_counts"]["completed"]) == ("completed", 1)


@pytest.mark.usefixtures("fault")
def test_the_ssd_tier_goes_off_and_comes_back(server: Server) -> None:
    number = 0

    def fill() -> bool:
        nonlocal number
        number += 1
        body = {"prompt": [10 + number, *range(20, 200)], "max_tokens": 2}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        return not server.ssd_up()

    until(fill)
    server.disk.work()
    until(server.ssd_up)


def test_reads_and_answers_do_not_wait_for_a_slow_disk(server: Server) -> None:
    server.disk.hang()
    with ThreadPoolExecutor(2) as others:
        try:
            writes = [others.submit(server.http.post, "/v1/conversations", json={}), others.submit(upload, server.http)]
            for path in READ:
                assert server.http.get(path.format(server)).status_code == 200
            assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
            assert server.http.get("/health").status_code == 200
            assert not writes[1].done()
        finally:
            server.disk.work()
        # The store gives up on a disk after a while.
        assert writes[0].result(SECONDS).status_code in (200, 503)
        assert writes[1].result(SECONDS).status_code == 200
    until(lambda: not any(map(server.failing, STORES)))
    until(server.ssd_up)


def test_a_disk_that_is_gone_for_a_while(server: Server) -> None:
    away = server.disk.folder.with_name("away")
    server.disk.folder.rename(away)
    try:
        for path in READ:
            assert server.http.get(path.format(server)).status_code in (404, 500)
        answer = server.ask()
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        assert upload(server.http).status_code == 500
    finally:
        away.rename(server.disk.folder)
    until(lambda: not any(map(server.failing, STORES)))
    for path in READ:
        assert server.http.get(path.format(server)).status_code == 200
    assert server.ask().json()["store"] is True
    until(server.ssd_up)


@pytest.mark.parametrize(
    "name", ["full", "unreadable", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("read-only", "broken"))]
)
def test_a_daemon_starts_while_its_caches_cannot_be_used(tmp_path: Path, name: str) -> None:
    try:
        disk = BrokenDisk(tmp_path / "disk", tmp_path / "shim")
    except RuntimeError as error:
        pytest.skip(str(error))
    disk.fail(FAULTS[name])
    caches = {name: str(disk.folder / name) for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME")}
    ssd = ("--host-kv-gib", "0.01", "--ssd-kv-gib", "0.05", "--ssd-kv-path", str(disk.folder / "ssd"))
    with running(tmp_path, *ssd, env=disk.env | caches | patched(tmp_path / "patch", REOPENS_SOON)) as daemon:
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=SECONDS).status_code == 200
        assert 'weft_kv_tier_up{tier="ssd"} 0.0' in httpx.get(f"{daemon.url}/metrics", timeout=SECONDS).text
        disk.work()
        until(lambda: 'weft_kv_tier_up{tier="ssd"} 1.0' in httpx.get(f"{daemon.url}/metrics", timeout=SECONDS).text)


@pytest.mark.nightly
def test_a_daemon_starts_while_its_caches_are_slow(tmp_path: Path) -> None:
    try:
        disk = BrokenDisk(tmp_path / "disk", tmp_path / "shim")
    except RuntimeError as error:
        pytest.skip(str(error))
    disk.hang(500)
    caches = {name: str(disk.folder / name) for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME")}
    with running(tmp_path, env=disk.env | caches) as daemon:
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=SECONDS).status_code == 200


@pytest.mark.parametrize(
    "name", ["full", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("read-only", "broken"))]
)
def test_requests_are_served_while_the_log_cannot_be_written(tmp_path: Path, name: str) -> None:
    try:
        disk = BrokenDisk(tmp_path / "disk", tmp_path / "shim")
    except RuntimeError as error:
        pytest.skip(str(error))
    disk.fail(FAULTS[name])
    with (
        running(disk.folder, "--log-requests", env=disk.env) as daemon,
        httpx.Client(base_url=daemon.url, timeout=SECONDS) as http,
    ):

        def served() -> int:
            """Send a request and return how many lines of the log are lost."""
            body = {"prompt": "a", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
            lines = http.get("/metrics").text.splitlines()
            return sum(
                int(float(line.split()[-1])) for line in lines if line.startswith("weft_log_lines_dropped_total")
            )

        before = served()
        until(lambda: served() > before)
        assert not daemon.stderr()
        disk.work()
        until(lambda: served() and "log lines dropped" in daemon.stderr())
        disk.hang()
        for _ in range(20):
            served()
        os.kill(daemon.process.pid, signal.SIGTERM)
        assert daemon.process.wait(SECONDS) == 0


@pytest.mark.nightly
def test_requests_are_served_while_the_folder_of_caches_and_log_is_gone(tmp_path: Path) -> None:
    folder, away = tmp_path / "disk", tmp_path / "away"
    folder.mkdir()
    caches = {name: str(folder / name) for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME")}
    with running(folder, "--log-requests", env=caches) as daemon, httpx.Client(timeout=SECONDS) as http:

        def serve() -> None:
            body = {"prompt": "a", "max_tokens": 2}
            assert http.post(f"{daemon.url}/v1/completions", json=body).status_code == 200

        folder.rename(away)
        try:
            serve()
        finally:
            away.rename(folder)
        before = daemon.stderr()
        serve()
        until(lambda: daemon.stderr() != before)


def test_a_hung_disk_does_not_keep_the_daemon_from_ending(tmp_path: Path) -> None:
    try:
        disk = BrokenDisk(tmp_path / "disk", tmp_path / "shim")
    except RuntimeError as error:
        pytest.skip(str(error))
    words = (
        "--files-dir",
        f"{disk.folder}/files",
        "--responses-dir",
        f"{disk.folder}/responses",
        "--drain-timeout",
        "1",
    )
    with (
        running(tmp_path, *words, env=disk.env) as daemon,
        httpx.Client(base_url=daemon.url, timeout=SECONDS) as http,
        ThreadPoolExecutor(1) as other,
    ):
        batch = batch_of(http, upload(http).json()["id"]).json()["id"]
        until(lambda: http.get(f"/v1/batches/{batch}").json()["status"] != "validating")
        disk.hang()
        answer = other.submit(http.post, "/v1/responses", json={"input": "hi", "max_output_tokens": 2})
        until(lambda: 'weft_storage_failing{store="responses"} 1.0' in http.get("/metrics").text.splitlines())
        os.kill(daemon.process.pid, signal.SIGTERM)
        assert daemon.process.wait(SECONDS) == 0
        assert answer.exception() or answer.result().status_code in (200, 503)
