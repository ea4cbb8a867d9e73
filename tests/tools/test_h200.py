"""The shipped profile agrees with what engines did on an H200 within 10 %; docs/simulator.md has all rows."""

from __future__ import annotations

import pytest
from h200_figures import conversations, offline, one_request, online

from weft.deploy.fleet.profile import load_profile
from weft.tools.fleet.h200 import derived


def test_the_shipped_profile_is_derived_from_its_sources() -> None:
    made, shipped = derived(), load_profile("llama-3-8b-h200")
    assert made.dense_ms == pytest.approx(shipped.dense_ms)
    assert made.energy == shipped.energy
    assert (made.context_ms, made.pair_ms) == pytest.approx((shipped.context_ms, shipped.pair_ms))


def test_some_figures_of_the_benchmarks() -> None:
    rows = [*offline("1024/512, 300"), *online(29.2), *one_request(), *conversations()]
    assert len(rows) == 12
    assert not [row for row in rows if abs(row.error) > 0.1]


@pytest.mark.nightly
def test_all_figures_of_the_benchmarks() -> None:
    assert not [row for row in (*offline(), *online()) if abs(row.error) > 0.1]
