"""Daemons with eight processes that compute: eight ranks, two engines of four ranks, eight engines.

The model has random weights, eight heads, and fewer KV heads than ranks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest
from live import Daemon, running, stopped
from test_ranks_live import gone, rank_of
from test_supervision import begin, client, codes, ended, metric, until, until_metric, until_status

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1500)]

MODEL = {
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 2003, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENGINE = "weft.engine.process"


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    return (
        "--model", str(model), "--load-format", "dummy", "--served-model-name", "demo", "--device", "cpu",
        "--max-model-len", "2048", "--page-size", "16", "--num-pages", "1200", "--max-num-seqs", "16",
        "--drain-timeout", "240", "--engine-restart-limit", "20",
    )  # fmt: skip


async def test_each_of_eight_ranks_is_named_when_it_is_killed_and_replaced(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    with running(tmp_path, *options, "--tensor-parallel-size", "8", "--host-kv-gib", "0.02") as daemon:
        async with client(daemon) as http:
            assert await metric(http, "weft_engine_ranks") == 8
            for count, rank in enumerate((7, 6, 5, 4, 3, 2, 1), 1):
                tasks = await begin(http, 8)
                os.kill(rank_of(daemon, rank), signal.SIGKILL)
                assert await codes(tasks) == {"engine_dead"}
                daemon.wait_for_log(f"rank {rank}: its process ended (signal SIGKILL)")
                await until_metric(http, 'weft_engine_restarts_total{engine="0"}', count)
                await until_status(http, "/ready", 200)
            tasks = await begin(http, 8)
            followers = [rank_of(daemon, rank) for rank in range(1, 8)]
            os.kill(daemon.engine_pid, signal.SIGKILL)
            assert await codes(tasks) == {"engine_dead"}
            await until(lambda: all(map(gone, followers)))
            await until_metric(http, 'weft_engine_restarts_total{engine="0"}', 8)
            await until_status(http, "/ready", 200)
            tasks = await begin(http, 3, max_tokens=100)
            daemon.process.terminate()
            assert await codes(tasks) == {"[DONE]"}
        assert await ended(daemon) == 0


async def test_a_stopped_rank_of_eight_is_named(tmp_path: Path, options: tuple[str, ...]) -> None:
    hang = ("--tensor-parallel-size", "8", "--hang-timeout", "30")
    with running(tmp_path, *options, *hang) as daemon:
        async with client(daemon) as http:
            rank = rank_of(daemon, 5)
            os.kill(rank, signal.SIGSTOP)
            with stopped(daemon.process.pid):  # or it might have replaced the engine before this test reads the state
                reported = await until_status(http, "/health", 503)
            assert "rank 5" in reported.json()["error"]["message"]
            await until(lambda: gone(rank))
            daemon.wait_for_log("the engine (rank 5) hangs")
            await until_status(http, "/ready", 200)


async def hits(http: httpx.AsyncClient, engines: int) -> list[float]:
    """Prompt tokens that each engine found in its cache."""
    return [await metric(http, f'weft_engine_prefix_hit_tokens_total{{engine="{i}"}}') for i in range(engines)]


async def check_conversations(http: httpx.AsyncClient, engines: int) -> None:
    """Each turn of a conversation finds the full pages of the turn before, whichever engine has them."""
    before = sum(await hits(http, engines))

    async def talk(i: int) -> int:
        text, could, used = f"Conversation {i}: " + "one two three four " * 4, 0, 0
        for _ in range(4):
            could += used // 16 * 16
            body = {"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = (await http.post("/v1/completions", json=body)).json()
            # The answer's text may be tokenised differently, so only the prompt's pages count.
            used = answer["usage"]["prompt_tokens"]
            text += " and then one more question?"
        return could

    could = sum(await asyncio.gather(*(talk(i) for i in range(2 * engines))))
    await until_metric(http, "weft_engine_prefix_hit_tokens_total", before + 0.6 * could)
    assert sum(found > 0 for found in await hits(http, engines)) > 1


async def check_kill_of_one(daemon: Daemon, http: httpx.AsyncClient, engines: int) -> None:
    """Only the streams of a killed engine end, and it serves again."""
    tasks = await begin(http, 3 * engines, max_tokens=300, ignore_eos=True)
    with daemon.held():
        running_there = [await metric(http, f'weft_engine_requests_running{{engine="{i}"}}') for i in range(engines)]
        pids = daemon.children(ENGINE)
        os.kill(pids[-1], signal.SIGKILL)
    async with asyncio.timeout(600):
        ends = await asyncio.gather(*tasks)
    lost = Counter("lost" if isinstance(end, dict) and "error" in end else "whole" for end in ends)
    assert lost["whole"] + lost["lost"] == 3 * engines
    assert 0 < lost["lost"] <= max(running_there)
    await until_metric(http, "weft_engine_restarts_total", 1)
    await until(lambda: len(daemon.children(ENGINE)) == engines)
    async with asyncio.timeout(600):
        while any(engine["state"] != "serving" for engine in (await http.get("/ready")).json()["engines"]):
            await asyncio.sleep(0.2)
    assert await codes(await begin(http, 2 * engines, max_tokens=8), 600) == {"[DONE]"}


@pytest.mark.parametrize(("engines", "ranks"), [(2, 4), (8, 1)])
async def test_engines_keep_their_conversations_and_a_killed_one_loses_only_its_streams(
    tmp_path: Path, options: tuple[str, ...], engines: int, ranks: int
) -> None:
    split = ("--data-parallel-size", str(engines), "--tensor-parallel-size", str(ranks), "--api-workers", "2")
    with running(tmp_path, *options, *split) as daemon:
        async with client(daemon) as http:
            await until(lambda: len(daemon.children(ENGINE)) == engines)
            async with asyncio.timeout(600):
                while any(engine["state"] != "serving" for engine in (await http.get("/ready")).json()["engines"]):
                    await asyncio.sleep(0.2)
            if ranks > 1:
                assert await metric(http, "weft_engine_ranks") == engines * ranks
            await check_conversations(http, engines)
            await check_kill_of_one(daemon, http, engines)
        daemon.process.terminate()
        assert await ended(daemon) == 0
