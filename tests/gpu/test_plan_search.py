"""A plan that is found while the engine serves: adopted, tried on iterations, kept, used by the next start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from test_background_plan import lanes_used, two_lanes

pytest.importorskip("triton")
from interpreted import interpreted_gpu

from weft.engine.model.directory import read_spec
from weft.engine.plans import trial
from weft.engine.plans.choose import target_of
from weft.engine.plans.found import FoundPlans
from weft.engine.plans.plan import Plan
from weft.engine.runner.device import preparation
from weft.engine.runner.options import plan_search as search_options
from weft.engine.scheduling import search_process
from weft.engine.scheduling.plan_search import Found, News, PlanSearch, State
from weft.kernels.common.gpu import gpu


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for a GPU")
@pytest.mark.parametrize("wins", [True, False])
def test_an_interpreted_engine_adopts_a_found_plan_while_it_serves(
    wins: bool, device: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is the serial plan's: before the plan is found, while iterations alternate, and after the verdict."""
    assert device == "cpu"
    monkeypatch.setattr(preparation, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(search_options, "RUNS_ON_GPUS", True)
    monkeypatch.setattr(trial, "LOOKS", (2, 4))
    monkeypatch.setattr(trial, "ALIKE", 1.0)  # a context of few tokens grows by more than 2 %
    monkeypatch.setattr(trial, "LEAST", -1.0 if wins else 1.0)  # every interpreted iteration takes a millisecond
    model = tiny_model("yi")
    prompt = np.random.default_rng(5).integers(3, 90, 5)
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "page_size": 16, "max_num_seqs": 1, "max_num_batched_tokens": 8,
        "num_pages": 4, "prefix_caching": False, "wait_for_plan": False, "cache_dir": str(tmp_path),
    }  # fmt: skip

    def answer(harness: Harness, each_step: Callable[[int], None] = lambda _: None) -> list[int]:
        handle = harness.add(prompt, max_tokens=6, ignore_eos=True, **GREEDY)
        harness.run(each_step)
        return harness.tokens[handle]

    with interpreted_gpu(monkeypatch):
        here, spec = gpu(), read_spec(model)
        assert here is not None
        target = target_of(spec, torch.device("cpu"), torch.bfloat16)
        found = FoundPlans(tmp_path, target)
        plan = Plan(target, "test", (two_lanes(spec, 1, here.sms, 1),))

        class Process:
            """Finds the plan at once."""

            ended = None

            def __init__(self, order: search_process.SearchOrder) -> None:
                assert order.max_num_batched_tokens == 8
                found.save(plan)

            def news(self) -> Sequence[News]:
                return [Found(plan, found.trials())]

            def stop(self) -> None: ...

        monkeypatch.setattr(search_process, "SearchProcess", Process)
        right = answer(Harness(model, **options))
        assert found.load() is None
        harness = Harness(model, search="now", **options)
        search = harness.engine.listeners.find(PlanSearch)
        assert search is not None
        harness.poison_pages()
        search._quiet = 0.0
        while search.state is not State.TRYING:
            assert not search.state.final
            harness.engine.step()
            harness.engine.idle()
        used, kept = lanes_used(harness), State.KEPT if wins else State.SERIAL
        for _ in range(3):
            assert answer(harness) == right
        assert set(used) == {1, 2}
        assert search.state is kept
        used.clear()
        assert answer(harness) == right
        assert set(used) <= {1, 2 if wins else 1}
        assert (2 in used) == wins
        assert harness.engine.stats().search.states == {kept.value: 1}
        search._recorder.record(search._trials)
        while search._recorder.outcome is None:
            pass
        harness.engine.close()
        again = Harness(model, **options)
        assert (again.engine.resolved.plan is not None) == wins
        while again.engine.pause is not None:
            again.engine.step()
        used = lanes_used(again)
        assert answer(again) == right
        assert (2 in used) == wins
        again.engine.close()
