"""Collectives as operations of a plan: their traffic, their alternatives, and the search that places them."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from synthetic import SyntheticBench, assert_schedule_is_possible, spec_of, target_for

from weft.autosearch import (
    break_even,
    command,
    cost_model,
    dense_batch,
    gantt,
    profile,
    report,
    resource_assignment,
    search,
    structure_search,
    two_stage_search,
)
from weft.autosearch.accelerators import accelerator
from weft.autosearch.bench_protocol import Load
from weft.autosearch.formula_profile import CONSTANTS, formula_profile
from weft.autosearch.interference import Interference
from weft.autosearch.machine import Machine
from weft.autosearch.pipeline_structure import (
    Candidate,
    describe_collectives,
    every_operation,
    first_structures,
    transformations,
)
from weft.autosearch.profile import Curves, Profile
from weft.autosearch.profiler import Grid, Profiler
from weft.autosearch.time_budget import TimeBudget
from weft.engine.config import PRESETS
from weft.engine.errors import ConfigError, ModelError
from weft.engine.model.directory import read_spec
from weft.engine.model.operations import Resource, Role
from weft.engine.model.parts import Placement
from weft.engine.model.spec import Shard
from weft.engine.plans.choose import COLLECTIVES
from weft.engine.plans.plan import NanoOperation, Period, Plan, load_plan, model_key, serial_period
from weft.server.daemon import cli

LLAMA_70B = spec_of(8192, 28672, 80, 64, 8)
LLAMA2_70B = replace(LLAMA_70B, vocab_size=32000)
FOUR = LLAMA_70B.shard(0, 4)
LOAD = Load(2048, 683, 1280, 1024)
A100 = accelerator("a100")


# -- alternatives to an all-reduce


def test_a_70b_may_gather_scatter_or_reduce() -> None:
    names = {tuple(o.name for o in v.layer_operations()) for v in transformations(FOUR)}
    assert len(names) == len(transformations(FOUR)) == 6
    # NanoFlow §3.2: two all-gathers and an all-reduce, or two all-reduces
    attention = ("qkv", "decode", "prefill")
    assert (*attention, "o_gather_in", "o_columns", "o_gather", "gate_up", "down", "down_reduce") in names
    assert (*attention, "o", "o_reduce", "gate_up", "down", "down_reduce") in names
    assert (*attention, "o", "o_scatter", "o_gather", "gate_up", "down", "down_scatter", "down_gather") in names
    assert transformations(LLAMA_70B) == [LLAMA_70B]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("preset", ["llama-3-70b", "qwen2.5-72b", "llama-2-70b", "deepseek-67b"])
def test_every_choice_sends_the_bytes_of_the_paper(preset: str, ranks: int) -> None:
    """Each layer sends four activations, of which a rank keeps its own part. The weights and FLOPs are the same in all
    cases."""
    spec = read_spec(PRESETS / preset).shard(0, ranks)
    for variant in transformations(spec):
        operations = list(variant.layer_operations())
        assert sum(o.sent for o in operations) * ranks == 4 * (ranks - 1) * spec.hidden_size
        for measure in ("parameters", "flops"):
            products = [o for o in operations if o.role is not Role.NETWORK]
            plain = [o for o in spec.layer_operations() if o.role is not Role.NETWORK]
            assert sum(getattr(o, measure) for o in products) == sum(getattr(o, measure) for o in plain)
        order = [o.name for o in operations]
        for op in operations:
            assert all(order.index(p) < order.index(op.name) for p in op.parents)
        # the next layer waits until the stream is complete
        assert operations[-1].role is Role.NETWORK


def test_gathers_are_left_out_if_they_would_send_more_or_cannot_add_up() -> None:
    def ways_of(spec: object) -> set[str]:
        return {name for v in transformations(spec) for name, way in v.sums if way == "two_gathers"}  # type: ignore[arg-type]

    assert ways_of(FOUR) == {"o_reduce"}  # down's input is 3.5 times as wide as its output
    assert ways_of(replace(FOUR, head_dim=256)) == set()  # as wide heads as Qwen3's make o's input wider too
    parallel = replace(FOUR, placement=Placement.PARALLEL)  # one sum of two GEMMs
    assert ways_of(parallel) == set()
    assert [describe_collectives(v) for v in transformations(parallel)] == [
        "down: all-reduce",
        "down: reduce-scatter, all-gather",
    ]


def test_an_impossible_choice_is_a_one_line_error() -> None:
    bad = replace(FOUR, sums=(("down_reduce", "two_gathers"),))
    with pytest.raises(ModelError, match=r"down_reduce as two_gathers on 4 ranks \(o_reduce: all_reduce, scatter"):
        list(bad.layer_operations())
    with pytest.raises(ModelError, match="it has no collectives"):
        list(replace(LLAMA_70B, sums=(("o_reduce", "scatter_gather"),)).layer_operations())


# -- the paper's example


def test_every_choice_moves_the_bytes_of_table_2() -> None:
    """LLaMA-2-70B on 8 A100, 2048 tokens: 75.2 GB over the network, 18.8 GFLOP, 31.33 ms."""
    for variant in transformations(LLAMA2_70B.shard(0, 8)):
        cost = cost_model.total(cost_model.collective_costs(variant, 2048))
        assert cost.net_gb == pytest.approx(75.2, abs=0.05)
        assert cost.seconds(A100, 8)[Resource.NETWORK] * 1e3 == pytest.approx(31.33, abs=0.02)
        assert cost.bound(A100, 8) is Resource.NETWORK
        reduces = [way for _, way in variant.sums if way == "two_gathers"]
        assert cost.gflop == pytest.approx(18.8 / (2 if reduces else 1), abs=0.05)  # gathers add nothing up


def test_the_papers_example_is_bound_by_compute_as_a_whole() -> None:
    costs = cost_model.operation_costs(LLAMA2_70B, cost_model.Usage(2048, 512, 1024), gpus=8)
    seconds = cost_model.total(costs).seconds(A100, 8)
    assert max(seconds, key=lambda r: seconds[r]) is Resource.COMPUTE
    assert cost_model.classify(2048, 70e9, A100, 8) is Resource.COMPUTE


# -- plans


def halves(*names: str) -> Period:
    """Two nano-batches in the order of the names, collectives in their lane."""
    kinds = {n: o.role for v in transformations(FOUR) for n, o in ((o.name, o) for o in v.layer_operations())}
    return Period(
        256,
        tuple(
            NanoOperation(name, b, b + 128, 8, "network" if kinds[name] is Role.NETWORK else "compute")
            for b in (0, 128)
            for name in names
        ),
    )


SCATTERED = ("qkv", "decode", "prefill", "o", "o_scatter", "o_gather", "gate_up", "down", "down_reduce")


def test_a_plan_carries_its_collectives_and_is_checked_with_them(tmp_path: Path) -> None:
    target = target_for(FOUR)
    plan = Plan(target, "1024:512", (halves(*SCATTERED),), sums={"o_reduce": "scatter_gather"})
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    plan.periods[0].check(plan.spec_of(FOUR), 132)
    with pytest.raises(ConfigError, match="'o_scatter'; this model has"):
        plan.periods[0].check(FOUR, 132)
    wrong = [*SCATTERED[:4], "o_gather", "o_scatter", *SCATTERED[6:]]
    with pytest.raises(ConfigError, match=r"launches o_gather\[0:128\] before o_scatter\[0:128\]"):
        halves(*wrong).check(plan.spec_of(FOUR), 132)
    early = [*SCATTERED[:5], "gate_up", "o_gather", *SCATTERED[7:]]
    with pytest.raises(ConfigError, match=r"launches gate_up\[0:128\] before o_gather\[0:128\]"):
        halves(*early).check(plan.spec_of(FOUR), 132)
    # the next layer's qkv needs the sum, not the GEMM
    (edge,) = (e for e in plan.periods[0].dependencies(plan.spec_of(FOUR)) if e.after == 0)
    assert plan.periods[0].operations[edge.before].operation == "down_reduce"
    assert edge.distance == -1


def test_a_plan_for_another_number_of_ranks_is_for_another_model() -> None:
    keys = {model_key(LLAMA_70B.shard(0, n)) for n in (1, 2, 4, 8)}
    assert len(keys) == 4
    assert "ranks" not in model_key(LLAMA_70B)
    assert model_key(FOUR) != model_key(replace(FOUR, shard_of=Shard()))  # a small model of such shapes
    assert {model_key(LLAMA_70B.shard(r, 4)) for r in range(4)} == {model_key(FOUR)}


def test_a_plan_with_impossible_collectives_is_a_one_line_error(tmp_path: Path) -> None:
    plan = Plan(target_for(FOUR), "x", (), sums={"o_reduce": "scatter_gather"})
    with pytest.raises(ConfigError, match="the plan's collectives do not fit: this model cannot do o_reduce"):
        plan.spec_of(LLAMA_70B)
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text().replace("scatter_gather", "ring")
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a valid plan"):
        load_plan(tmp_path / "plan.json")


# -- interference


def recorded(
    ranks: int, load: Load = LOAD, compute: float = 1.1, guest: float = 1.06
) -> tuple[SyntheticBench, Profile]:  # fmt: skip
    spec = LLAMA_70B.shard(0, ranks)
    bench = SyntheticBench(spec, compute_slowdown=compute, guest_slowdown=guest)
    profiler = Profiler(bench, spec, load, Grid.coarse(load, 132), lambda *_: None)
    return bench, profiler.run(target_for(spec), 1000.0)


def test_a_profile_has_collectives_alone_and_overlapped_with_gemms_and_attention() -> None:
    _, found = recorded(4, guest=1.3)
    collectives = {o.name for o in every_operation(FOUR).values() if o.role is Role.NETWORK}
    assert collectives <= {p.operation for p in found.points}
    assert {p.guest for p in found.pairs} & collectives
    assert {p.memory for p in found.guest_pairs} == {"decode"}
    assert {p.network for p in found.guest_pairs} <= collectives
    machine = Machine(found, FOUR)
    assert machine.interference.slowdown(Resource.NETWORK, 32) == pytest.approx(1.3)
    assert machine.interference.slowdown(Resource.MEMORY, 32) == pytest.approx(1.3)
    assert machine.interference.drag(Resource.MEMORY, 32) == 1.0
    assert machine.interference.exchange(Resource.NETWORK)
    assert found.modelled == ()


def test_a_gpu_profile_and_plan_have_the_operations_of_the_engine() -> None:
    spec = LLAMA_70B.shard(0, 2)
    profiler = Profiler(SyntheticBench(spec), spec, LOAD, Grid.coarse(LOAD, 132), lambda *_: None, None, COLLECTIVES)
    found = profiler.run(target_for(spec), 1000.0)
    assert {n for n, o in every_operation(spec).items() if o.role is Role.NETWORK} > {"o_reduce", "down_reduce"}
    assert set(found.features) == {o.name for o in spec.layer_operations()}
    assert {p.guest for p in found.pairs} == {"decode", "down_reduce"}
    # the largest GEMM during attention and during a sum, before more of what is measured alone
    texts = [text for text, _ in profiler.tasks()]
    overlapped = [text for text in texts if text.startswith("gate_up next to")]
    assert {text.split()[3] for text in overlapped[:8]} == {"decode", "down_reduce"}
    alone = max(i for i, text in enumerate(texts) if text == "down alone")
    assert max(texts.index(text) for text in overlapped[:8]) < alone
    variants = two_stage_search.compare_collectives(spec, found, LOAD, {}, lambda *_: None, 1.0, lambda: False)
    assert [v.spec.sums for v in variants] == [()]


def test_a_gemm_is_modelled_to_take_half_as_long_again_during_a_collective() -> None:
    found = formula_profile(FOUR, LOAD, accelerator("h200"))
    kinds = {n: o.resource for n, o in every_operation(FOUR).items()}
    interference = Interference(found, Curves(found), kinds)
    own = 132 - 16
    assert interference.slowdown(Resource.COMPUTE, own) * interference.drag(Resource.COMPUTE, own) == pytest.approx(1.5)

    sms_of = {Resource.COMPUTE: own, Resource.MEMORY: 16, Resource.NETWORK: 16}
    structure = next(first_structures(FOUR))
    machine, period = Machine(found, FOUR), structure_search.solve(Machine(found, FOUR), LOAD, structure, 132, 0.2)
    assert period is not None
    shared = resource_assignment.with_sms(period.period, [sms_of[kinds[o.operation]] for o in period.period.operations])
    _, lasts = machine.timeline(shared, LOAD)
    stretched = [
        last / ms
        for op, last, ms in zip(shared.operations, lasts, machine.durations(shared, LOAD), strict=True)
        if kinds[op.operation] is Resource.COMPUTE
    ]
    assert min(stretched) == pytest.approx(1.0)  # one that runs during no collective
    assert 1.01 < max(stretched) <= interference.drag(Resource.COMPUTE, own) + 1e-9


# -- the search


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from([2, 4, 8]), st.integers(0, 5), st.integers(0, 15), st.sampled_from([1024, 2048]),
    st.floats(0.1, 0.8), st.integers(100, 4000), st.floats(1.0, 1.4), st.sampled_from([32, 132]),
)  # fmt: skip
def test_every_pipeline_with_collectives_is_possible_and_no_longer_than_its_parts_in_sequence(
    ranks: int, variant: int, structure: int, tokens: int, share: float, context: int, slowdown: float, guest_sms: int
) -> None:
    load = Load(tokens, max(1, round(tokens * share)), context, 1024)
    _, found = recorded(ranks, load, slowdown, slowdown)
    spec = transformations(LLAMA_70B.shard(0, ranks))[variant]
    machine = Machine(found, spec)
    solved = structure_search.solve(machine, load, list(first_structures(spec))[structure], guest_sms, 0.3)
    if solved is None:  # the decodes of half the requests do not fit one range
        return
    choice = resource_assignment.assign(machine, solved.period, load, 0.1)
    choice.period.check(spec, 132)
    assert {o.lane for o in choice.period.operations} == {"compute", "memory", "network"}
    durations, drag = machine.durations(choice.period, load), machine.drag(choice.period)
    assert_schedule_is_possible(choice.period, spec, durations, 132, drag)
    timeline, lasts = machine.timeline(choice.period, load)
    assert timeline.ms == pytest.approx(choice.ms)
    assert timeline.ms <= sum(lasts) * (1 + 1e-9)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(two_stage_search, "GUEST_SMS", (32,))
    monkeypatch.setattr(two_stage_search, "PER_LEVEL", 1)
    monkeypatch.setattr(two_stage_search, "EFFORT", 0.5)
    monkeypatch.setattr(structure_search, "first_structures", lambda spec: islice(first_structures(spec), 3))
    monkeypatch.setattr(structure_search, "can_grow", lambda _: False)
    monkeypatch.setattr(dense_batch, "DENSE_STEPS", 1)
    monkeypatch.setattr(search, "LOADS", search.LOADS[:1])
    monkeypatch.setattr(dense_batch, "decode_batches", lambda *_: [])
    monkeypatch.setattr(command, "num_gpus", lambda: 1)
    monkeypatch.setattr(profile, "SHIPPED", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.nightly
@pytest.mark.usefixtures("quick")
def test_a_search_on_measured_collectives_chooses_among_them_and_draws_the_third_lane(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_stage_search, "transformations", lambda spec: transformations(spec)[::4])
    recorded(4)[1].save(tmp_path / "profile.json")
    out, svg, kept = tmp_path / "plan.json", tmp_path / "plan.svg", tmp_path / "stages.json"
    arguments = ["search", "--model-preset", "llama-3-70b", "--tensor-parallel-size", "4", "--svg", str(svg)]
    arguments += ["--profile", str(tmp_path / "profile.json"), "--out", str(out), "--stages", str(kept)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert sorted(re.findall(r"collectives: o: ([a-z-]+)", text)) == ["all-gather", "all-reduce"]
    assert "MODELED" not in text
    plan = load_plan(out)
    assert plan.periods
    for period in plan.periods:
        period.check(plan.spec_of(FOUR), 132)
        assert period.figures["predicted_ms"] < period.figures["serial_predicted_ms"]
    best = max(plan.periods, key=lambda p: p.figures["gain"])
    drawn = ElementTree.fromstring(svg.read_text())
    words = {"".join(t.itertext()) for t in drawn.iter() if t.tag.endswith("text")}
    assert {"compute", "memory", "network", "all-reduce" if not plan.sums else "all-gather"} <= words
    assert any("height: share of the SMs" in w for w in words)
    console = Console(record=True, width=120, file=io.StringIO())
    gantt.draw(best, console)
    assert re.search(r"^network +.*reduce|^network +.*gather|^network ", console.export_text(), re.MULTILINE)
    # solved pipelines are kept, for every choice of collectives
    assert len(msgspec.json.decode(kept.read_bytes())["stages"]) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("preset", ["llama-3-70b", "qwen2.5-72b"])
def test_a_search_without_gpu_and_profile_reports_what_was_modelled(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_stage_search, "transformations", lambda spec: transformations(spec)[:2])
    ranks = {"llama-3-70b": 4, "qwen2.5-72b": 2}[preset]
    arguments = ["search", "--tensor-parallel-size", str(ranks), "--model-preset", preset, "--budget-seconds", "1"]
    assert cli.main([*arguments, "--out", str(tmp_path / "plan.json")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "MODELED, NOT MEASURED (modelled h200): qkv, decode, prefill, o, o_reduce" in text
    assert "measured: nothing of this model" in text
    for source in ("measured on four H200s", "derived there", "assumed:"):
        assert f"basis of the formulas: {source}" in text
    whole = read_spec(PRESETS / preset)
    best = re.search(r"\(Equation 5\) ([\d,]+) tokens/s/GPU, ([\d,]+) on (\d) GPUs, at the ([\d,]+) TFLOP/s", text)
    assert best is not None
    each, all_of_them, gpus, tflops = (int(n.replace(",", "")) for n in best.groups())
    assert each == pytest.approx(tflops * 1e12 / (2 * whole.num_parameters), rel=2e-3)
    assert (gpus, all_of_them) == (ranks, pytest.approx(ranks * each, abs=ranks))
    plan = load_plan(tmp_path / "plan.json")
    assert plan.target.gpu == "modelled h200"  # no engine has this
    assert "predicted from formulas" in plan.made


def test_a_gain_is_against_the_fastest_serial_plan_of_all_collectives() -> None:
    eight = LLAMA_70B.shard(0, 8)
    specs, found = transformations(eight), formula_profile(eight, LOAD, accelerator("a100"))
    own = {spec: Machine(found, spec).serial_ms(LOAD) for spec in specs}
    slowest, fastest = max(own, key=own.__getitem__), min(own, key=own.__getitem__)
    assert own[slowest] > 1.002 * own[fastest]
    machine = Machine(found, slowest, [s for s in specs if s is not slowest])
    solved = structure_search.solve(machine, LOAD, next(first_structures(slowest)), 24, 0.3)
    assert solved is not None
    figures = break_even.with_figures(machine, solved.period, LOAD, None).figures
    assert figures["serial_predicted_ms"] == pytest.approx(own[fastest], abs=1e-5)
    assert figures["gain"] == pytest.approx(own[fastest] / figures["predicted_ms"], rel=1e-4)
    bars = sum(ms for name, ms in figures.items() if name.startswith("serial."))
    assert bars == pytest.approx(own[fastest], rel=1e-3)  # the drawn serial plan is the same one
    assert break_even.serial_ms(machine, slowest, LOAD) == pytest.approx(own[fastest], rel=1e-6)

    one = search.Search(machine, LOAD, None, TimeBudget(60.0))
    results = two_stage_search.StageResults(own[slowest], 0.0, [Candidate(own[slowest] * 0.9999, solved.period)])
    assert one._best("typical", LOAD, results, 1.0) is None  # it beats its own serial plan only
    lines = {line.stage: line.predicted_ms for line in one._lines}
    assert (lines["serial"], lines["serial, same collectives"]) == pytest.approx((own[fastest], own[slowest]))


def test_the_modelled_accelerator_matches_measurements_on_four_cards() -> None:
    """H200: two-shot all-reduces of [2048 | 512 | 128, 8192] over four cards took 177, 55 and 20 us."""
    curves = Machine(formula_profile(FOUR, LOAD, accelerator("h200")), FOUR).curves
    for tokens, us in ((2048, 177), (512, 55), (128, 20)):
        assert curves.ms("o_reduce", tokens, 132) * 1e3 == pytest.approx(us, rel=0.1)
    # one layer's GEMMs of 2,048 tokens took 1,305 to 1,366; here their tiles are never narrower than 256
    products = sum(curves.ms(n, 2048, 132) for n in ("qkv", "o", "gate_up", "down")) * 1e3
    assert 1305 < products < 1.12 * 1305
    assert report.fastest_gemm_flops(formula_profile(FOUR, LOAD, accelerator("h200")), FOUR) < 989e12 * CONSTANTS.gemm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size 0: must be at least 1"),
        (["--tensor-parallel-size", "3"], "cannot be split over 3 ranks"),
        (["--gpu", "tpu"], "unknown accelerator 'tpu'"),
        (["--gpu", "gaudi2"], "--gpu gaudi2: its number of SMs is unknown"),
        (["--gpu", "h200", "--profile", "x.json"], "leave out --profile"),
        (
            ["--tensor-parallel-size", "2", "--full-profile"],
            "--full-profile needs 2 GPU(s) to measure on; this machine has 1",
        ),
        (["--model", "demo"], "not allowed with"),
        (["--tensor-parallel-size", "2", "--gpu", "a100-40gb"], "--tensor-parallel-size"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_a_wrong_option_is_a_one_line_error(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        arguments = ["search", "--model-preset", "llama-3-70b", "--out", str(tmp_path / "p.json"), *options]
        status = cli.main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err.strip()
    assert status in (1, 2)
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_serial_plan_of_several_ranks_has_their_collectives() -> None:
    machine = Machine(formula_profile(FOUR, LOAD, accelerator("h200")), FOUR)
    serial = serial_period(FOUR, 2048, 132)
    assert [o.operation for o in serial.operations if o.operation.endswith("_reduce")] == ["o_reduce", "down_reduce"]
    assert machine.period(serial, LOAD).ms == pytest.approx(machine.serial_ms(LOAD), rel=1e-6)
