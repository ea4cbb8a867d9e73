"""A chat model and two encoders in one real daemon: requests, keys, metrics, sleep and a killed engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import pytest
import tiny_encoders
from live import Daemon, running

pytestmark = pytest.mark.slow
ADMIN = {"Authorization": "Bearer secret"}
RERANK = {"model": "judge", "query": "a cat", "documents": ["a dog", "a cat", "paris"]}
EMBED = {"model": "embedder", "input": ["a cat", "paris is the capital of france"]}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("encoders")
    embedder = tiny_encoders.save("modernbert", folder / "embedder")
    judge = tiny_encoders.save("bert", folder / "judge", labels=1)
    options = (
        "--device", "cpu", "--cpu-threads", "1", "--num-pages", "300", "--page-size", "16", "--max-num-seqs", "8",
        "--admin-api-key", "secret", "--api-key", "key", "--wake-timeout", "240",
        "--model", "demo served_model_name=chat", "--model", f"{embedder}", "--model", f"{judge}",
    )  # fmt: skip
    with running(folder, *options) as daemon:
        yield daemon


@pytest.fixture
def http(daemon: Daemon) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer key"}
    with httpx.Client(base_url=daemon.url, timeout=240, headers=headers) as http:
        yield http


def _ranked(http: httpx.Client) -> list[tuple[int, float]]:
    response = http.post("/v1/rerank", json=RERANK)
    assert response.status_code == 200, response.text
    return [(result["index"], result["relevance_score"]) for result in response.json()["results"]]


def test_each_model_does_its_own_and_refuses_the_rest(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
    assert len(http.post("/v1/embeddings", json=EMBED).json()["data"]) == 2
    assert len(_ranked(http)) == 3
    tasks = {model["id"]: model["tasks"] for model in http.get("/v1/models").json()["data"]}
    assert tasks["embedder"] == ["embed", "score"]
    assert tasks["judge"] == ["classify", "score"]
    assert "generate" in tasks["chat"]
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "model": "judge"}),
        ("/v1/rerank", {**RERANK, "model": "chat"}),
        ("/v1/embeddings", {**EMBED, "model": "judge"}),
    ):
        response = http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "wrong_kind_of_model")
    assert httpx.post(f"{http.base_url}/v1/rerank", json=RERANK, timeout=240).status_code == 401


def test_metrics_count_encoders(http: httpx.Client) -> None:
    _ranked(http)
    text = http.get("/metrics").text
    (line,) = (s for s in text.splitlines() if s.startswith('weft_model_prompt_tokens_total{model_name="judge"}'))
    assert float(line.split()[1]) > 0
    assert 'path="/v1/rerank"' in text or 'endpoint="/v1/rerank"' in text


def test_an_encoder_sleeps_and_a_request_wakes_it(http: httpx.Client) -> None:
    before = _ranked(http)
    for level in (1, 2):
        asleep = http.post("/admin/sleep", headers=ADMIN, json={"model": "judge", "level": level})
        assert (asleep.status_code, asleep.json()["state"]) == (200, "asleep")
        assert [index for index, _ in _ranked(http)] == [index for index, _ in before]


def test_a_killed_encoder_is_restarted_and_others_serve(daemon: Daemon, http: httpx.Client) -> None:
    before = _ranked(http)
    judge = daemon.children("weft.engine.process")[-1]
    os.kill(judge, signal.SIGKILL)
    daemon.wait_for_log("signal SIGKILL")
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    while (response := http.post("/v1/rerank", json=RERANK)).status_code == 503:
        pass
    results = response.json()["results"]
    assert [result["index"] for result in results] == [index for index, _ in before]
    # Other batches round differently.
    assert [result["relevance_score"] for result in results] == pytest.approx([score for _, score in before], abs=1e-6)
