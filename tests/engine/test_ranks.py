"""Ranks as processes: the tokens of one rank, tiers below all of them, and the loss of a rank."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from tiny import save_tiny

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError, ModelError, OutOfMemory, RankLost
from weft.engine.memory.store_file import StoreFile
from weft.engine.plans.plan import Plan, Target
from weft.engine.ranks import batches, follower, group, process, runners
from weft.engine.ranks import links as links_module
from weft.engine.ranks.leader import LeadingRunner
from weft.engine.ranks.links import OPERATIONS, SLOT_BYTES, Descriptors, Links
from weft.engine.ranks.operations import DONE, PENDING
from weft.engine.ranks.ring import Kind, RingReader, RingWriter
from weft.engine.ranks.shared_collectives import SharedCollectives
from weft.engine.runner.cpu.cpu_runner import CpuRunner
from weft.engine.runner.device.collectives import SingleRank
from weft.engine.runner.device.preparation import Preparation
from weft.engine.runner.iteration.batch import Batch, CountReset, ImageInputs, PromptLogprobs, SamplingInputs
from weft.engine.runner.start import load
from weft.engine.wire import cores
from weft.engine.wire.sampling import COLUMNS

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 120, n) for n in (40, 70, 100, 130, 21, 5)]
PAGE, PAGES = 16, 32
OPTIONS: dict[str, Any] = {
    "page_size": PAGE, "num_pages": PAGES, "max_num_batched_tokens": 48, "cpu_threads": 1, "host_kv_gib": 0.005,
}  # fmt: skip
"""prompts come in chunks, and not all requests fit"""
PARAMS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"temperature": 1.0, "seed": 1, "top_k": 7, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {9: 4.0}, "logprobs": 2},
    {"temperature": 0.8, "seed": 2, "allowed_token_ids": tuple(range(20, 110)), "presence_penalty": 0.4},
    {"temperature": 0.0, "prompt_logprobs": 1},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ssd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssd")


@pytest.fixture(scope="module")
def one(model: Path) -> Iterator[Harness]:
    harness = Harness(model, **OPTIONS)
    yield harness
    harness.engine.close()


@pytest.fixture(scope="module")
def two(model: Path, ssd: Path) -> Iterator[Harness]:
    harness = started(model, ssd)
    yield harness
    ranks = harness.engine.ranks
    if isinstance(ranks, group.Ranks) and not ranks._stopping:
        harness.engine.close()


def started(model: Path, ssd: Path) -> Harness:
    options = {"tensor_parallel_size": 2, "ssd_kv_path": str(ssd), "ssd_kv_gib": 0.01}
    harness = Harness(model, **OPTIONS, **options)
    assert harness.engine.tiers is not None
    # even if this machine's disk is slow compared with its processor
    harness.engine.tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    return harness


def ask(harness: Harness, prompts: list[np.ndarray], **params: Any) -> tuple[list[list[int]], list[int]]:
    handles = [harness.add(p, **{"max_tokens": 8, **GREEDY, **params}) for p in prompts]
    harness.run()
    return [harness.tokens[h] for h in handles], [harness.cached[h] for h in handles]


def test_processes_give_the_tokens_of_one(one: Harness, two: Harness) -> None:
    for harness in (one, two):
        for prompt, requested in zip(PROMPTS, PARAMS, strict=False):
            harness.add(prompt, max_tokens=12, **requested)
        harness.run()
    assert two.tokens == one.tokens
    assert [e.ids for e in two.logprobs[2]] == [e.ids for e in one.logprobs[2]]
    assert [e.ids for e in two.prompt_logprobs[4]] == [e.ids for e in one.prompt_logprobs[4]]


def test_preempted_requests_resume(one: Harness, two: Harness) -> None:
    two.expect_short_outputs()
    before = two.engine.stats().scheduler.preemptions
    prompts = [np.append(p, 7) for p in PROMPTS[:5]]
    tokens, _ = ask(two, prompts, max_tokens=40)
    assert two.engine.stats().scheduler.preemptions > before
    assert tokens == ask(one, prompts, max_tokens=40)[0]


def test_pages_return_from_the_host_and_the_disk(one: Harness, two: Harness) -> None:
    two.engine.reset_prefix_cache()
    tiers = two.engine.tiers
    assert tiers is not None
    want, _ = ask(one, PROMPTS[:4])
    assert ask(two, PROMPTS[:4])[0] == want
    tiers.flush(60)
    tiers.pool.evict_all()
    assert ask(two, PROMPTS[:4]) == (want, [32, 64, 96, 128])
    assert two.engine.stats().scheduler.tiers["host"].bytes_out > 0
    tiers.sink(60)
    two.engine.scheduler.check()
    assert all(e.page < 0 and e.host < 0 and e.extent >= 0 for e in tiers.index.entries())
    assert ask(two, PROMPTS[:4]) == (want, [32, 64, 96, 128])
    assert two.engine.stats().scheduler.tiers["ssd"].bytes_out > 0
    tiers.check()


def test_an_engine_of_ranks_refuses_to_sleep_with_a_reason(two: Harness) -> None:
    with pytest.raises(ConfigError, match="ranks share it"):
        two.engine.sleep()


def test_a_restart_finds_the_pages_of_every_rank_and_a_killed_rank_ends_it(
    model: Path, ssd: Path, one: Harness, two: Harness
) -> None:
    """Runs last, because it needs the first engine to have ended."""
    want, _ = ask(one, PROMPTS[:2])
    two.engine.reset_prefix_cache()
    ask(two, PROMPTS[:2])
    two.engine.close()
    assert {path.name for path in ssd.iterdir()} == {"rank-0-of-2", "rank-1-of-2"}
    file = StoreFile(ssd / "rank-1-of-2", None)
    records = file.headers()
    assert len(records) == 2 + 4
    last = np.asarray(PROMPTS[1][48:64], np.int32).tobytes()
    extent = next(extent for extent, record in records if record.tokens == last)
    file.write_header(extent, None, file.epoch)  # rank 1 loses the fourth page of the second prompt
    file.close()
    again = started(model, ssd)
    assert ask(again, PROMPTS[:2]) == (want, [32, 48])
    ranks = again.engine.ranks
    assert isinstance(ranks, group.Ranks)
    again.add(PROMPTS[0], max_tokens=200, ignore_eos=True, **GREEDY)
    again.step()
    os.kill(ranks._processes[1].pid, signal.SIGKILL)
    with pytest.raises(RankLost, match="rank 1: its process ended"):
        again.run()
    with pytest.raises(RankLost):
        again.engine.check()
    ranks.stop()
    again.engine.runner.own.close()  # type: ignore[attr-defined]


def test_an_error_of_a_rank_has_its_number_and_a_common_one_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    Plan(Target("a GPU", 132, "another", "bfloat16", "none"), "1:1", ()).save(plan)
    path = save_tiny("llama2", tmp_path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.layers.0.self_attn.q_proj.weight" in tensors:
            tensors["model.layers.0.self_attn.q_proj.weight"][-1, 0] = float("nan")  # of the last head
            save_file(tensors, file, {"format": "pt"})
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1: weights are not finite.*q_proj"):
        Engine(EngineConfig(model=str(path), dtype="float32", tensor_parallel_size=2, plan=str(plan)))
    assert time.monotonic() - began < 120
    assert "is not used" not in capfd.readouterr().err  # rank 0's is in the log of this process


def test_a_rank_whose_gpu_is_full_names_the_option_to_change(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(load, "read_weights", full)
    monkeypatch.setattr(process, "use_cache", lambda _: None)  # in this process, it would be
    config = EngineConfig(model=str(model), tensor_parallel_size=2, **OPTIONS)
    heartbeat = SimpleNamespace(stage=lambda *_: None)
    with pytest.raises(OutOfMemory, match="do not fit the GPU: use a smaller model, or lower --max-num-seqs"):
        process._serve(config, SimpleNamespace(rank=1, ranks=2), heartbeat, 60.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "what"), [(3, "4 attention heads cannot be split over 3 ranks"), (9, "less than or equal to 8")]
)
def test_an_impossible_setup_is_a_one_line_error(model: Path, ranks: int, what: str) -> None:
    with pytest.raises((ModelError, ValueError), match=what):
        Engine(EngineConfig(model=str(model), tensor_parallel_size=ranks))


def test_ranks_without_a_gpu_each_are_refused_before_any_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs one GPU per rank, and this machine has 1"):
        Engine(EngineConfig(model=str(model), tensor_parallel_size=2))


def test_each_rank_sees_its_own_gpu_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7,6")
    sees = [group.gpu_environment(EngineConfig(model=str(model), tensor_parallel_size=3), rank) for rank in range(3)]
    assert [found["CUDA_VISIBLE_DEVICES"] for found in sees] == ["4,GPU-7,6", "GPU-7,6,4", "6,4,GPU-7"]
    assert group.gpu_environment(EngineConfig(model=str(model), tensor_parallel_size=3, device="cpu"), 1) == {}


# -- without processes


def a_batch(generator: np.random.Generator, masks: int = 2) -> Batch:
    def ints(*shape: int) -> np.ndarray:
        return generator.integers(-5, 1000, shape).astype(np.int32)

    columns = {c.name: (generator.random(4) * 5).astype(c.dtype) for c in COLUMNS}
    sampling = SamplingInputs(
        ints(4), ints(4), columns, generator.random(4).astype(np.float32), ints(7), ints(7),
        generator.random(7).astype(np.float32), ints(masks), ints(masks, 10), ints(masks), ints(masks),
    )  # fmt: skip
    resets = (CountReset(3, ints(6), ints(0)), CountReset(1, ints(2), ints(5)))
    scores = (PromptLogprobs(2, ints(3), ints(3), 5), PromptLogprobs(0, ints(1), ints(1), 0))
    slot_mapping = generator.integers(0, 2**40, 9)
    return Batch(
        7, 2, ints(4), ints(4), ints(4), ints(4), ints(9), ints(9), slot_mapping, ints(4, 3), ints(4), sampling, resets,
        scores, adapters=ints(4) if masks else None,
        images=ImageInputs(ints(9), *((ints(3, 9), None) if masks > 2 else (None, ints(9)))) if masks else None,
    )  # fmt: skip


def flat(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return [(value.dtype, value.shape, value.tolist())]
    if isinstance(value, dict):
        return [(name, flat(v)) for name, v in value.items()]
    return [flat(v) for v in value] if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("masks", [0, 2, 3])
def test_a_batch_arrives_as_it_was_sent(masks: int) -> None:
    shared = Descriptors.make(2)
    writer, reader = RingWriter(Links(0, shared)), RingReader(Links(1, shared))
    generator = np.random.default_rng(0)
    for _ in range(20):
        batch = a_batch(generator, masks)
        writer.send(Kind.BATCH, *batches.arrays_of(batch))
        order = reader.receive()
        assert order is not None
        assert order.kind is Kind.BATCH
        assert flat(batches.batch_of(order.arrays)) == flat(batch)
    assert reader.receive(0.0) is None
    shared.close()


def test_an_order_longer_than_the_ring_is_sent_in_pieces() -> None:
    from threading import Thread

    shared = Descriptors.make(2)
    writer, reader = RingWriter(Links(0, shared)), RingReader(Links(1, shared))
    long = np.arange(10 * SLOT_BYTES // 8)
    thread = Thread(target=writer.send, args=(Kind.OUT, long, np.array([3])))
    thread.start()
    found = None
    while found is None:
        found = reader.receive()
    thread.join()
    assert np.array_equal(found.arrays[0].view(np.int64), long)
    assert found.arrays[1].view(np.int64).tolist() == [3]
    shared.close()


def test_a_full_ring_whose_reader_has_ended_raises() -> None:
    shared = Descriptors.make(2)
    links = Links(0, shared)

    def check() -> None:
        raise RankLost("rank 1: gone")

    links.check = check
    writer = RingWriter(links)
    for _ in range(len(links.ring_slots())):
        writer.send(Kind.END)
    with pytest.raises(RankLost):
        writer.send(Kind.END)
    shared.close()


def test_cores_are_divided_by_node() -> None:
    nodes = {cpu: cpu % 2 for cpu in range(16)}
    assert cores.shares(set(range(16)), nodes, 2) == [set(range(0, 16, 2)), set(range(1, 16, 2))]
    assert cores.shares(set(range(9)), {}, 4) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert cores.shares({0, 1}, {}, 2) == []
    assert cores.threads(2, 2) == 1
    assert cores.threads(17, 4) == 4


class SlowRunner(CpuRunner):
    """Runs an iteration when the test allows it, and records its copies."""

    def __init__(self) -> None:  # nothing of a real one
        self.may = threading.Semaphore(0)
        self.begun: list[tuple[str, list[tuple[int, int]]]] = []
        self.kv, self.preparation = torch.empty(0), Preparation()

    def run(self, _: Batch) -> Any:
        self.may.acquire()

    def copy_engine(self, _: int) -> Any:
        copy = SimpleNamespace(done=lambda: True, failed=False, unkept=())

        def begin(kind: str, pairs: list[tuple[int, int]]) -> Any:
            self.begun.append((kind, pairs))
            return copy

        return SimpleNamespace(
            host=None, remainders=None, out=lambda pairs: begin("out", pairs), back=lambda pairs: begin("back", pairs)
        )

    def close(self) -> None:
        pass


@pytest.fixture
def forsaken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Links]:
    """Ranks seen from rank 0 when another rank ended before it had its memory."""

    def check() -> None:
        raise RankLost("rank 1: pages do not fit")

    monkeypatch.setattr(links_module, "LOOK_SECONDS", 0.01)
    shared = Descriptors.make(2)
    links = Links(0, shared)
    links.check = check
    yield links
    shared.close()


def test_no_rank_is_ready_before_all_have_their_pages(forsaken: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    config: Any = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(runners, "CpuRunner", lambda *_: SlowRunner())
    with pytest.raises(RankLost, match="rank 1: pages do not fit"):
        runners.rank_runner(forsaken, nothing, nothing, nothing, config, SharedCollectives(forsaken))


def test_no_rank_is_ready_before_all_have_their_host_pool(forsaken: Links) -> None:
    leading = LeadingRunner(SlowRunner(), forsaken, SharedCollectives(forsaken), stores=False)
    with pytest.raises(RankLost, match="rank 1: pages do not fit"):
        leading.copy_engine(4)


class SlowGpuRunner:
    """Behaves as on a GPU: launched work ends by itself."""

    def __init__(self) -> None:
        self.slow = SlowRunner()
        self.may, self.begun, self.copy_engine, self.close = (
            self.slow.may, self.slow.begun, self.slow.copy_engine, self.slow.close
        )  # fmt: skip

    def launch(self, _: Batch) -> Any:
        ended: list[bool] = []

        def ends_within(seconds: float) -> bool:
            if not ended and self.may.acquire(timeout=seconds):
                ended.append(True)
            return bool(ended)

        def wait() -> None:
            while not ends_within(0.01):
                pass

        return SimpleNamespace(wait=wait, ends_within=ends_within)


@pytest.mark.parametrize("kind_of_runner", [SlowRunner, SlowGpuRunner])
def test_copies_wait_for_earlier_iterations_on_this_rank_too(
    monkeypatch: pytest.MonkeyPatch, kind_of_runner: type[SlowRunner] | type[SlowGpuRunner]
) -> None:
    """Rank 0 may have finished an iteration whose last keys and values another rank has yet to write."""
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    outcomes = np.zeros((2, OPERATIONS), np.int8)

    def receive(seconds: float) -> Any:
        try:
            return orders.get(timeout=seconds)
        except queue.Empty:
            return None

    monkeypatch.setattr(follower, "RingReader", lambda _: SimpleNamespace(receive=receive))
    monkeypatch.setattr(follower, "batch_of", lambda arrays: arrays)
    links: Any = SimpleNamespace(rank=1, outcomes=lambda: outcomes, state=lambda _: SimpleNamespace())
    runner: Any = kind_of_runner()
    one = follower.Follower(links, runner, SingleRank(), None, 1, lambda: pytest.fail("there is no store"))
    thread = threading.Thread(target=one.run, args=(lambda: None,), daemon=True)
    thread.start()

    def order(kind: Kind, *arrays: np.ndarray) -> None:
        orders.put((kind, [np.asarray(a, np.int64).view(np.uint8).reshape(-1) for a in arrays]))

    def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.001)

    order(Kind.POOL, np.array([4]))
    order(Kind.OUT, np.array([0]), np.array([[1, 2]]))
    until(lambda: bool(outcomes[1, 0] == DONE))  # nothing is computed, so it returns at once
    order(Kind.BATCH)
    order(Kind.OUT, np.array([1]), np.array([[3, 0]]))
    order(Kind.BATCH)
    order(Kind.BACK, np.array([2]), np.array([[5, 1]]))
    until(lambda: len(one._held) == 2)
    assert runner.begun == [("out", [(1, 2)])]
    runner.may.release()
    until(lambda: bool(outcomes[1, 1] == DONE))
    assert runner.begun[1:] == [("out", [(3, 0)])]
    assert outcomes[1, 2] == PENDING
    runner.may.release()
    until(lambda: bool(outcomes[1, 2] == DONE))
    assert runner.begun[2:] == [("back", [(5, 1)])]
    order(Kind.END)
    thread.join()
