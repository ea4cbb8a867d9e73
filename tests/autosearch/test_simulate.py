"""The event simulation against closed forms and against its rules."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import LLAMA_8B, assert_schedule_is_possible, with_operations

from weft.autosearch.simulate import simulate
from weft.engine.model.operations import Resource, projection
from weft.engine.plans.plan import Edge, NanoOperation, Period, serial_period

TWO = with_operations(
    LLAMA_8B, [projection("mix", (), 1, 1), replace(projection("read", ("mix",), 1, 1), resource=Resource.MEMORY)]
)


def halves(mix_sms: int, read_sms: int) -> Period:
    return Period(
        256,
        (
            NanoOperation("mix", 0, 128, mix_sms),
            NanoOperation("read", 0, 128, read_sms, "memory"),
            NanoOperation("mix", 128, 256, mix_sms),
            NanoOperation("read", 128, 256, read_sms, "memory"),
        ),
    )


def test_the_serial_plan_takes_the_sum() -> None:
    durations = [0.1, 0.5, 0.05, 0.07, 0.4, 0.2]
    assert simulate(serial_period(LLAMA_8B, 2048, 132), LLAMA_8B, durations, 132).ms == pytest.approx(sum(durations))


@pytest.mark.parametrize(("mix", "read"), [(2.0, 3.0), (3.0, 2.0), (2.0, 2.0), (5.0, 0.5)])
def test_two_halves_alternate_between_two_lanes(mix: float, read: float) -> None:
    # mix 0 | mix 1 with read 0 | mix 0 of the next layer with read 1: the busier lane decides
    timeline = simulate(halves(8, 8), TWO, [mix, read, mix, read], 16)
    assert timeline.ms == pytest.approx(max(2 * mix, 2 * read))


def test_operations_that_do_not_fit_together_run_in_sequence() -> None:
    assert simulate(halves(9, 8), TWO, [2.0, 3.0, 2.0, 3.0], 16).ms == pytest.approx(10.0)


def test_a_wait_delays_an_operation_that_is_ready() -> None:
    free = simulate(halves(8, 8), TWO, [2.0, 2.0, 2.0, 2.0], 16)
    held = simulate(msgspec.structs.replace(halves(8, 8), waits=(Edge(1, 2, 0),)), TWO, [2.0, 2.0, 2.0, 2.0], 16)
    assert (free.ms, held.ms) == (pytest.approx(4.0), pytest.approx(6.0))


def test_an_overlapping_operation_slows_another_only_while_it_runs() -> None:
    """`mix` does one of its 5 ms in the 2 ms that `read` lasts, so it takes 6."""
    drag = [2.0, 1.0, 2.0, 1.0]
    timeline = simulate(
        halves(8, 8), TWO, [5.0, 2.0, 5.0, 2.0], 16, drag=lambda i, others: drag[i] if others else 1.0
    )  # fmt: skip
    assert timeline.ms == pytest.approx(12.0)
    assert timeline.lasts == pytest.approx((6.0, 2.0, 6.0, 2.0))
    assert simulate(halves(8, 8), TWO, [5.0, 2.0, 5.0, 2.0], 16).ms == pytest.approx(10.0)


def test_an_operation_that_can_never_start_is_an_error() -> None:
    with pytest.raises(ValueError, match="more SMs"):
        simulate(halves(8, 17), TWO, [1.0] * 4, 16)
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(msgspec.structs.replace(halves(8, 8), waits=(Edge(1, 0, 0),)), TWO, [1.0] * 4, 16)


@given(st.lists(st.floats(0.01, 5.0), min_size=4, max_size=4), st.integers(1, 16), st.integers(1, 16))
def test_lanes_dependencies_and_capacity_hold_in_every_layer(durations: list[float], mix: int, read: int) -> None:
    period = halves(mix, read)
    timeline = simulate(period, TWO, durations, 16)
    assert_schedule_is_possible(period, TWO, durations, 16)
    assert timeline.ms >= max(durations[0] + durations[2], durations[1] + durations[3]) * (1 - 1e-9)
    assert timeline.ms <= sum(durations) * (1 + 1e-9)
