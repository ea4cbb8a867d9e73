"""The SSD tier of tensor-parallel ranks, each with a disk of its own that may fail and work again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from broken_disk import FAULTS, READS, BrokenDisk
from harness import GREEDY, Harness

from weft.engine.memory import ssd_tier
from weft.engine.memory.store_file import FILE_NAME
from weft.engine.memory.tiers import Tiers
from weft.engine.ranks import leader, links

SECONDS = 240  # for anything to happen, on a busy machine
LENGTHS = (40, 70)  # tokens of the prompts
CACHED = [32, 64]  # tokens of their full pages
PROMPTS = iter(np.random.default_rng(3).integers(3, 120, (80, max(LENGTHS))))


class Pair(NamedTuple):
    """Two ranks; the disk of rank 1 fails on demand."""

    harness: Harness
    tiers: Tiers
    disk: BrokenDisk

    def file(self, rank: int) -> Path:
        """The file of a rank's store."""
        return self.disk.folder.with_name(f"rank-{rank}-of-2") / FILE_NAME

    @property
    def up(self) -> bool:
        return self.tiers.ssd.store is not None

    def ask(self, prompts: list[np.ndarray]) -> tuple[list[list[int]], list[int]]:
        """Return tokens and numbers of cached tokens."""
        handles = [self.harness.add(p, max_tokens=6, **GREEDY) for p in prompts]
        self.harness.run()
        return [self.harness.tokens[h] for h in handles], [self.harness.cached[h] for h in handles]

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end
            self.tiers.pump()
            self.tiers.wait(0.01)

    def store(self) -> tuple[list[np.ndarray], list[list[int]]]:
        """Return new prompts whose pages only the disks hold, and their answers."""
        prompts = [next(PROMPTS)[:length] for length in LENGTHS]
        answers, _ = self.ask(prompts)
        self.tiers.sink(SECONDS)
        return prompts, answers

    def check_works(self) -> None:
        self.until(lambda: self.up)
        prompts, answers = self.store()
        assert self.ask(prompts) == (answers, CACHED)
        self.tiers.check()


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]
) -> Iterator[Callable[[int], Pair]]:
    patch, started = pytest.MonkeyPatch(), []

    def begin(error: int) -> Pair:
        """error: an errno with which rank 1's disk fails at the start."""
        home = tmp_path_factory.mktemp("ranks")
        try:
            disk = BrokenDisk(home / "ssd" / "rank-1-of-2", home / "shim")
        except RuntimeError as failed:
            pytest.skip(str(failed))
        disk.fail(error)
        for name, value in disk.env.items():
            patch.setenv(name, value)
        harness = Harness(
            tiny_model("qwen3"), page_size=16, num_pages=32, max_num_batched_tokens=48, cpu_threads=1,
            host_kv_gib=0.005, tensor_parallel_size=2, ssd_kv_path=str(home / "ssd"), ssd_kv_gib=0.01,
        )  # fmt: skip
        started.append(harness)
        tiers = harness.engine.tiers
        assert tiers is not None
        tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
        return Pair(harness, tiers, disk)

    patch.setattr(ssd_tier, "REOPEN_SECONDS", 0.05)
    yield begin
    for harness in started:
        harness.engine.close()
    patch.undo()


@pytest.fixture(scope="module")
def pair(start: Callable[[int], Pair]) -> Pair:
    return start(0)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_tier_comes_back_with_its_pages_when_the_disk_of_another_rank_works_again(pair: Pair, fault: str) -> None:
    stored, answers = pair.store()
    pair.disk.fail(FAULTS[fault])
    if FAULTS[fault] == READS:
        assert pair.ask(stored)[0] == answers, "pages that cannot be read are computed"
    else:
        pair.store()
    pair.until(lambda: not pair.up)
    assert pair.ask(stored)[0] == answers
    pair.disk.work()
    pair.tiers.pool.evict_all()
    pair.tiers.host.evict_all()
    pair.until(lambda: pair.up)
    assert pair.ask(stored) == (answers, CACHED)
    pair.check_works()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_truncated_file_of_any_rank_is_noticed_and_used_again(
    pair: Pair, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, answers = pair.store()
    file = pair.file(rank)
    size = file.stat().st_size
    os.truncate(file, size // 2)
    pair.until(lambda: not pair.up)
    assert "truncated; serving continues without it" in capsys.readouterr().err
    assert pair.ask(stored)[0] == answers
    pair.check_works()
    assert file.stat().st_size == size


def test_a_removed_file_of_another_rank_is_noticed_and_used_once_it_is_back(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, answers = pair.store()
    file = pair.file(1)
    file.rename(away := file.with_name("away"))
    pair.until(lambda: not pair.up)
    assert "SSD tier switched off: the file of rank 1 was removed or truncated" in capsys.readouterr().err
    assert pair.ask(stored)[0] == answers
    away.rename(file)
    pair.until(lambda: pair.up)
    pair.tiers.pool.evict_all()
    pair.tiers.host.evict_all()
    assert pair.ask(stored) == (answers, CACHED)
    pair.check_works()


def test_the_tier_comes_back_when_the_disk_of_this_rank_works_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(FAULTS["broken"], "broken")

    stored, answers = pair.store()
    with monkeypatch.context() as broken:
        for name in ("_write_all", "_write_durably"):
            broken.setattr(f"weft.engine.memory.store_file.StoreFile.{name}", fail)
        pair.store()
        pair.until(lambda: not pair.up)
    pair.until(lambda: pair.up)
    pair.tiers.pool.evict_all()
    pair.tiers.host.evict_all()
    assert pair.ask(stored) == (answers, CACHED)
    pair.check_works()


def test_pages_that_were_to_be_dropped_while_a_disk_failed_do_not_come_back(pair: Pair) -> None:
    stored, answers = pair.store()
    pair.disk.fail(FAULTS["broken"])
    pair.harness.engine.reset_prefix_cache()
    assert pair.ask(stored) == (answers, [0, 0]), "the other rank goes on without its store"
    pair.tiers.flush(SECONDS)
    pair.until(lambda: not pair.up)
    pair.harness.engine.reset_prefix_cache()
    pair.disk.work()
    pair.until(lambda: pair.up)
    assert pair.ask(stored) == (answers, [0, 0])
    pair.check_works()


def test_the_tier_comes_up_after_a_start_with_a_disk_that_fails(start: Callable[[int], Pair]) -> None:
    pair = start(FAULTS["read-only"])
    assert not pair.up
    prompts, answers = pair.store()
    pair.disk.work()
    pair.check_works()
    assert pair.ask(prompts)[0] == answers


def test_a_place_whose_disk_hangs_is_not_given_to_another_operation() -> None:
    shared = links.Descriptors.make(2)
    operations = leader.Operations(links.Links(0, shared))
    followers = links.Links(1, shared).outcomes()[1]
    hung = operations.begin()
    for _ in range(links.OPERATIONS):
        followers[operations.begin()] = leader.DONE
    assert operations.worst(hung) == leader.PENDING
    followers[hung] = leader.DONE
    assert hung in {operations.begin() for _ in range(links.OPERATIONS)}
    shared.close()
