"""Two models in one real daemon with memory for one of them: requests move them, an operator does, and an engine that
sleeps is killed. One daemon for all cases, which run in order."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LOADS_ALL, Daemon, patched, running

pytestmark = pytest.mark.slow

OPTIONS = (
    "--device", "cpu", "--cpu-threads", "1", "--num-pages", "300", "--page-size", "16", "--host-kv-gib", "0.05",
    "--max-num-seqs", "8", "--drain-timeout", "120", "--wake-timeout", "240", "--admin-api-key", "secret",
    "--max-awake-models", "1", "--model", "demo served_model_name=a served_model_name=first",
    "--model", "demo served_model_name=b max_model_len=600",
)  # fmt: skip
ADMIN = {"Authorization": "Bearer secret"}
QUESTION = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    with running(folder, *OPTIONS, env=patched(folder / "site", LOADS_ALL)) as daemon:
        yield daemon


@pytest.fixture
def http(daemon: Daemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.url, timeout=240) as http:
        yield http


def ask(http: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json={**QUESTION, "model": model, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def states(http: httpx.Client) -> dict[str, str]:
    return {each["model"]: each["state"] for each in http.get("/ready").json()["models"]}


def until(condition: Any) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_is_awake_at_the_start_and_both_are_listed(daemon: Daemon, http: httpx.Client) -> None:
    assert "serves 2 models" in daemon.ready_line
    assert states(http) == {"a": "awake", "b": "asleep"}
    listed = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["a", "first", "b"]
    assert len(daemon.children("weft.engine.process")) == 1
    assert text(ask(http, "first")) == "42"


def test_requests_for_both_are_all_answered_and_the_models_alternate(http: httpx.Client) -> None:
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda name: text(ask(http, name)), "abbaba"))
    assert answers == ["42"] * 6
    assert sorted(states(http).values()) == ["asleep", "awake"]
    assert [model["max_model_len"] for model in http.get("/v1/models").json()["data"]][2] == 600


def test_a_sleeping_model_releases_its_memory_and_finds_its_pages_in_the_host_tier(http: httpx.Client) -> None:
    long = {"messages": [{"role": "user", "content": "Add these: " + "12 + 30, " * 30}], "max_tokens": 3}
    ask(http, "a", **long)
    again = ask(http, "a", **long)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again >= 64
    (awake,) = [e["engines"][0] for e in http.get("/admin/models", headers=ADMIN).json()["models"] if e["model"] == "a"]
    assert awake["state"] == "serving"
    slept = http.post("/admin/sleep", json={"model": "a"}, headers=ADMIN)
    assert slept.json() == {"model": "a", "state": "asleep"}
    assert [e.get("level") for e in http.get("/admin/models", headers=ADMIN).json()["models"]] == [1, 1]
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    assert ask(http, "a", **long)["usage"]["prompt_tokens_details"]["cached_tokens"] == again
    metrics = http.get("/metrics").text
    assert 'weft_model_state{model_name="a",state="awake"} 1.0' in metrics
    assert 'weft_model_state{model_name="b",state="asleep"} 1.0' in metrics


def test_an_operator_who_does_not_wait_ends_running_requests(daemon: Daemon, http: httpx.Client) -> None:
    body = {**QUESTION, "model": "a", "stream": True, "n": 8, "ignore_eos": True, "max_tokens": 1500}
    first, _ = daemon.children("weft.engine.process")  # as they were started: the model a, then b
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(first, signal.SIGSTOP)  # it does not end before the order to end
        with ThreadPoolExecutor(1) as thread:
            order = {"model": "a", "level": 2, "drain_seconds": 0}
            sleeping = thread.submit(httpx.post, f"{daemon.url}/admin/sleep", json=order, headers=ADMIN, timeout=240)
            rest = [line for line in lines if line.startswith("data: {")]
            assert sleeping.result().status_code == 200
    assert json.loads(rest[-1][6:])["error"]["code"] == "model_asleep"
    assert len(daemon.children("weft.engine.process")) == 1, "at level 2 the engine ends"
    assert states(http)["a"] == "asleep"


def test_a_sleeping_engine_that_is_killed_returns_on_request(daemon: Daemon, http: httpx.Client) -> None:
    assert states(http) == {"a": "asleep", "b": "asleep"}
    assert http.get("/ready").status_code == 200
    (sleeper,) = daemon.children("weft.engine.process")
    os.kill(sleeper, signal.SIGKILL)
    until(lambda: not daemon.children("weft.engine.process"))
    daemon.wait_for_log("it restarts when it is woken")
    assert states(http) == {"a": "asleep", "b": "asleep"}
    assert text(ask(http, "b")) == "42"
    assert states(http) == {"a": "asleep", "b": "awake"}
    assert Path(f"/proc/{daemon.children('weft.engine.process')[0]}").exists()


def test_the_daemon_exits_while_one_model_sleeps_and_requests_wait_for_another(
    daemon: Daemon, http: httpx.Client
) -> None:
    assert http.post("/admin/sleep", json={"model": "b"}, headers=ADMIN).status_code == 200
    with ThreadPoolExecutor() as thread:
        waiting = thread.submit(http.post, "/v1/chat/completions", json={**QUESTION, "model": "a"})
        until(lambda: states(http)["a"] == "waking")
        daemon.process.send_signal(signal.SIGTERM)
        answer = waiting.result()
    assert answer.status_code in (200, 503), answer.text  # 200 if it woke before the signal
    if answer.status_code == 503:
        assert answer.json()["error"]["code"] in ("draining", "model_asleep")
    assert daemon.process.wait(240) == 0


@pytest.mark.nightly
def test_the_crash_of_one_model_does_not_affect_the_other(tmp_path: Path) -> None:
    small = ("--device", "cpu", "--cpu-threads", "1", "--num-pages", "300", "--page-size", "16", "--max-num-seqs", "8")
    names = ("--models", "demo served_model_name=a", "demo served_model_name=b")
    with (
        running(tmp_path, *small, *names, "--no-restart-engine") as daemon,
        httpx.Client(base_url=daemon.url, timeout=240) as http,
    ):
        assert states(http) == {"a": "awake", "b": "awake"}
        both = sorted(daemon.children("weft.engine.process"))
        os.kill(both[1], signal.SIGKILL)
        until(lambda: "dead" in states(http).values())
        (dead,) = [name for name, state in states(http).items() if state == "dead"]
        alive = "ab".replace(dead, "")
        assert text(ask(http, alive)) == "42"
        refused = http.post("/v1/chat/completions", json={**QUESTION, "model": dead})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "dead")
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        # after its last message
        until(lambda: f'weft_model_state{{model_name="{dead}",state="dead"}} 1.0' in http.get("/metrics").text)
        os.kill(both[0], signal.SIGKILL)
        assert daemon.process.wait(240) == 1
