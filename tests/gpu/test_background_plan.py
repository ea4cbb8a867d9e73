"""A plan's pipelines that become ready while the serial plan serves: the same tokens before, during and after."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from interpreted import interpreted_gpu
from live import running

from weft.engine.config import EngineConfig
from weft.engine.model.directory import read_spec
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.choose import target_of
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import NanoOperation, Period, Plan
from weft.engine.runner.cuda.cuda_executor import CudaExecutor
from weft.engine.runner.device import preparation
from weft.engine.runner.iteration.pipelines import token_buckets
from weft.engine.wire.messages import PlanStats
from weft.kernels.common.gpu import gpu

HERE = torch.cuda.is_available()


def two_lanes(spec: ModelSpec, tokens: int, sms: int, min_tokens: int) -> Period:
    """One nano-batch with attention in its own lane: the sums of the serial plan, in its order."""
    attention = {operation.name for operation in spec.layer_operations() if operation.role.attends}
    operations = tuple(
        NanoOperation(operation.name, 0, tokens, sms, "memory" if operation.name in attention else "compute")
        for operation in spec.layer_operations()
    )
    return Period(tokens, operations, min_tokens=min_tokens)


def plan_file(path: Path, spec: ModelSpec, device: str, dtype: torch.dtype, *sizes: int) -> str:
    here = gpu()
    assert here is not None
    buckets = [0, *token_buckets(max(sizes))]
    # sizes of the serial plan: one that served a smaller iteration would use other tiles
    periods = tuple(two_lanes(spec, size, here.sms, buckets[buckets.index(size) - 1] + 1) for size in sizes)
    for period in periods:
        period.check(spec, here.sms)
    Plan(target_of(spec, torch.device(device), dtype), "test", periods).save(path)
    return str(path)


def lanes_used(harness: Harness) -> list[int]:
    """Records from now on how many lanes ran each iteration of a size that the plan has a pipeline for."""
    used: list[int] = []
    pipelines = harness.engine.runner._pipelines
    of, sizes = pipelines.of, {pipeline.tokens for pipeline in pipelines.planned}

    def noted(batch: Any) -> Pipeline:
        pipeline = of(batch)
        if pipeline.tokens in sizes:
            used.append(len(pipeline.lanes))
        return pipeline

    pipelines.of = noted
    return used


@pytest.mark.nightly
@pytest.mark.skipif(HERE, reason="a GPU runs the real thing")
def test_interpreted_pipelines_that_become_ready_while_serving_change_no_token(
    device: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps between iterations of a request: before, during and after, the request gets the serial plan's tokens."""
    assert device == "cpu"
    monkeypatch.setattr(preparation, "SLICE_SECONDS", 0.0)
    model = tiny_model("yi")
    prompt = np.random.default_rng(5).integers(3, 90, 5)
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "page_size": 16, "max_num_seqs": 1, "max_num_batched_tokens": 8,
        "num_pages": 4, "prefix_caching": False,
    }  # fmt: skip

    def answer(harness: Harness, each_step: Callable[[int], None] = lambda _: None) -> list[int]:
        harness.poison_pages()
        handle = harness.add(prompt, max_tokens=9, ignore_eos=True, **GREEDY)
        harness.run(each_step)
        return harness.tokens[handle]

    def three_steps(_: int) -> None:
        for _ in range(3):
            harness.engine.runner.preparation.advance(busy=False)

    with interpreted_gpu(monkeypatch):
        plan = plan_file(tmp_path / "plan.json", read_spec(model), "cpu", torch.float16, 1)
        right = answer(Harness(model, plan="serial", **options))
        harness = Harness(model, plan=plan, wait_for_plan=False, **options)
        used = lanes_used(harness)
        assert harness.engine.stats().plan == PlanStats(1, 0, 0)
        assert answer(harness, three_steps) == right
        assert used == sorted(used)
        assert set(used) == {1, 2}  # the pipeline became ready during the request
        assert harness.engine.stats().plan == PlanStats(1, 1, 0)
        harness.engine.close()


# -- on a GPU


