"""A recorded profile of a synthetic machine, a model, and a search that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import CONFIG, LLAMA_8B, TYPICAL, SyntheticBench, target_for

from weft.autosearch import command, dense_batch, profile, search, two_stage_search
from weft.autosearch.machine import Machine
from weft.autosearch.profile import Profile
from weft.autosearch.profiler import Grid, Profiler
from weft.autosearch.time_budget import TimeBudget
from weft.engine.plans.plan import Plan


@pytest.fixture(scope="module")
def recorded() -> Profile:
    profiler = Profiler(SyntheticBench(LLAMA_8B), LLAMA_8B, TYPICAL, Grid.coarse(TYPICAL, 132), lambda *_: None)
    return profiler.run(target_for(LLAMA_8B), 100)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(two_stage_search, "GUEST_SMS", (32,))
    monkeypatch.setattr(two_stage_search, "PER_LEVEL", 1)
    monkeypatch.setattr(dense_batch, "DENSE_STEPS", 2)
    monkeypatch.setattr(two_stage_search, "EFFORT", 0.2)
    monkeypatch.setattr(search, "LOADS", search.LOADS[:1])
    monkeypatch.setattr(command, "num_gpus", lambda: 0)
    monkeypatch.setattr(profile, "SHIPPED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


@pytest.fixture(scope="module")
def plan(recorded: Profile) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_stage_search, "GUEST_SMS", (32,))
        patch.setattr(two_stage_search, "PER_LEVEL", 1)
        patch.setattr(dense_batch, "DENSE_STEPS", 1)
        patch.setattr(two_stage_search, "EFFORT", 0.2)
        patch.setattr(search, "LOADS", search.LOADS[:1])
        return search.Search(Machine(recorded, LLAMA_8B), TYPICAL, None, TimeBudget(1000)).run("1024:512").plan
