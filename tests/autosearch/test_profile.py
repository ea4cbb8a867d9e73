"""Profiles return measured points, interpolate near the truth, and reject bad files in one line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from synthetic import LLAMA_8B, TYPICAL, SyntheticBench, spec_of, target_for

from weft.autosearch import profile as profiles
from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.machine import Machine
from weft.autosearch.profile import Curves, Profile, cache_path, load_profile, recorded_profiles, work_of
from weft.autosearch.profiler import CONFIGS, Grid, Profiler
from weft.autosearch.workload import steady_load, workload_load
from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import NanoOperation, Period

OPERATIONS = {o.name: o for o in LLAMA_8B.layer_operations()}


def recorded(bench: SyntheticBench | None = None, load: Load = TYPICAL) -> Profile:
    bench = bench or SyntheticBench(LLAMA_8B)
    profiler = Profiler(bench, bench.spec, load, Grid.coarse(load, bench.num_sms), lambda *_: None)
    return profiler.run(target_for(bench.spec), 100.0)


def test_the_coarse_grid_is_cheap_enough_for_150_seconds() -> None:
    bench = SyntheticBench(LLAMA_8B)
    recorded(bench)
    assert bench.calls < 160
    full = Grid.full(TYPICAL, 132)
    assert full.tokens == tuple(range(128, 2049, 128))
    assert full.guest_sms == tuple(range(8, 67, 8))


def test_measured_points_are_returned() -> None:
    profile = recorded()
    curves = Curves(profile)
    for point in profile.points:
        if point.config == profile.configs.get(point.operation):
            assert curves.ms(point.operation, point.work, point.sms) == pytest.approx(point.ms)
            assert curves.joules(point.operation, point.work, point.sms) == pytest.approx(point.ms * point.watts / 1e3)


@pytest.mark.parametrize("sms", [132, 116, 108, 100, 92, 84, 76, 68])
@pytest.mark.parametrize("tokens", range(256, 2049, 256))
def test_gemms_between_points_keep_their_waves(sms: int, tokens: int) -> None:
    bench, curves = SyntheticBench(LLAMA_8B), Curves(recorded())
    for name in ("qkv", "o", "gate_up", "down"):
        truth = bench.ms(OPERATIONS[name], tokens, sms)
        assert curves.ms(name, tokens, sms) == pytest.approx(truth, rel=0.03)


@pytest.mark.parametrize("sms", [16, 20, 28, 32, 44, 56, 64, 132])
@pytest.mark.parametrize("share", [0.25, 0.4, 0.8, 1.0, 1.6])
def test_attention_between_points_is_near_the_truth(sms: int, share: float) -> None:
    bench, curves = SyntheticBench(LLAMA_8B), Curves(recorded())
    work = share * TYPICAL.kv_tokens
    assert curves.ms("decode", work, sms) == pytest.approx(bench.ms(OPERATIONS["decode"], work, sms), rel=0.06)


def test_attention_slows_down_below_the_fewest_measured_sms_and_no_work_takes_no_time() -> None:
    curves = Curves(recorded())
    assert curves.ms("decode", 1e6, 8) == pytest.approx(2 * curves.ms("decode", 1e6, 16))
    assert curves.ms("decode", 0, 8) == 0.0


def test_work_is_the_quantity_that_time_grows_with() -> None:
    load = Load(2048, 600, 1000, 512)
    assert work_of(OPERATIONS["gate_up"], load) == 2048
    assert work_of(OPERATIONS["decode"], load) == 600_000
    assert work_of(OPERATIONS["prefill"], load) == 1448 * 256


def test_the_fastest_configuration_is_kept_and_serial_plans_use_the_kernels_own() -> None:
    class Tuned(SyntheticBench):
        def alone(self, op: NanoOperation, load: Load) -> Timing:
            if op.config == CONFIGS[0]:
                raise ConfigError("not on this GPU")
            timing = super().alone(op, load)
            return timing._replace(ms=timing.ms * (0.9 if op.config == CONFIGS[2] else 1.0))

    profile = recorded(Tuned(LLAMA_8B))
    assert set(profile.configs.values()) == {CONFIGS[2]}
    curves = Curves(profile)
    assert curves.ms("down", 2048, 132) == pytest.approx(0.9 * curves.ms("down", 2048, 132, serial=True))


def test_a_short_time_limit_still_measures_every_operation_alone() -> None:
    bench, clock = SyntheticBench(LLAMA_8B), partial(next, count())
    reported: list[tuple[str, int, int]] = []
    grid = Grid.coarse(TYPICAL, 132)
    profiler = Profiler(bench, LLAMA_8B, TYPICAL, grid, lambda *step: reported.append(step), clock=clock)
    profile = profiler.run(target_for(LLAMA_8B), 8)
    assert reported[-1] == ("out of time", len(reported) - 1, reported[0][2])
    assert {p.operation for p in profile.points} == set(OPERATIONS)
    assert not profile.pairs
    Machine(profile, LLAMA_8B)
    with pytest.raises(ConfigError, match=r"no time to measure .*down.* in 2 seconds"):
        Profiler(bench, LLAMA_8B, TYPICAL, grid, lambda *_: None, clock=clock).run(target_for(LLAMA_8B), 2)


def test_remaining_time_goes_to_a_finer_grid() -> None:
    coarse, full = Grid.coarse(TYPICAL, 132), Grid.full(TYPICAL, 132)

    def profiled(budget_s: float, *grids: Grid, clock: Callable[[], float] = time.monotonic) -> Profile:
        bench = SyntheticBench(LLAMA_8B)
        profiler = Profiler(bench, LLAMA_8B, TYPICAL, grids[0], lambda *_: None, *grids[1:], clock=clock)
        return profiler.run(target_for(LLAMA_8B), budget_s)

    some = profiled(400, coarse, full, clock=partial(next, count()))
    first, every = profiled(100, coarse), profiled(100, coarse, full)
    assert set(first.points) < set(some.points) < set(every.points)
    assert set(first.pairs) < set(some.pairs) == set(every.pairs)
    assert first.configs == some.configs == every.configs
    for profile in (some, every):
        assert len(set(profile.pairs)) == len(profile.pairs)
        assert len(set(profile.points)) == len(profile.points)
    curves, truth = Curves(every), SyntheticBench(LLAMA_8B)
    for sms in range(68, 125, 8):
        assert curves.ms("down", 896, sms) == pytest.approx(truth.ms(OPERATIONS["down"], 896, sms))


def test_a_file_gives_the_same_profile_back_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path / "none")
    profile = recorded()
    path = cache_path(profile.target)
    assert path != cache_path(target_for(spec_of(4096, 14336, 40, 32, 8)))
    assert path.parent == tmp_path / "weft" / "profiles"
    profile.save(path)
    (path.parent / "broken.json").write_text("{")
    assert load_profile(path) == profile
    assert list(recorded_profiles()) == [(path, profile)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "is not a profile"),
        ({"version": 0}, "of version 0, this weft reads 1"),
        ({"points": []}, "no point of decode, down"),
        ({"load": 1}, "not a valid profile"),
    ],
)
def test_a_file_that_is_not_a_profile_is_a_one_line_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.json"
    recorded().save(path)
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | change))
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)
    raw["points"][0]["ms"] = 0
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="not positive"):
        load_profile(path)


def test_a_profile_of_another_model_is_refused() -> None:
    profile = recorded()
    features = {k: v for k, v in profile.features.items() if k != "down"}
    with pytest.raises(ConfigError, match="no operation down"):
        Machine(Profile(profile.target, profile.load, features, profile.points), LLAMA_8B)


def test_a_workload_becomes_its_steady_state() -> None:
    assert workload_load("1024:512", 2048) == Load(2048, 683, 1280, 1024)
    assert workload_load("512:512", 2048, max_num_seqs=1000).decodes == 1000
    # of tokens: longer requests decode longer and see more
    mixed = steady_load([(100, 100), (1000, 300)], 1500)
    assert mixed.decodes == round(1500 * 400 / 1500)
    assert mixed.context == round((100 * 150 + 300 * 1150) / 400)
    assert mixed.prompt == round((100 * 100 + 1000 * 1000) / 1100)


@pytest.mark.parametrize("text", ["1024", "a:b", "0:5", "5:-1", "1:2:3", ""])
def test_an_invalid_workload_is_a_one_line_error(text: str) -> None:
    with pytest.raises(ConfigError, match="must be PROMPT:OUTPUT"):
        workload_load(text, 2048)


def test_nano_batches_get_the_decodes_that_the_engine_assigns() -> None:
    parts = TYPICAL.assigned([(0, 1280), (1280, 2048)])
    assert [p.tokens for p in parts] == [1280, 768]
    assert sum(p.decodes for p in parts) == 683
    assert abs(parts[0].decodes - parts[1].decodes) <= 1
    full = Load(512, 500, 100, 1).assigned([(0, 128), (128, 512)])
    assert [p.decodes for p in full] == [128, 372]


@pytest.mark.parametrize("spec", [LLAMA_8B, spec_of(3584, 18944, 28, 28, 4)], ids=["8b", "qwen"])
def test_a_profile_cut_short_already_has_the_cost_of_overlap(spec: ModelSpec) -> None:
    bench = SyntheticBench(spec, compute_slowdown=1.24, guest_slowdown=1.49)
    profiler = Profiler(bench, spec, TYPICAL, Grid.coarse(TYPICAL, 132), lambda *_: None)
    tasks = profiler.tasks()
    profiler.tasks = lambda: tasks[: len(tasks) // 4]  # type: ignore[method-assign]
    machine = Machine(profiler.run(target_for(spec), 100.0), spec)
    for cut, sms in ((1024, 32), (1024, 20), (896, 48), (768, 32)):
        period = halves(cut, sms)
        assert machine.period(period, TYPICAL).ms == pytest.approx(bench.period(period, TYPICAL).ms, rel=0.02)


def halves(cut: int, attention_sms: int) -> Period:
    """Two nano-batches half a layer apart."""
    operations = []
    for own in ((0, cut), (cut, 2048)):
        for name in ("o", "gate_up", "down", "qkv", "decode", "prefill"):
            product = name not in ("decode", "prefill")
            sms, lane = (attention_sms, "memory") if name == "decode" else (132 - attention_sms, "compute")
            ahead, config = name in ("qkv", "decode", "prefill"), CONFIGS[0] if product else None
            operations.append(NanoOperation(name, *own, sms, lane, ahead, config))  # type: ignore[arg-type]
    return Period(2048, tuple(operations))


def test_a_model_with_much_kv_is_measured_at_the_capacity_of_its_gpu() -> None:
    spec = spec_of(5120, 13824, 40, 40, 40)  # 819 kB a token, ten times as much as with grouped heads
    bench = SyntheticBench(spec)
    bench.memory = 140 * 10**9
    room = profiles.kv_capacity(bench.memory, spec)
    assert room is not None
    assert 90 * TYPICAL.context < room < 140 * TYPICAL.context
    requested: list[Load] = []
    for name in ("alone", "pair"):
        really = getattr(bench, name)
        setattr(bench, name, lambda *a, really=really: (requested.append(a[-1]), really(*a))[1])
    profile = recorded(bench)
    assert profile.load.tokens == TYPICAL.tokens
    assert max(load.kv_tokens for load in requested) == profile.load.kv_tokens <= room
    assert {p.operation for p in profile.points} == set(profile.features)