SMALL: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 256, "page_size": 16,
    "prefix_caching": False, "kv_cache_gib": 0.5,
}  # fmt: skip
TIMEOUT_SECONDS = 240
on_a_gpu = pytest.mark.skipif(not HERE, reason="needs a CUDA device")


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[str]:
    """Three pipelines for the demo model, and an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
        yield a_plan(tmp_path)


def a_plan(tmp_path: Path) -> str:
    spec = read_spec(EngineConfig().model_path)
    return plan_file(tmp_path / "plan.json", spec, "cuda", torch.bfloat16, 32, 128, 256)


class Talk:
    """The same prompts, sent repeatedly."""

    def __init__(self, count: int = 24) -> None:
        rng = np.random.default_rng(4)
        self.prompts = [rng.integers(6, 2000, int(n)) for n in rng.integers(1, 200, count)]

    def ask(self, harness: Harness) -> list[list[int]]:
        harness.steps = 0
        handles = [harness.add(p, max_tokens=24, ignore_eos=True, **GREEDY) for p in self.prompts]
        harness.run()
        return [harness.tokens[handle] for handle in handles]

    def until_done(self, harness: Harness, right: list[list[int]], share: float = 1.0) -> int:
        """Send the prompts while the plan becomes ready and return how many times. share: of the answers that must be
        right."""
        begun, times = time.monotonic(), 0
        while harness.engine.pause is not None:
            assert time.monotonic() - begun < TIMEOUT_SECONDS
            same = sum(a == b for a, b in zip(self.ask(harness), right, strict=True))
            assert same >= share * len(right), f"{same} of {len(right)}, {harness.engine.stats().plan}"
            times += 1
        return times


def serial_answers(talk: Talk) -> list[list[int]]:
    harness = Harness("demo", plan="serial", **SMALL)
    harness.poison_pages()
    answers = talk.ask(harness)
    harness.engine.close()
    del harness
    release_memory()
    return answers


def release_memory() -> None:
    """The memory of an engine without references: its graphs and pages refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()


