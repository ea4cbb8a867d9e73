"""From measured pairs to the exchange of SMs for speed."""

from __future__ import annotations

import pytest
from synthetic import LLAMA_8B, TYPICAL, SyntheticBench, target_for

from weft.autosearch.interference import Interference
from weft.autosearch.machine import Machine
from weft.autosearch.profile import Curves, PairPoint, Point, Profile, work_of
from weft.autosearch.profiler import Grid, Profiler
from weft.engine.model.operations import Resource

RESOURCES = {o.name: o.resource for o in LLAMA_8B.layer_operations()}


def test_slowdowns_of_the_machine_are_found() -> None:
    bench = SyntheticBench(LLAMA_8B, compute_slowdown=1.12, guest_slowdown=1.3)
    profiler = Profiler(bench, LLAMA_8B, TYPICAL, Grid.coarse(TYPICAL, 132), lambda *_: None)
    machine = Machine(profiler.run(target_for(LLAMA_8B), 100), LLAMA_8B)
    found = machine.interference
    for sms in (16, 24, 32, 40, 64):
        assert found.slowdown(Resource.MEMORY, sms) == pytest.approx(1.3)
        assert found.slowdown(Resource.COMPUTE, 132 - sms) == pytest.approx(1.12)
    assert found.slowdown(Resource.NETWORK, 32) == 1.0
    decode = next(o for o in LLAMA_8B.layer_operations() if o.name == "decode")
    work = work_of(decode, TYPICAL)
    for row in found.table(Resource.MEMORY):
        truth = bench.ms(decode, work, 132) / (1.3 * bench.ms(decode, work, round(row.share * 132)))
        assert row.performance == pytest.approx(truth)
        assert row.spread == pytest.approx(0, abs=1e-9)
        assert row.pairs == 5
    # D_best / P(R) is what the pair measured
    assert machine.duration("decode", work, 32) == pytest.approx(1.3 * bench.ms(decode, work, 32))
    assert machine.duration("decode", work, 132) == pytest.approx(bench.ms(decode, work, 132))


def hand_made(pairs: list[tuple[str, int, float, float]]) -> Interference:
    """Alone, on any SMs, both take 1 ms. Each pair: (GEMM, guest SMs, ms of the GEMM, ms of the guest)."""
    names = ("qkv", "down", "decode")
    points = tuple(Point(n, 100.0, s, 1.0, 1.0, 1.0) for n in names for s in (10, 20, 80, 90, 100))
    both = tuple(PairPoint(n, "decode", 100.0, 100.0, 100 - s, s, a, b, 1.0) for n, s, a, b in pairs)
    profile = Profile(target_for(LLAMA_8B, 100), TYPICAL, dict.fromkeys(names, 0), points, both)
    return Interference(profile, Curves(profile), RESOURCES)


def test_spread_is_the_standard_deviation_over_the_mean() -> None:
    (row,) = hand_made([("qkv", 10, 1.25, 2.0), ("down", 10, 2.5, 2.0)]).table(Resource.COMPUTE)
    assert row.share == 0.9
    assert row.performance == pytest.approx(0.6)  # of 0.8 and 0.4
    assert row.spread == pytest.approx(0.08**0.5 / 0.6)
    assert row.pairs == 2


def test_the_papers_table_leaves_out_dominated_pairs() -> None:
    found = hand_made([("qkv", 10, 1.25, 2.0), ("qkv", 20, 2.0, 1.25), ("down", 20, 2.5, 4.0)])
    assert found.exchange(Resource.MEMORY) == [pytest.approx((0.2, 0.5)), pytest.approx((0.5, 0.8))]


def test_a_partner_never_makes_an_operation_faster() -> None:
    assert hand_made([("qkv", 10, 0.9, 0.8)]).slowdown(Resource.COMPUTE, 90) == 1.0
