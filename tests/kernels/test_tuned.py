"""GEMM configurations: the table that serves a GPU, the search at a start, and its file."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.kernels.matmul import tuned
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.matmul.tuned import BUCKETS, Machine, Shape, bucket_of, read_cache, shipped
from weft.kernels.tuning import tile_search
from weft.kernels.tuning.tile_search import candidates, find, missing, search

H200 = Machine("NVIDIA H200", (9, 0), 132, "3.6.0", "abc")
OTHER = H200._replace(gpu="NVIDIA L40S", capability=(8, 9), sms=142)
QKV, DOWN = Shape("qkv", 5120, 4000), Shape("residual", 4000, 11000)
RULE = GemmConfig(1, 2, 3, 4, 5)


def rule(_: Shape, bucket: int) -> GemmConfig:
    return RULE._replace(tokens=bucket)


class Lab:
    """A GPU with a function for its timings, and its clock."""

    def __init__(self, ms: Callable[[Shape, int, GemmConfig], float | None], seconds: float = 1.0) -> None:
        self._ms, self._seconds = ms, seconds
        self.now = 50.0
        self.requested: list[tuple[Shape, int, GemmConfig]] = []

    def __call__(self, shape: Shape, bucket: int, config: GemmConfig) -> float | None:
        self.now += self._seconds
        self.requested.append((shape, bucket, config))
        return self._ms(shape, bucket, config)

    def clock(self) -> float:
        return self.now


def test_an_h100_is_served_by_the_table_of_the_h200() -> None:
    table = shipped((9, 0), 132)
    assert table[2048, 6144, 4096].tokens == 128
    assert all(isinstance(c.swap, bool) and isinstance(c.special, bool) for c in table.values())
    assert {key[0] for key in table} == set(BUCKETS)
    assert shipped((9, 0), 114) == {}
    assert shipped((10, 0), 132) == {}


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 16), (16, 16), (17, 32), (2048, 2048), (4096, 4096), (4097, None)])
def test_a_bucket_serves_up_to_its_own_size(tokens: int, bucket: int | None) -> None:
    assert bucket_of(tokens) == bucket


def test_lookup_returns_shipped_and_found_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_shipped_here", lambda: shipped((9, 0), 132))
    monkeypatch.setattr(tuned, "_found", {})
    assert tuned.lookup(100, 6144, 4096) == shipped((9, 0), 132)[128, 6144, 4096]
    assert tuned.lookup(9, 5120, 4000) is None
    tuned.use({(16, 5120, 4000): RULE, (16, 6144, 4096): RULE})
    assert tuned.lookup(9, 5120, 4000) == RULE
    assert tuned.lookup(17, 5120, 4000) is None
    assert tuned.lookup(5000, 6144, 4096) is None
    assert tuned.lookup(9, 6144, 4096) == shipped((9, 0), 132)[16, 6144, 4096]


def test_only_unknown_large_shapes_are_missing_and_large_buckets_come_first() -> None:
    tiny = Shape("residual", 1024, 1024)
    known = {(64, DOWN.features, DOWN.depth): RULE}
    got = missing([QKV, DOWN, DOWN, tiny, Shape("qkv", 6144, 4096)], 100, known, shipped((9, 0), 132))
    assert got == [
        (QKV, 128), (DOWN, 128), (QKV, 64), (QKV, 32), (DOWN, 32), (QKV, 16), (DOWN, 16)
    ]  # fmt: skip


def test_candidates_are_frequent_winners_that_the_gpu_supports() -> None:
    for bucket in BUCKETS:
        wins = [c for key, c in shipped((9, 0), 132).items() if key[0] == bucket and len(key) == 3]
        chosen = candidates(bucket, True)
        assert 1 <= len(chosen) <= tile_search.CANDIDATES
        assert min(wins.count(c) for c in chosen) >= max([wins.count(c) for c in set(wins) - {*chosen}], default=0)
        assert not any(c.special for c in candidates(bucket, False))
    assert any(c.special for c in candidates(2048, True))


def test_experts_are_looked_up_and_tried_by_their_number_and_experts_per_token() -> None:
    ours = shipped((9, 0), 132)
    mixtral = Shape("experts", 28672, 4096, 8, 2)
    assert missing([mixtral], 2048, ours) == []
    other = mixtral._replace(top=3)
    assert [bucket for _, bucket in missing([other], 2048, ours)] == [b for b in reversed(BUCKETS) if b <= 2048]
    assert other.key(16) == (16, 28672, 4096, 8, 3)
    lab = Lab(lambda *_: 1.0)
    found = search([(other, 2048), (other, 16)], lab, rule, special=True, budget_s=1e3, clock=lab.clock)
    assert set(found) == {other.key(2048), other.key(16)}
    many, few = (tile_search.configs_to_try(other, RULE, bucket, True) for bucket in (2048, 16))
    assert any(config.special for config in many)
    assert not any(config.special for config in few)
    assert not any(config.special for config in tile_search.configs_to_try(other, RULE, 2048, False))


def test_the_fastest_that_runs_wins_and_the_rule_may_be_it() -> None:
    best = candidates(2048, True)[1]

    def ms(shape: Shape, bucket: int, config: GemmConfig) -> float | None:
        if bucket == 16:
            return 1.0 if config == rule(shape, bucket) else 2.0
        return {best: 1.0, candidates(2048, True)[0]: None}.get(config, 3.0)

    lab = Lab(ms)
    reports: list[tuple[int, int]] = []
    found = search(
        [(QKV, 2048), (QKV, 16)], lab, rule, special=True, budget_s=1e3, clock=lab.clock,
        progress=lambda *r: reports.append(r),
    )  # fmt: skip
    assert found == {(2048, 5120, 4000): best, (16, 5120, 4000): RULE._replace(tokens=16)}
    assert reports == [(0, 2), (1, 2), (2, 2)]
    assert lab.requested[0] == (QKV, 2048, RULE._replace(tokens=2048))


def test_a_shape_that_no_configuration_runs_is_left_to_the_rule() -> None:
    lab = Lab(lambda *_: None)
    assert search([(QKV, 64)], lab, rule, special=True, budget_s=1e3, clock=lab.clock) == {}


@pytest.mark.parametrize("budget", [0.5, 3.0, 7.0, 12.0, 40.0, 1000.0])
def test_a_search_ends_within_its_budget_and_keeps_whole_buckets_only(budget: float) -> None:
    lab = Lab(lambda *_: 1.0)
    wanted = [(shape, bucket) for bucket in (2048, 64) for shape in (QKV, DOWN)]
    found = search(wanted, lab, rule, special=True, budget_s=budget, clock=lab.clock)
    assert lab.now - 50.0 <= budget + (1.0 if budget < 1 else 0.0)
    tried = [(s, b) for s, b in wanted if sum((s, b) == a[:2] for a in lab.requested) == 1 + len(candidates(b, True))]
    assert list(found) == [(b, s.features, s.depth) for s, b in tried]


def test_a_second_start_measures_nothing(tmp_path: Path) -> None:
    first, second = Lab(lambda *_: 1.0), Lab(lambda *_: 1.0)
    folder = tmp_path / "new" / "weft"
    found = find([QKV, DOWN], 64, OTHER, folder, first, rule, budget_s=60)
    assert {k[0] for k in found} == {16, 32, 64}
    assert first.requested
    assert find([QKV, DOWN], 64, OTHER, folder, second, rule, budget_s=60) == found
    assert not second.requested
    assert not [f for f in folder.iterdir() if f.suffix == ".part"]


@pytest.mark.parametrize(
    "change", [{"gpu": "X"}, {"sms": 1}, {"triton": "4"}, {"kernels": "def"}, {"capability": (9, 9)}]
)
def test_configurations_of_another_machine_are_not_used(tmp_path: Path, change: dict) -> None:
    find([QKV], 16, OTHER, tmp_path, Lab(lambda *_: 1.0), rule, budget_s=60)
    assert read_cache(tmp_path, OTHER)
    assert read_cache(tmp_path, OTHER._replace(**change)) == {}


def test_shapes_are_added_to_those_in_the_file(tmp_path: Path) -> None:
    find([QKV], 16, OTHER, tmp_path, Lab(lambda *_: 1.0), rule, budget_s=60)
    lab = Lab(lambda *_: 1.0)
    both = find([QKV, DOWN], 16, OTHER, tmp_path, lab, rule, budget_s=60)
    assert {shape for shape, _, _ in lab.requested} == {DOWN}
    assert read_cache(tmp_path, OTHER) == both
    assert len(both) == 2


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"table": 3}', '{"table": {"1,2": [1]}}', '{"table": {"1,2,3": ["x"]}}']
)
def test_a_corrupt_file_is_replaced(tmp_path: Path, text: str) -> None:
    file = tuned.cache_file(tmp_path, OTHER)
    file.write_text(text)
    assert read_cache(tmp_path, OTHER) == {}
    find([QKV], 16, OTHER, tmp_path, Lab(lambda *_: 1.0), rule, budget_s=60)
    assert json.loads(file.read_text())["machine"]["gpu"] == "NVIDIA L40S"
    assert len(read_cache(tmp_path, OTHER)) == 1


def test_configurations_round_trip_through_the_file(tmp_path: Path) -> None:
    table = {(16, 2, 3): SPECIAL, (32, 2, 3): GemmConfig(32, 64, 128, 6, 4, split=4, swap=True, ahead=4)}
    tuned.write_cache(tmp_path, OTHER, table)
    assert read_cache(tmp_path, OTHER) == table


def test_without_time_or_a_writable_folder_nothing_is_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lab = Lab(lambda *_: 1.0)
    assert find([QKV], 16, OTHER, tmp_path, lab, rule, budget_s=0) == {}
    (tmp_path / "file").write_text("")
    assert find([QKV], 16, OTHER, tmp_path / "file" / "weft", lab, rule, budget_s=60) == {}
    assert not lab.requested
    assert "cannot be written" in caplog.text


def _start(folder: Path, log: Path) -> None:
    def measure(shape: Shape, bucket: int, config: GemmConfig) -> float:
        with log.open("a") as file:
            file.write(f"{shape.kind} {bucket} {config.tokens} {config.stages}\n")
        time.sleep(0.002)
        return float(config.stages)

    found = find([QKV, DOWN], 32, OTHER, folder, measure, rule, budget_s=60)
    assert len(found) == 4


def test_of_processes_that_start_together_one_measures(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    starts = [context.Process(target=_start, args=(tmp_path / "cache", log)) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join(120)
    assert [start.exitcode for start in starts] == [0] * 4
    assert len(log.read_text().splitlines()) == sum(2 * (1 + len(candidates(b, False))) for b in (16, 32))


def test_a_start_does_not_wait_forever_for_another_one(tmp_path: Path) -> None:
    lock = tuned.cache_file(tmp_path, OTHER).with_suffix(".lock")
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with tile_search._exclusive(lock, 1.0) as alone:
            assert alone
            entered.set()
            leave.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(120)
    lab = Lab(lambda *_: 1.0)
    assert find([QKV], 16, OTHER, tmp_path, lab, rule, budget_s=0.1) == {}
    leave.set()
    holder.join()
    assert not lab.requested
    assert len(find([QKV], 16, OTHER, tmp_path, lab, rule, budget_s=60)) == 1


def test_fp8_gemms_have_their_own_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from weft.kernels.matmul import fp8_projections
    from weft.kernels.matmul.fp8_few_config import few_config

    monkeypatch.setattr(tuned, "_found", {})
    eight = Shape("residual", 5120, 4000, bits=8)
    assert tuned.decoded(tuned._encoded({eight.key(16): RULE})) == {eight.key(16): RULE}
    by_rule = fp8_projections.by_rule("residual", 9, 5120, 4000, 132)
    tuned.use({(16, 5120, 4000): RULE})
    assert fp8_projections.choose("residual", 9, 5120, 4000, 132) == by_rule
    tuned.use({eight.key(16): RULE})
    assert fp8_projections.choose("residual", 9, 5120, 4000, 132) == RULE
    tuned.use({eight.key(16): RULE._replace(features=128)})
    assert fp8_projections.choose("residual", 9, 5120, 4000, 132).features == 128
    assert fp8_projections.choose("gate_up", 9, 5120, 4000, 132).features == 256  # otherwise nothing would be written
    for kind, bucket, few in (("gate_up", 16, True), ("residual", 64, True), ("qkv", 2048, False)):
        rule_of = by_rule._replace(special=not few, tokens=min(bucket, 128))
        tried = tile_search.configs_to_try(Shape(kind, 6144, 4096, bits=8), rule_of, bucket, True)[1:]
        assert tried
        assert all(config.special != few and config.depth == 128 for config in tried)
        assert all(config.features >= (256 if kind == "gate_up" else 128) for config in tried)
    of_few = few_config("qkv", 6144, 4096, 132)
    assert of_few.special
    tried = tile_search.configs_to_try(Shape("qkv", 6144, 4096, bits=8), of_few, 16, True)
    assert tried[0] == of_few, "beside tiles of the kernel in plain Triton"
    assert len(tried) > 1
    assert not any(config.special for config in tried[1:])
