"""A real Prometheus scrapes a real daemon under load: every panel has data, and the counters equal the clients' counts.

The daemon has two API processes, few slots and few pages, and all KV tiers, so that every part of it is at work.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from files import DEPLOY, RULES, queries, read_yaml
from free_port import free_port
from live import Daemon, running

from weft.server.daemon.cli import main

pytestmark = pytest.mark.slow

LOAD_SECONDS = 8.0
USERS = 6
INTERVAL = "20s"
"""for rates: covers the load"""
PROMPT_TOKENS = 300
OPTIONS = ("--api-workers", "2", "--max-num-seqs", "4", "--num-pages", "40", "--cpu-threads", "1")

EMPTY = {"Engine restarts"}
"""metrics that have data only after a failure"""
SOMETIMES = {"Power", "Joules per token", "Acceptance length"}
"""metrics that have data only if the machine counts joules, or if drafts are verified"""


class Prometheus:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=240)

    def query(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        answer = self._http.get("/api/v1/query", params={"query": expr} | ({"time": at} if at is not None else {}))
        body = answer.json()
        assert body["status"] == "success", (expr, body)
        result: list[dict[str, Any]] = body["data"]["result"]
        return result

    def value(self, expr: str) -> float | None:
        result = self.query(expr)
        return float(result[0]["value"][1]) if result else None

    def wait_for(self, expr: str, value: float, seconds: float = 240) -> None:
        """Wait until an expression has this value."""
        deadline = time.monotonic() + seconds
        while (found := self._value_or_none(expr)) != value:
            assert time.monotonic() < deadline, (expr, found, value)
            time.sleep(0.2)

    def _value_or_none(self, expr: str) -> float | None:
        with contextlib.suppress(httpx.TransportError, ValueError):  # Prometheus is still starting
            return self.value(expr)
        return None


@contextlib.contextmanager
def scraping(program: str, url: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the shipped configuration, except for the target and shorter intervals."""
    config = read_yaml(DEPLOY / "prometheus/prometheus.yml")
    config["global"] = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [url.removeprefix("http://")]}]
    for name in RULES:
        file = read_yaml(DEPLOY / "prometheus" / name)
        for group in file["groups"]:
            group["interval"] = "1s"
        (folder / name).write_text(yaml.safe_dump(file))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.kill()
        process.wait()