class Watched:
    """Memory and time of each step of a preparation."""

    def __init__(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest = 0.0
        self.free = [torch.cuda.mem_get_info()[0]]
        self._preparation = harness.engine.runner.preparation
        advance = self._preparation.advance

        def timed(*, busy: bool) -> bool:
            begin = time.perf_counter()
            ended = advance(busy=busy)
            self.longest = max(self.longest, time.perf_counter() - begin)
            if ended:
                self.free.append(torch.cuda.mem_get_info()[0])
            return ended

        monkeypatch.setattr(self._preparation, "advance", timed)

    def tell(self) -> None:
        taken = [(before - after) / 2**20 for before, after in pairwise(self.free)]
        print(f"longest slice {1e3 * self.longest:.1f} ms; MiB by pipeline: {', '.join(f'{mib:.0f}' for mib in taken)}")


@on_a_gpu
def test_from_an_empty_cache_to_the_whole_plan_no_token_changes(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk()
    options = SMALL | {"plan": plan, "wait_for_plan": False, "cache_dir": str(tmp_path)}
    harness = Harness("demo", **options)
    harness.poison_pages()
    assert harness.engine.stats().plan == PlanStats(3, 0, 0)
    watched, used = Watched(harness, monkeypatch), lanes_used(harness)
    before = talk.ask(harness)  # pipelines are compiled for seconds: the serial plan's
    assert used[0] == 1
    requested = talk.until_done(harness, before)
    watched.tell()
    print(f"asked {requested} times meanwhile, {used.count(1)} iterations were serial, {used.count(2)} not")
    assert harness.engine.stats().plan == PlanStats(3, 3, 0)
    assert harness.engine.runner.preparation.reasons == {}
    del used[:]
    assert talk.ask(harness) == before
    assert set(used) == {2}
    budget = harness.engine.describe().memory
    free, total = torch.cuda.mem_get_info()
    assert total - free <= budget.weights + budget.kv_pages + budget.working
    harness.engine.close()
    del harness, watched, used
    monkeypatch.undo()
    release_memory()

    # again, with everything in the cache, and no kernel requested before it is complete
    harness = Harness("demo", **options)
    begun = time.monotonic()
    while harness.engine.pause is not None:
        harness.step()
        assert time.monotonic() - begun < TIMEOUT_SECONDS
    print(f"from the cache, without requests: {time.monotonic() - begun:.2f} s")
    assert harness.engine.stats().plan == PlanStats(3, 3, 0)
    assert talk.ask(harness) == before
    harness.engine.close()
    del harness
    release_memory()
    assert serial_answers(talk) == before


@on_a_gpu
def test_a_capture_that_fails_drops_its_pipeline_and_keeps_the_others(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk()
    right = serial_answers(talk)
    forward = CudaExecutor.forward

    def broken(self: CudaExecutor, pipeline: Pipeline, kv: torch.Tensor, num_rows: int) -> None:
        if len(pipeline.lanes) == 2 and pipeline.tokens == 128:
            self._embed(pipeline)
            self._streams["memory"].wait_stream(torch.cuda.current_stream())
            raise RuntimeError("in the middle of a capture, one stream not joined")
        forward(self, pipeline, kv, num_rows)

    monkeypatch.setattr(CudaExecutor, "forward", broken)
    harness = Harness("demo", **SMALL, plan=plan, wait_for_plan=False, cache_dir=str(tmp_path))
    talk.until_done(harness, right)
    assert [stage.value for stage in harness.engine.runner.preparation.stages] == ["serving", "left out", "serving"]
    used = lanes_used(harness)
    assert talk.ask(harness) == right
    assert set(used) == {2}  # none of its iterations is of a size between
    harness.add(talk.prompts[0][:1].repeat(100), max_tokens=2, ignore_eos=True, **GREEDY)
    harness.run()
    assert used[-1] == 1  # the chunk of 100 tokens; a decode alone is of no size of the plan
    harness.engine.close()


@on_a_gpu
def test_pages_leave_and_return_while_graphs_are_captured(plan: str, tmp_path: Path) -> None:
    talk = Talk()
    right = serial_answers(talk)
    options = SMALL | {"prefix_caching": True, "host_kv_gib": 0.3, "kv_cache_gib": None, "num_pages": 300}
    harness = Harness("demo", **options, plan=plan, wait_for_plan=False, cache_dir=str(tmp_path))
    harness.poison_pages()
    talk.until_done(harness, right, 0.8)  # cached pages are not part of a chunk: sums of bf16 in another order
    tiers = harness.engine.tiers
    assert tiers is not None
    stats = harness.engine.stats()
    assert stats.plan == PlanStats(3, 3, 0)
    assert stats.scheduler.tiers["host"].bytes_in > 0
    assert not stats.scheduler.tiers["host"].failures
    harness.engine.close()


@on_a_gpu
@pytest.mark.slow
def test_a_daemon_reports_the_progress_of_its_plan_and_stops_in_the_middle(plan: str, tmp_path: Path) -> None:
    options = ("--device", "cuda", "--max-num-seqs", "64", "--max-num-batched-tokens", "256", "--kv-cache-gib", "1",
               "--plan", plan, "--no-wait-for-plan", "--cache-dir", str(tmp_path))  # fmt: skip
    body = {"prompt": "What is 12 + 30?", "max_tokens": 8, "temperature": 0}

    def ask(url: str, data: Any = None) -> dict[str, Any]:
        request = urllib.request.Request(
            url, None if data is None else json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def compilers() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if "compile_kernels" in entry.read_text():
                    found.append(entry.parent.name)
        return found

    with running(tmp_path, *options) as daemon:
        assert ask(f"{daemon.url}/ready")["status"] == "ready"
        serial = ask(f"{daemon.url}/v1/completions", body)["choices"][0]["text"]
        print(ask(f"{daemon.url}/ready"))
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
    begun = time.monotonic()
    while compilers():
        assert time.monotonic() - begun < 60
        time.sleep(0.1)
    with running(tmp_path, *options) as daemon:
        begun = time.monotonic()
        while "plan" in (reported := ask(f"{daemon.url}/ready")):
            assert time.monotonic() - begun < TIMEOUT_SECONDS, reported
            time.sleep(0.1)
        print(f"the plan was whole {time.monotonic() - begun:.1f} s after the engine was ready")
        assert ask(f"{daemon.url}/v1/completions", body)["choices"][0]["text"] == serial
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        assert "3 of 3 pipelines" in daemon.stderr()
