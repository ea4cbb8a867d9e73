"""Engines in virtual time: they compute what real ones compute, at the times of the profile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fleets import ENGINE, at, drawn, profile, run
from msgspec import structs

from weft.deploy.fleet.clock import Clock, Processor, Sharing, Slowdown
from weft.deploy.fleet.engine import EngineOptions, SimulatedEngine, SimulatedRequest
from weft.deploy.fleet.front import Keys
from weft.deploy.fleet.profile import Features, SideBySide, load_profile
from weft.deploy.fleet.simulation import Failure
from weft.engine.config import itl_objective
from weft.loadgen.lengths import Lengths
from weft.loadgen.record import Outcome
from weft.tools.fleet.overhead import Observations, derive
from weft.tools.fleet.record import limits_of

BROKEN, OK = Outcome.BROKEN, Outcome.OK


def test_one_request_takes_the_time_of_its_iterations() -> None:
    made = profile(request_ms=3.0, answer_ms=2.0, gap_ms=0.5, host_ms=1.0)
    (record,) = run(at([1.0], 20, 5), of=made).everything.records
    assert record.start == 1.0
    # Half of the host's millisecond falls before the launch, half at the commit, which is hidden from the second token
    # on.
    assert record.first - record.start == pytest.approx(3e-3 + 0.5e-3 + 10.5e-3 + 0.5e-3 + 2e-3)
    assert np.diff(record.times) == pytest.approx([10.5e-3] * 4)
    assert record.end == record.times[-1]
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (20, 5, 0)


def test_a_request_that_arrives_during_an_iteration_joins_the_one_after_the_next() -> None:
    made = profile(request_ms=0.0)
    early, late = run(at([0.0, 0.015], 20, 10), of=made).everything.records
    # Iterations begin at 0, 10, 20, 30 ms; the third was launched when the second began.
    assert early.first == pytest.approx(0.010)
    assert late.first == pytest.approx(0.040)


def test_a_long_prompt_takes_as_many_iterations_as_the_budget_requires() -> None:
    result = run(at([0.0], 200, 1))
    assert result.iterations == 4
    assert result.everything.records[0].first == pytest.approx(0.040)


@pytest.mark.parametrize(("family", "pages"), [("", 40), ("nemotron-h", 120)])
def test_iterations_are_those_of_a_real_engine(family: str, pages: int, tmp_path: Path) -> None:
    """Compares batch by batch: a model's engine, offline, and a simulated one of the same size; also with recurrent
    states, which take pages."""
    from harness import Harness
    from tiny import save_tiny

    size = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "num_pages": pages, "page_size": 16, "max_model_len": 256}
    harness = Harness(save_tiny(family, tmp_path) if family else "demo", cpu_threads=1, **size)
    limits = limits_of(harness.engine)
    assert (limits.state_pages > 0) == bool(family)
    rng = np.random.default_rng(3)
    requested = [(rng.integers(3, 199, n).astype(np.int32), out) for n, out in zip(
        rng.integers(5, 150, 14).tolist(), rng.integers(1, 40, 14).tolist(), strict=True)]  # fmt: skip
    requested += [(requested[0][0].copy(), 9), (np.concatenate((requested[1][0], requested[0][0][:7])), 5)]
    real: list[Features] = []
    launch = harness.engine.runner.launch
    harness.engine.runner.launch = lambda batch: (real.append(Features.of(batch)), launch(batch))[1]  # type: ignore[method-assign]
    for prompt, out in requested:
        harness.add(prompt, max_tokens=out, temperature=0.0, ignore_eos=True)
    harness.run()
    harness.engine.close()

    simulated: list[Features] = []
    made = profile()
    clock = Clock()
    engine = SimulatedEngine(
        clock, Processor(clock), made, EngineOptions(**structs.asdict(limits)), lambda _heard: None
    )
    started = engine.device.launch
    engine.device.launch = lambda batch: (simulated.append(Features.of(batch)), started(batch))[1]  # type: ignore[method-assign]
    for handle, (prompt, out) in enumerate(requested):
        engine.send(SimulatedRequest(handle, prompt, out, known=True))
    clock.run()
    engine.scheduler.check()
    assert simulated == real
    assert sum(f.tokens for f in real) > 500


def test_unknown_lengths_end_with_an_end_token() -> None:
    load = at([0.0, 0.0, 0.2], [20, 30, 20], [5, 9, 1])
    known, unknown = run(load), run(load, known=False)
    assert [r.completion_tokens for r in unknown.everything.records] == [5, 9, 1]
    assert [r.outcome for r in unknown.everything.records] == [OK] * 3
    # A request that ends by itself takes one extra iteration.
    assert unknown.iterations >= known.iterations


def test_the_same_seed_gives_the_same_figures() -> None:
    turns = Lengths("uniform", 1, 4)
    loads = [drawn(5, 4, seed=s, inputs="uniform:10:200", outputs="uniform:2:40", turns=turns) for s in (1, 1, 2)]
    one, same, other = (json.dumps(run(load, 2).summary()) for load in loads)
    assert one == same != other


def test_engines_on_few_cores_share_them() -> None:
    clock, ends = Clock(), {}
    processor = Processor(clock, Sharing(Slowdown(2.0), Slowdown(2.0)))
    for i, (begin, seconds) in enumerate([(0.0, 3.0), (0.0, 3.0), (1.5, 1.0)]):
        clock.at(begin, lambda i=i, s=seconds: processor.start(s, lambda: ends.update({i: clock.now})))  # type: ignore[misc]
    clock.run()
    # From 1.5 on, three at two thirds of the speed: the third ends at 3.0, when the others have 0.5 left.
    assert ends == pytest.approx({2: 3.0, 0: 3.5, 1: 3.5})
    assert run(at([0.0] * 3, 20, 10), 3).span == pytest.approx(0.1)
    assert run(at([0.0] * 3, 20, 10), 3, cores=1.0, of=profile(threads=1)).span == pytest.approx(0.3, rel=0.2)


def test_beyond_the_recorded_range_cores_are_shared_equally() -> None:
    assert [Slowdown(2.0).of(n) for n in (0, 1, 2, 3, 4)] == [1, 1, 1, 1.5, 2]
    assert [Slowdown(2.0, threads=2).of(n) for n in (1, 2)] == [1, 2]
    assert [Slowdown(2.0, known=(1.0, 1.2, 1.8)).of(n) for n in (0, 1, 2, 3, 6)] == pytest.approx([1, 1, 1.2, 1.8, 3.6])
    assert [Slowdown(8.0, known=(1.0, 1.1)).of(n) for n in (2, 8, 16)] == pytest.approx([1.1, 1.1, 2.2])


def test_an_idle_engine_slows_no_other() -> None:
    clock, ends = Clock(), {}
    curve = Slowdown(1.0, known=(1.0, 2.0))
    processor = Processor(clock, Sharing(curve, curve._replace(known=(1.0, 3.0))))
    processor.start(1.0, lambda: ends.update(engine=clock.now))
    processor.start(0.5, lambda: ends.update(answer=clock.now), counts=False, prompt=True)
    clock.run()
    assert ends == {"engine": 1.0, "answer": 0.5}
    processor.start(1.0, lambda: ends.update(engine=clock.now - 1))
    processor.start(1.0, lambda: ends.update(prompt=clock.now - 1), prompt=True)
    clock.run()
    # Both run until 2.0, when the engine is done and the prompt is a third of a second short of two.
    assert ends == pytest.approx({"engine": 2.0, "prompt": 2.0 + 1 / 3, "answer": 0.5})


def test_recorded_overheads_of_a_daemon_appear_in_its_simulation() -> None:
    between, firsts, prompt = (0.012, 0.013, 0.018), (0.030, 0.036, 0.060), 32
    seen = Observations(tuple((b,) for b in between), tuple(((prompt, f),) for f in firsts))
    made = profile(threads=1)
    around = derive(seen, made)
    assert around.side_by_side is not None
    made, cores = around.put_into(made), float(around.side_by_side.cores)
    for engines in (1, 2, 3):
        load = at([0.0] * (engines - 1) + [0.5, 5.0], prompt, [100] * engines + [1])
        *streams, alone = run(load, 3, cores=cores, of=made).everything.records
        assert alone.first - alone.start == pytest.approx(firsts[0])
        first = streams[-1]
        assert first.first - first.start == pytest.approx(firsts[engines - 1], rel=0.02)
        together = np.diff(first.times[:40])
        assert together == pytest.approx([between[engines - 1]] * 39, rel=0.02)
    # It was not recorded on other cores.
    apart = run(at([0.0] * 3, prompt, 20), 3, cores=64.0, of=made).everything.records
    assert np.diff(apart[0].times) == pytest.approx([between[0]] * 19)


def test_times_that_vary_with_other_engines_do_so_and_repeat_with_the_same_seed() -> None:
    contention = SideBySide(2, (1.0, 2.0), (1.0, 3.0), ((1.0,), (0.5, 1.5)), ((1.0,), (0.5, 0.5, 0.5, 2.5)))
    made = profile(threads=1, side_by_side=contention)
    load = at([0.0, 0.0, 5.0], 20, [200, 200, 50])
    found, again = (run(load, 2, cores=2.0, of=made).everything.records for _ in range(2))
    assert [r.times for r in found] == [r.times for r in again]
    for together in found[:2]:
        gaps = np.diff(together.times)[:150]
        assert gaps.min() == pytest.approx(0.010, rel=0.01)
        assert gaps.max() == pytest.approx(0.030, rel=0.01)
        assert gaps.mean() == pytest.approx(0.020, rel=0.15)
    assert np.diff(found[2].times) == pytest.approx([0.010] * 49)


def test_an_answer_may_start_with_tokens_that_are_not_text() -> None:
    (plain,) = run(at([0.0], 20, 9)).everything.records
    (late,) = run(at([0.0], 20, 9), of=profile(silent=(3,))).everything.records
    assert late.first == plain.times[3]
    assert list(late.times) == list(plain.times[3:])
    assert (late.end, late.completion_tokens) == (plain.end, 9)
    (short,) = run(at([0.0], 20, 2), of=profile(silent=(60,))).everything.records
    assert list(short.times) == [short.end]
    many = run(at([float(i) for i in range(200)], 20, 9), of=profile(silent=(0, 0, 0, 2))).everything.records
    lacking = [9 - len(r.times) for r in many]
    assert set(lacking) == {0, 2}
    assert lacking.count(2) == pytest.approx(50, abs=2)


def test_an_engine_that_exits_loses_its_started_requests_and_no_others() -> None:
    # Both engines have one; the third waits for its first token when the engine ends.
    load = at([0.0, 0.0, 0.095, 0.5], 20, [30, 30, 30, 5])
    result = run(load, 2, failures=(Failure(0, 0.1, 0.2),))
    lost = [r for r in result.everything.records if not r.ok]
    assert len(lost) == 1
    assert lost[0].outcome is BROKEN
    assert len(lost[0].times) > 0
    assert result.retried == (1 if len(result.everything.records[2].times) == 30 else 0)
    assert result.everything.outcomes() == {"ok": 3, "broken": 1}


def test_a_request_without_output_is_restarted_once_at_another_engine() -> None:
    load = at([0.0, 0.0], 600, 2)
    result = run(load, 2, failures=(Failure(0, 0.02, 1.0),))
    assert (result.retried, result.everything.outcomes()) == (1, {"ok": 2})
    both = run(load, 2, failures=(Failure(0, 0.02, 5.0), Failure(1, 0.05, 5.0)))
    assert both.everything.outcomes() == {"ok": 0, "overloaded": 1, "broken": 1}


def test_a_full_queue_refuses_requests() -> None:
    result = run(at([0.0] * 20, 20, 10), max_queued_requests=4)
    assert result.everything.outcomes() == {"ok": 12, "overloaded": 8}
    refused = run(at([0.0], 2000, 10))
    assert refused.everything.outcomes() == {"ok": 0, "refused": 1}


def test_prompts_are_cut_to_the_requested_time_between_tokens() -> None:
    """Iterations of 10 ms up to 8 tokens, plus a millisecond for each further token."""
    of = profile(knots=(8.0, 1008.0), dense_ms=(10.0, 1010.0))
    load = drawn(rate=3.0, duration=20.0, inputs="300", outputs="40", seed=1)
    plain = run(load, of=of)
    cut = run(load, of=of, engine=ENGINE._replace(itl_slo=itl_objective("40ms")))
    p99 = [float(np.percentile(result.judged.values("itl"), 99)) for result in (plain, cut)]
    assert p99[0] > 0.06
    assert p99[1] < 0.041
    assert cut.computed_tokens == plain.computed_tokens


def test_joules_are_idle_and_iteration_energy() -> None:
    result = run(at([0.0], 20, 10))
    assert result.iterations == 10
    assert result.joules == pytest.approx(100.0 * 0.1 + 10.0)
    assert run(at([0.0], 20, 10), of=profile(energy=None)).joules is None


@pytest.mark.nightly
def test_routing_keeps_the_prefixes_of_conversations_and_spreads_the_load() -> None:
    """The real router over three engines with real schedulers and prefix indexes, against one engine as large."""
    few = ENGINE._replace(num_pages=900, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=2048)
    many = few._replace(num_pages=2700, max_num_seqs=48)
    made = profile(knots=(1.0, 256.0), dense_ms=(15.0, 40.0))
    load = drawn(4, 20, inputs="uniform:20:150", outputs="uniform:10:60", turns=Lengths("uniform", 3, 8), think=2.0,
                 context=2048)  # fmt: skip
    one, three = run(load, 1, engine=many, of=made), run(load, 3, engine=few, of=made)
    print(f"{three.hit_share:.3f} of {one.hit_share:.3f} found, {three.imbalance:.2f} of the mean load at most")
    assert one.hit_share > 0.4
    assert three.hit_share >= 0.9 * one.hit_share
    assert three.imbalance <= 1.3
    assert three.everything.outcomes() == one.everything.outcomes()


def test_a_prefix_shared_by_all_is_computed_about_once_per_engine() -> None:
    shared = drawn(20, 10, inputs="160", outputs="8", shared=0.6)
    result = run(shared, 3)
    assert result.hit_share > 0.5
    assert result.imbalance <= 1.3


def test_the_shipped_profile_can_be_read() -> None:
    shipped = load_profile("llama-3-8b-h200")
    assert shipped.seconds(Features(1, 1, 1280, 0, 0)) == pytest.approx(4.35e-3, rel=0.03)


def test_a_key_does_not_wait_for_the_queue_of_another() -> None:
    """One key floods the engine; another one sends a request from time to time."""
    times = [i * 1e-3 for i in range(60)] + [2.0, 4.0]
    workload = at(times, 32, [400] * 60 + [8, 8])
    keys = Keys((0,) * 60 + (1, 1))
    alone, both = run(workload), run(workload, keys=keys)
    waited = [[r.first - r.due for r in result.everything.records[60:]] for result in (alone, both)]
    assert min(waited[0]) > 4.0, "without keys, they wait for all earlier requests"
    assert max(waited[1]) < 1.0
    summary = both.summary()["keys"]
    assert [key["requests"] for key in summary] == [60, 2]
    assert summary[1]["latency"]["ttft"]["mean"] == pytest.approx(sum(waited[1]) / 2)
    assert "keys" not in alone.summary()


def test_keys_share_no_prefixes() -> None:
    workload = drawn(rate=1.0, duration=8.0, inputs="96", shared=0.5)
    one, two = run(workload), run(workload, keys=Keys((0, 1)))
    found = [sum(r.cached_tokens > 0 for r in result.everything.records) for result in (one, two)]
    assert found == [len(workload) - 1, len(workload) - 2]


@pytest.mark.parametrize(("shares", "turns"), [((1,), "0"), ((3, 1), "0010"), ((2, 1, 2), "02102"), ((1, 1), "01")])
def test_keys_are_spread_by_their_shares(shares: tuple[int, ...], turns: str) -> None:
    keys = Keys.of(shares)
    assert "".join(map(str, keys.turns)) == turns
    assert keys.count == len(shares)
    assert [keys.key(i) for i in range(len(turns), 2 * len(turns))] == list(keys.turns)
    of_users = Keys.of(shares, users=3)
    assert [of_users.key(i) for i in range(3)] == [of_users.key(3 + i) for i in range(3)]