class Load:
    """Users who stream completions in sequence, each with a few repeated prompts."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self.counted: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        users = [threading.Thread(target=self._user, args=(k, until)) for k in range(USERS)]
        for user in users:
            user.start()
        for user in users:
            user.join()

    def _user(self, k: int, until: float) -> None:
        with httpx.Client(base_url=self._url, timeout=240) as http:
            turn = 0
            while time.monotonic() < until or turn < 4:
                self._complete(http, [300 + k, *range(400 + turn % 3, 400 + turn % 3 + PROMPT_TOKENS - 1)], 12 + k)
                turn += 1

    def _complete(self, http: httpx.Client, prompt: list[int], output: int) -> None:
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        usage = json.loads(events[-2])["usage"]
        counted = {
            "requests": 1,
            "prompt": usage["prompt_tokens"],
            "output": usage["completion_tokens"],
            "cached": usage["prompt_tokens_details"]["cached_tokens"],
        }
        with self._lock:
            self.counted.update(counted)


class Scraped:
    """The end of a load that was scraped from start to end."""

    def __init__(self, url: str, prometheus: Prometheus, counted: Counter[str], at: float) -> None:
        self.url = url
        self.prometheus = prometheus
        self.counted = counted
        self.at = at


@pytest.fixture(scope="module")
def scraped(prometheus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("live")
    tiers = ("--host-kv-gib", "0.01", "--ssd-kv-path", str(folder / "ssd"), "--ssd-kv-gib", "0.05")
    with running(folder, *OPTIONS, *tiers) as daemon, scraping(prometheus, daemon.url, folder) as server:
        server.wait_for("weft_engine_up", 1)
        load = Load(daemon.url)
        load.run(LOAD_SECONDS)
        _refused(daemon)
        at = time.time() + 1
        server.wait_for("sum(weft_finished_total)", load.counted["requests"])
        server.wait_for("sum(weft_requests_running)", 0)
        time.sleep(max(0.0, at + 1 - time.time()))
        yield Scraped(daemon.url, server, load.counted, at)


def _refused(daemon: Daemon) -> None:
    body = {"model": "demo", "prompt": ""}
    assert httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=240).status_code == 400


def test_counters_equal_the_clients_counts(scraped: Scraped) -> None:
    counted = scraped.counted
    expected = {
        'weft_requests_total{endpoint="/v1/completions", status="200"}': counted["requests"],
        'weft_requests_total{endpoint="/v1/completions", status="400"}': 1,
        'weft_finished_total{reason="length"}': counted["requests"],
        "weft_prompt_tokens_total": counted["prompt"],
        "weft_generation_tokens_total": counted["output"],
        "weft_prefix_cache_queried_tokens_total": counted["prompt"],
        "sum(weft_prefix_cache_hit_tokens_total)": counted["cached"],
        # The first token of a sequence comes from its prefill.
        'weft_computed_tokens_total{phase="decode"}': counted["output"] - counted["requests"],
        'weft_computed_tokens_total{phase="prefill"}': counted["prompt"] - counted["cached"],
        "weft_iteration_tokens_sum": counted["prompt"] - counted["cached"] + counted["output"] - counted["requests"],
        "sum without (plan) (weft_iterations_total) - weft_iteration_seconds_count": 0,
        "weft_preemptions_total": 0,
        "sum(weft_aborted_total)": 0,
        "sum(weft_rejected_total)": 0,
    }
    histograms = ("time_to_first_token", "request_latency", "normalized_latency", "queue_time", "prefill_time")
    expected |= {f"weft_{name}_seconds_count": counted["requests"] for name in histograms}
    for expr, value in expected.items():  # an answer is counted after its last byte, and scraped later
        scraped.prometheus.wait_for(expr, value)


def test_every_query_of_the_dashboards_has_data(scraped: Scraped) -> None:
    missing = []
    for query in queries():
        result = scraped.prometheus.query(query.filled(job="weft", interval=INTERVAL, range="1m"), scraped.at)
        found = any(math.isfinite(float(series["value"][1])) for series in result)
        if query.panel not in SOMETIMES and found == (query.panel in EMPTY):
            missing.append(query.name)
    assert not missing


def test_weft_load_agrees_with_the_daemon(scraped: Scraped, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lengths = ("--input", "lognormal:60:40", "--output", "lognormal:30:15")
    arguments = ("--server", scraped.url, "--rate", "6", "--requests", "16", *lengths, "--json", str(out), "--quiet")
    assert main(["load", *arguments]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    ours, theirs, tokens = run["latency"], run["server_view"], run["tokens"]
    assert run["outcomes"] == {"ok": 16}
    assert tokens["output_received"] == tokens["output_asked"] == theirs["totals"]["generation_tokens"]
    assert tokens["prompt_received"] == tokens["prompt_asked"] == theirs["totals"]["prompt_tokens"]
    for name, counted in {"ttft": 16, "e2e": 16, "normalized": 16, "itl": tokens["events"] - 16}.items():
        assert ours[name]["n"] == counted, name
        # A busy machine delays one side more than the other.
        assert ours[name]["mean"] <= 10 * theirs["means"][name] + 60, name
    for name in ("ttft", "e2e", "normalized"):  # what the client waits for includes what the server takes
        assert theirs["means"][name] <= ours[name]["mean"] + 0.001, name
    assert ours["itl"]["mean"] * ours["itl"]["n"] <= 16 * (ours["e2e"]["mean"] - ours["ttft"]["mean"]) + 0.001


def test_rules_run_without_an_error(scraped: Scraped) -> None:
    assert scraped.prometheus.query("ALERTS{alertstate='firing', alertname!~'WeftBudget.*'}", scraped.at) == []
    failures = scraped.prometheus._http.get("/api/v1/rules").json()["data"]["groups"]
    assert {rule["health"] for group in failures for rule in group["rules"]} == {"ok"}
