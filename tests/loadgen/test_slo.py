"""Objectives, attainment and goodput against counting by hand."""

from __future__ import annotations

from array import array
from math import inf

import numpy as np
import pytest

from weft.loadgen.errors import LoadError
from weft.loadgen.measures import Measures
from weft.loadgen.record import Outcome, Record
from weft.loadgen.slo import judge, meets, parse


def record(ttft: float, gaps: list[float], *, start: float = 0.0, outcome: Outcome = Outcome.OK) -> Record:
    out = Record(0, start, 10, len(gaps) + 1, outcome=outcome)
    out.start = start
    if outcome is Outcome.OK:
        out.times = array("d", start + ttft + np.cumsum([0.0, *gaps]))
        out.first, out.end = out.times[0], out.times[-1]
        out.completion_tokens = len(out.times)
    return out


FAILED = record(0, [], outcome=Outcome.OVERLOADED)


def one(text: str):  # type: ignore[no-untyped-def]
    (objective,) = parse(text)
    return objective


def test_measures_follow_their_formulas() -> None:
    measures = Measures([record(0.5, [0.1, 0.3], start=2.0), FAILED])
    assert measures.ttft[0] == pytest.approx(0.5)
    assert measures.e2e[0] == pytest.approx(0.9)
    assert measures.tpot[0] == pytest.approx(0.2)
    assert measures.normalized[0] == pytest.approx(0.3)
    assert measures.itl == pytest.approx([0.1, 0.3])
    assert np.isnan(measures.ttft[1])
    assert len(measures.values("ttft")) == 1
    assert measures.outcomes() == {"ok": 1, "overloaded": 1}


def test_objectives_are_read_and_written() -> None:
    objective = one("ttft:p99:500ms")
    assert (objective.measure, objective.statistic, objective.limit) == ("ttft", 99.0, 0.5)
    assert str(objective) == "ttft:p99:500ms"
    assert one("itl:max:1s").statistic == 100
    assert one("e2e:median:2m").limit == 120
    assert one("tpot:p99.9:50ms").statistic == 99.9
    assert [str(o) for o in parse("nanoflow")] == ["normalized:mean:200ms"]


@pytest.mark.parametrize(
    "text", ["ttft", "ttft:p99", "x:p99:1s", "ttft:p100.5:1s", "ttft:p99:fast", "ttft:p99:0s", "ttft:avg:1s"]
)
def test_an_invalid_objective_is_named(text: str) -> None:
    with pytest.raises(LoadError, match="--slo"):
        parse(text)


def test_failures_stay_in_every_denominator() -> None:
    good, slow = record(0.1, [0.01]), record(0.9, [0.01])
    measures = Measures([good] * 6 + [slow] * 2 + [FAILED] * 2)
    result = judge(parse("ttft:p50:200ms"), measures, span=10.0, max_failures=0.5)
    assert (result.good, result.total) == (6, 10)
    assert result.share == 0.6
    assert result.goodput == 0.6
    assert result.met
    assert result.interval[0] < 0.6 < result.interval[1]


def test_a_percentile_counts_a_failure_as_infinitely_late() -> None:
    measures = Measures([record(0.1, [0.01])] * 98 + [FAILED] * 2)
    (verdict,) = judge(parse("ttft:p99:10s"), measures, 1.0, 1.0).verdicts
    assert verdict.value == inf
    assert not verdict.met
    assert judge(parse("ttft:p95:10s"), measures, 1.0, 1.0).met


def test_a_mean_is_missed_when_too_many_failed() -> None:
    measures = Measures([record(0.1, [0.01])] * 98 + [FAILED] * 2)
    assert judge(parse("ttft:mean:200ms"), measures, 1.0, 0.02).met
    assert not judge(parse("ttft:mean:200ms"), measures, 1.0, 0.01).met


def test_a_request_must_keep_every_limit_to_be_good() -> None:
    measures = Measures([record(0.1, [0.5]), record(0.9, [0.01]), record(0.1, [0.01])])
    result = judge(parse("ttft:p99:200ms") + parse("tpot:p99:100ms"), measures, 1.0, 0.0)
    assert result.good == 1
    assert [v.attainment for v in result.verdicts] == pytest.approx([2 / 3, 2 / 3])


def test_gaps_are_judged_by_the_same_statistic_of_each_request() -> None:
    measures = Measures([record(0.1, [0.01] * 9 + [1.0]), record(0.1, [0.2] * 10), record(0.1, [])])
    assert meets(one("itl:p50:100ms"), measures).tolist() == [True, False, True]
    assert meets(one("itl:max:300ms"), measures).tolist() == [False, True, True]


def test_a_stall_is_the_longest_gap_of_a_request() -> None:
    records = [record(0.1, [0.01] * 9 + [0.3]), record(0.1, [0.6, 0.25]), record(5.0, []), record(0.1, [0.1]), FAILED]
    measures = Measures(records)
    assert measures.stall[:2] == pytest.approx([0.3, 0.6])
    assert np.isnan(measures.stall[[2, 4]]).all()  # a first token, however late, is no stall
    assert measures.distributions["stall"].n == 3
    assert (measures.stalled(0.2), measures.stalled(0.5)) == (2 / 4, 1 / 4)  # of the answered requests
    assert np.isnan(Measures([FAILED]).stalled(0.2))
    assert meets(one("stall:p99:500ms"), measures).tolist() == [True, False, True, True, False]
    assert not judge(parse("stall:p50:100ms"), measures, 1.0, 0.5).met


def test_no_measurement_meets_no_objective() -> None:
    assert not judge(parse("nanoflow"), Measures([]), 1.0, 0.5).met
    assert not judge(parse("nanoflow"), Measures([FAILED]), 1.0, 0.5).met
