"""The real daemon with an SSD tier: killed at any moment, it answers right after a restart and hits its stored
pages."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from conversations import Conversations
from harness import Harness
from live import LOADS_ALL, Daemon, patched, running

from weft.engine.memory.extent import Geometry
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.memory.ssd_store import chains
from weft.engine.memory.store_file import StoreFile
from weft.server.daemon.cli import main

pytestmark = pytest.mark.slow

PAGE, ANSWER = 16, 8
KILLS = int(os.environ.get("TEST_KILLS", "2"))
LOCK_WAIT_SECONDS = 240.0


def options(path: Path) -> list[str]:
    """A small engine: a GPU pool for all requests, and a host pool that overflows to the disk."""
    pages = {"--num-pages": 160, "--page-size": PAGE, "--host-kv-gib": 0.008, "--ssd-kv-gib": 0.06}
    return [*(str(x) for pair in pages.items() for x in pair), "--dtype", "float32", "--ssd-kv-path", str(path)]


class Reference(NamedTuple):
    prompts: list[np.ndarray]
    answers: list[list[int]]
    """answers of an engine without any cache"""
    index: PrefixIndex
    """answers of a model like the daemon's"""

    def stored(self, path: Path) -> tuple[int, int]:
        """(pages on the disk, prompt tokens that a restart must find there)."""
        file = StoreFile(path, None, LOCK_WAIT_SECONDS)  # the engine may outlive its daemon by seconds
        records = file.headers()
        file.close()
        keys = {record.key for _, record in chains(records, self.index.root)}
        tokens = 0
        for prompt in self.prompts:
            for key in self.index.keys(prompt[: (len(prompt) - 1) // PAGE * PAGE].astype(np.int32), PAGE, ""):
                if key not in keys:
                    break
                tokens += PAGE
        return len(records), tokens


@pytest.fixture(scope="module")
def reference() -> Reference:
    talk = Conversations(6, 150, ANSWER)
    plain = Harness("demo", page_size=PAGE, num_pages=200, prefix_caching=False)
    return Reference(talk.prompts, talk.ask(plain).tokens, plain.engine.scheduler.pool.index)


def complete(http: httpx.Client, prompts: list[np.ndarray]) -> httpx.Response:
    body = {"prompt": [p.tolist() for p in prompts], "temperature": 0, "max_tokens": ANSWER, "return_token_ids": True}
    return http.post("/v1/completions", json=body)


@pytest.fixture(scope="module")
def second_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A daemon on a path in use. It retries for some seconds, so it starts before the test that waits for it."""
    path = tmp_path_factory.mktemp("taken")
    first = StoreFile(path, Geometry(PAGE, 4096, 4, b"o" * 16))
    command = [sys.executable, "-P", "-m", "weft.server.daemon.cli", "serve", "--port", "0", *options(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as second:
        yield second
        second.kill()
    first.close()


@contextlib.contextmanager
def load(daemon: Daemon, prompts: list[np.ndarray], rng: Random) -> Iterator[threading.Event]:
    """Clients extend the prompts at random until the daemon fails. The event is set after the first answer."""
    answered = threading.Event()

    def client(seed: int) -> None:
        draw = Random(seed)
        with httpx.Client(base_url=daemon.url, timeout=240) as http, contextlib.suppress(httpx.HTTPError):
            going = True
            while going:
                tail = np.array([draw.randrange(6, 2000) for _ in range(60)])
                longer = [np.concatenate((p, tail)) for p in draw.sample(prompts, 2)]
                going = complete(http, longer).status_code == 200
                if going:
                    answered.set()

    clients = [threading.Thread(target=client, args=(rng.getrandbits(32),)) for _ in range(3)]
    for thread in clients:
        thread.start()
    yield answered
    for thread in clients:
        thread.join()


def value(http: httpx.Client, name: str, label: str = "") -> float:
    """The value of a metric with this label, or summed over all."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and label in line)


@pytest.mark.usefixtures("second_daemon")
def test_a_daemon_killed_at_any_moment_answers_right_and_hits_stored_pages(
    tmp_path: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hits, kept = tmp_path / "kv", 0, 0
    env = patched(tmp_path / "site", LOADS_ALL)
    for seed in range(KILLS + 1):
        rng = Random(seed)
        with (
            running(tmp_path, *options(path), env=env) as daemon,
            httpx.Client(base_url=daemon.url, timeout=240) as http,
        ):
            response = complete(http, reference.prompts)
            assert response.status_code == 200, response.text
            answer = response.json()
            assert [c["token_ids"] for c in answer["choices"]] == reference.answers
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == kept
            assert not value(http, "weft_kv_tier_failures_total"), "a page that the index promised did not hold"
            hits += kept
            if seed == KILLS:
                break
            with load(daemon, reference.prompts, rng) as answered:
                assert answered.wait(240)
                end = time.monotonic() + 240
                while not value(http, "weft_kv_tier_used_pages", 'tier="ssd"') and time.monotonic() < end:
                    time.sleep(0.02)
                time.sleep(rng.uniform(0.0, 0.6))
                engine = daemon.engine_pid
                daemon.process.send_signal(signal.SIGKILL)
                if seed % 2 == 0:  # or the engine notices by itself, and stores as much as it has time for
                    os.kill(engine, signal.SIGKILL)
        pages, kept = reference.stored(path)
        assert main(["cache", "verify", str(path)]) == 0
        out = capsys.readouterr().out
        (hold,) = [line.split("│")[2].strip() for line in out.splitlines() if "intact pages" in line]
        assert hold == f"{pages:,}"
    assert hits > 0


def test_a_second_daemon_on_one_path_is_refused(second_daemon: subprocess.Popen[str]) -> None:
    _, stderr = second_daemon.communicate(timeout=240)
    assert second_daemon.returncode == 1
    assert "is in use by another weft" in stderr
    assert "Traceback" not in stderr


def test_a_removed_store_is_logged_once_and_exposed_by_an_idle_daemon(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with running(tmp_path, *options(store)) as daemon:

        def up() -> float:
            lines = httpx.get(f"{daemon.url}/metrics", timeout=240).text.splitlines()
            return next((float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith('weft_kv_tier_up{tier="ssd"}')), -1)

        body = {"prompt": [*range(10, 60)], "max_tokens": 4}
        assert httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=240).status_code == 200
        assert up() == 1
        shutil.rmtree(store)
        end = time.monotonic() + 240
        while up() and time.monotonic() < end:
            time.sleep(0.1)
        assert up() == 0
        assert httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=240).status_code == 200
        daemon.wait_for_log(f"{store / 'pages.weft'} was removed")
        assert daemon.wait_for_log("SSD tier switched off").count("SSD tier switched off") == 1


def test_a_store_of_another_dtype_restarts_empty_and_logs_it(tmp_path: Path) -> None:
    store, line = tmp_path / "store", "was reset: its pages belong to another model, dtype, rope or --tier-kv-format"
    with running(tmp_path, *options(store)) as daemon:
        assert "was reset" not in daemon.stderr()
        daemon.process.terminate()
        daemon.process.wait(240)
    with running(tmp_path, *options(store), "--dtype", "bfloat16") as daemon:
        assert daemon.wait_for_log(line).count(line) == 1
