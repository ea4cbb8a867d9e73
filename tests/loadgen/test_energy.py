"""Joules of a run, from the server's counter, in our report and as a row of InferenceX."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from weft.loadgen.inferencex import row
from weft.loadgen.measures import Measures
from weft.loadgen.record import Outcome, Record
from weft.loadgen.run import Run, RunOptions
from weft.loadgen.server_view import ServerView, Snapshot, difference
from weft.loadgen.workload import Clipping

METRICS = """\
# TYPE weft_energy_joules counter
weft_energy_joules_total{{device="cuda:0",source="nvml"}} {a}
weft_energy_joules_total{{device="cuda:1",source="nvml"}} 50
# TYPE weft_build_info gauge
weft_build_info{{version="1.2",model="m",dtype="bfloat16",device="cuda:0"}} 1.0
"""


def run_with(view: ServerView | None) -> Run:
    """Four users, ten requests of 100 tokens in and 5 out, in two seconds."""
    records = []
    for i in range(10):
        record = Record(i, 0.2 * i, 100, 5, outcome=Outcome.OK, prompt_tokens=100, completion_tokens=5)
        record.start, record.first = record.due, record.due + 0.1
        record.times = array("d", [record.first + 0.025 * k for k in range(5)])
        record.end = record.times[-1]
        records.append(record)
    measures = Measures(records)
    return Run(
        "s", "http://s", "m", "", None, 4, 2.0, 2.0, measures, measures, np.zeros(1), 0.1, RunOptions(()),
        Clipping(), view,
    )  # fmt: skip


def view() -> ServerView:
    before, after = (Snapshot.parse(METRICS.format(a=a)) for a in (1000, 2500))
    assert before is not None
    assert after is not None
    return difference(before, after, 2.5)


def test_joules_of_all_devices_over_the_run_alone() -> None:
    assert run_with(view()).energy() == pytest.approx(
        {
            "joules": 1500,
            "watts": 600,
            "joules_per_request": 150,
            "joules_per_output_token": 30,
            "joules_per_token": 1500 / 1050,
        }
    )
    assert run_with(view()).summary()["energy"]["watts"] == 600


def test_a_server_without_a_joule_counter_reports_none() -> None:
    assert run_with(ServerView({}, {}, {}, None, 2.5)).energy() is None
    assert row(run_with(None), {})["power_valid"] == 0


def test_a_row_has_the_fields_and_units_of_the_public_results() -> None:
    found = row(run_with(view()), {"isl": 100, "osl": 5, "tp": 2, "hw": "h200"})
    assert found | {
        "hw": "h200", "conc": 4, "framework": "weft", "precision": "bf16", "tp": 2, "isl": 100, "osl": 5,
        "power_metric_schema_version": 2, "power_valid": 1,
    } == found  # fmt: skip
    assert found["tput_per_gpu"] == pytest.approx(1050 / 2 / 2)
    assert found["output_tput_per_gpu"] + found["input_tput_per_gpu"] == pytest.approx(found["tput_per_gpu"])
    assert (found["median_ttft"], found["median_tpot"], found["median_intvty"]) == pytest.approx((0.1, 0.025, 40))
    assert (found["avg_power_w"], found["avg_total_gpu_power_w"]) == pytest.approx((300, 600))
    assert found["joules_per_input_token"] == pytest.approx(1.5)
    assert found["joules_per_successful_query"] == pytest.approx(150)
