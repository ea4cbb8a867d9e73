"""The recorded H200 profile, and the shipped plan that a search found on it and on the card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import LLAMA_8B, TYPICAL

from weft.autosearch import command, gantt, profile, resource_assignment, structure_search
from weft.autosearch.machine import Machine
from weft.autosearch.pipeline_structure import first_structures
from weft.autosearch.profile import Profile, load_profile
from weft.engine.plans import choose
from weft.engine.plans.plan import Target, load_plan, model_key

PLAN = choose.SHIPPED / "llama-3-8b-h200.json"


@pytest.fixture(scope="module")
def recorded() -> Profile:
    return load_profile(profile.SHIPPED / "llama-3-8b-h200.json")


def test_the_shipped_profile_is_found_for_its_model_without_a_gpu(
    recorded: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert recorded.target.model == model_key(LLAMA_8B)
    assert (recorded.modelled, recorded.guest_pairs) == ((), ())  # a file from before these fields existed
    assert command.find_profile(LLAMA_8B, TYPICAL, None, None) == recorded
    assert {p.guest_sms for p in recorded.pairs} >= {16, 32, 48}


def test_decode_attention_keeps_most_of_its_bandwidth_on_a_third_of_the_sms(recorded: Profile) -> None:
    curves = Machine(recorded, LLAMA_8B).curves
    times = [curves.ms("decode", TYPICAL.kv_tokens, sms) for sms in (20, 32, 48, 132)]
    assert times == sorted(times, reverse=True)
    assert times[2] < 1.2 * times[3]


def test_the_stages_predict_overlap_in_whole_waves_of_tiles(recorded: Profile) -> None:
    machine = Machine(recorded, LLAMA_8B)
    load = TYPICAL._replace(tokens=1792, decodes=597)
    solved = structure_search.solve(machine, load, next(first_structures(LLAMA_8B)), 20, 0.5)
    assert solved is not None
    found = resource_assignment.assign(machine, solved.period, load, 0.2)
    assert found.ms < 0.95 * machine.serial_ms(load)
    # 896 tokens are seven tiles of 128: `down` has 7 x 16 tiles of 128 x 256, one for each of 112 SMs
    assert {(o.end - o.begin, o.sms) for o in found.period.operations if o.operation == "down"} == {(896, 112)}


def test_the_shipped_plan_is_chosen_on_its_card_and_is_possible_and_drawable() -> None:
    # kernels that change need a new search: until there is one, their commit removes the plan
    here = Target("NVIDIA H200", 132, model_key(LLAMA_8B), "bfloat16", choose.kernels_digest(LLAMA_8B, fp8=False))
    plan = choose.choose_plan("auto", LLAMA_8B, here, None)
    assert plan == load_plan(PLAN)
    assert plan.sums == {}  # a file from before these fields existed
    assert plan.dense_batch == 2048
    for period in plan.periods:
        period.check(LLAMA_8B, plan.target.sms)
        assert period.figures["measured_ms"] < period.figures["serial_measured_ms"]
        console = Console(record=True, width=120)
        gantt.draw(period, console)
        assert "decode" in console.export_text()
        assert max(len(t) for t in re.findall("<text[^>]*>([^<]*)", gantt.svg(period))) < 170  # it fits the picture
