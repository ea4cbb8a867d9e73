"""The whole search on a synthetic machine, with and without a bench; the commands and their one-line errors."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from rich.console import Console
from synthetic import LLAMA_8B, TYPICAL, SyntheticBench, spec_of, target_for

from weft.autosearch import (
    command,
    dense_batch,
    gantt,
    pipeline_structure,
    plan_show,
    profile,
    search,
    two_stage_search,
)
from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.machine import Machine
from weft.autosearch.profile import Profile
from weft.autosearch.profiler import Grid, Profiler, configs_of
from weft.autosearch.refine import without_overlap
from weft.autosearch.report import report
from weft.autosearch.time_budget import TimeBudget
from weft.engine.errors import ConfigError
from weft.engine.model.parts import Quantization
from weft.engine.plans.plan import Period, Plan, load_plan, serial_period
from weft.server.daemon import cli

pytestmark = pytest.mark.slow

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rope_theta": 5e5, "torch_dtype": "bfloat16",
}  # fmt: skip


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


@pytest.mark.usefixtures("quick")
def test_a_search_with_a_bench_measures_what_it_reports(recorded: Profile) -> None:
    bench = SyntheticBench(LLAMA_8B)
    result = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, bench, TimeBudget(600, clock=bench.clock)).run(
        "1024:512"
    )
    assert result.measured
    dense = [line.load for line in result.lines if line.load.endswith("tokens")]
    assert dense == ["2048 tokens", "1920 tokens"]
    lines = {line.stage.split(",")[0]: line for line in result.lines if line.load == "typical"}
    assert list(lines) == ["stage I", "serial", "nano-batches in sequence", "stage II", "refined"]
    serial, second, refined = (lines[s] for s in ("serial", "stage II", "refined"))
    assert serial.measured is not None
    assert second.measured is not None
    assert refined.measured is not None
    # the bench is the machine that the profile was recorded on
    assert serial.measured.ms == pytest.approx(serial.predicted_ms, rel=0.01)
    assert second.measured.ms == pytest.approx(second.predicted_ms, rel=0.03)
    assert refined.measured.ms <= second.measured.ms < serial.measured.ms
    # cutting alone costs; only overlap wins
    assert lines["nano-batches in sequence"].measured.ms >= serial.measured.ms * 0.999  # type: ignore[union-attr]
    for period in result.plan.periods:
        period.check(LLAMA_8B, 132)
        assert period.figures["gain"] == pytest.approx(
            period.figures["serial_measured_ms"] / period.figures["measured_ms"], abs=1e-5
        )
        assert period.figures["gain"] > 1
    assert result.plan.period_for(result.plan.dense_batch, TYPICAL.kv_tokens) is not None


@pytest.mark.usefixtures("quick")
def test_where_overlap_cannot_win_there_is_no_pipeline() -> None:
    bench = SyntheticBench(LLAMA_8B, compute_slowdown=2.5, guest_slowdown=2.5)
    profiler = Profiler(bench, LLAMA_8B, TYPICAL, Grid.coarse(TYPICAL, 132), lambda *_: None)
    machine = Machine(profiler.run(target_for(LLAMA_8B), 100), LLAMA_8B)
    result = search.Search(machine, TYPICAL, bench, TimeBudget(1000, clock=bench.clock)).run("1024:512")
    assert result.plan.periods == ()
    assert "the serial plan runs" in gantt.summary(result.plan)


@pytest.mark.usefixtures("quick")
def test_a_pipeline_that_was_only_lucky_is_dropped_and_the_report_says_so(recorded: Profile) -> None:
    class Lucky(SyntheticBench):
        last = False

        def period(self, period: Period, load: Load) -> Timing:
            timing = super().period(period, load)
            return timing._replace(ms=timing.ms * (1.5 if self.last else 0.9)) if len(period.operations) > 6 else timing

        def hear(self, text: str, _: float | None = None) -> None:
            self.last |= "final measurement" in text

    bench = Lucky(LLAMA_8B)
    budget = TimeBudget(600, bench.hear, clock=bench.clock)
    result = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, bench, budget).run("1024:512")
    assert result.plan.periods == ()
    assert result.plan.dense_batch == 0
    printed = io.StringIO()
    report(result, Console(file=printed, width=200))
    lines = [text for text in printed.getvalue().splitlines() if "dropped" in text]
    assert lines
    for line in lines:
        assert re.fullmatch(
            r"dropped: \d+ tokens, [\d,]+ KV tokens: gain 0\.\d+ when measured again, the serial plan runs", line
        )


@pytest.mark.usefixtures("quick")
def test_the_command_goes_from_a_profile_to_a_plan_and_a_picture(
    recorded: Profile, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "150")
    recorded.save(tmp_path / "profile.json")
    out, svg, kept = tmp_path / "plan.json", tmp_path / "plan.svg", tmp_path / "stages.json"
    arguments = ["search", "--model", str(model), "--profile", str(tmp_path / "profile.json"), "--out", str(out)]
    arguments += ["--svg", str(svg), "--stages", str(kept)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "Nothing was measured" in text
    assert "predicted gain over the serial plan 1." in text
    plan = load_plan(out)
    assert plan.target == recorded.target
    ElementTree.fromstring(svg.read_text())

    def unused(*_: object) -> None:
        raise AssertionError("the stages were kept")

    monkeypatch.setattr(two_stage_search, "search_pipelines", unused)
    assert cli.main(arguments) == 0
    assert [p.operations for p in load_plan(out).periods] == [p.operations for p in plan.periods]
    assert cli.main([*arguments, "--tokens", "1024"]) == 2
    assert "for another GPU, model, workload" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_a_recorded_profile_is_found_by_its_model(recorded: Profile) -> None:
    with pytest.raises(ConfigError, match="no recorded profile of this model: give one with --profile"):
        command.find_profile(LLAMA_8B, TYPICAL, None, None)
    recorded.save(profile.cache_path(recorded.target))
    assert command.find_profile(LLAMA_8B, TYPICAL, None, None) == recorded
    assert command.find_profile(LLAMA_8B, TYPICAL, None, recorded.target) == recorded
    assert command.find_profile(LLAMA_8B, TYPICAL, None, msgspec.structs.replace(recorded.target, kernels="x")) is None
    assert command.find_profile(LLAMA_8B, TYPICAL._replace(tokens=4096), None, recorded.target) is None
    with pytest.raises(ConfigError, match="is for another model"):
        command.find_profile(spec_of(4096, 14336, 40, 32, 8), TYPICAL, profile.cache_path(recorded.target), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workload", "5"], "must be PROMPT:OUTPUT"),
        (["--tokens", "0"], "--tokens 0"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0"),
        (["--budget-seconds", "0"], "--budget-seconds 0: must be more than 0"),
        (["--profile", "/nowhere.json"], "cannot read the profile /nowhere.json"),
        (["--lengths", "/nowhere.json"], "cannot read --lengths"),
        (["--full-profile"], "--full-profile needs 1 GPU(s) to measure on; this machine has 0"),
        (["--full-profile", "--predict-only"], "leave out --profile and --predict-only"),
        ([], "no recorded profile"),
        (["--tokes", "5"], "unknown option --tokes; did you mean --tokens"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_a_wrong_option_is_one_line(
    model: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["search", "--model", str(model), "--out", str(tmp_path / "p.json"), *options])
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err.strip()
    assert status in (1, 2)
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.usefixtures("quick")
def test_without_ortools_the_search_says_what_to_install(
    recorded: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for name in [
        n
        for n in sys.modules
        if n.startswith(("ortools", "weft.autosearch.structure_search", "weft.autosearch.resource_"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.delattr("weft.autosearch.structure_search", raising=False)
    monkeypatch.delattr("weft.autosearch.resource_assignment", raising=False)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[search\]'"):
        search.Search(Machine(recorded, LLAMA_8B), TYPICAL, None, TimeBudget(5)).run("1024:512")


def test_decodes_alone_fill_the_pool_in_halves_of_whole_steps() -> None:
    dense = TYPICAL._replace(tokens=1920, decodes=640)
    small, large = dense_batch.decode_batches(dense, 1024, 908_190)  # room for 709 of the workload's requests
    assert (small.tokens, small.decodes, small.context) == (768, 768, 908_190 // 768)
    assert (large.tokens, large.decodes, large.context) == (1024, 1024, 908_190 // 1024)
    assert [b.context for b in dense_batch.decode_batches(dense, 1024, None)] == [dense.context]
    assert dense_batch.decode_batches(dense._replace(tokens=512), 1024, None) == []
    assert dense_batch.decode_batches(dense, 0, 908_190) == []


@pytest.mark.usefixtures("quick")
def test_decodes_alone_are_searched_too(recorded: Profile) -> None:
    bench = SyntheticBench(LLAMA_8B)
    budget = TimeBudget(600, clock=bench.clock)
    result = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, bench, budget, max_num_seqs=1024).run("x")
    decodes = [p for p in result.plan.periods if p.tokens == 1024]
    assert decodes
    assert all(p.figures["gain"] > 1 and p.min_tokens <= 1024 for p in decodes)
    measured = {line.stage: line.measured for line in result.lines if line.load == "1024 decodes" and line.measured}
    assert measured["serial"].ms > min(t.ms for t in measured.values())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("measured", [True, False])
def test_a_plan_to_start_from_competes(
    recorded: Profile, plan: Plan, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_batch, "DENSE_STEPS", 1)
    known = msgspec.structs.replace(plan.periods[0], min_tokens=1, min_kv_tokens=0)
    bad = without_overlap(known, 132)  # the only one that the solver found

    def found(*start: Period) -> list[Period]:
        kept = two_stage_search.StageStore(
            {"typical, 2048 tokens": two_stage_search.StageResults(99.0, 1.0, [pipeline_structure.Candidate(9.0, bad)])}
        )  # fmt: skip
        machine, budget = Machine(recorded, LLAMA_8B), TimeBudget(1000, clock=clock)
        one = search.Search(machine, TYPICAL, bench, budget, known=start, store=kept)
        return [msgspec.structs.replace(p, figures={}) for p in one.run("x").plan.periods]

    monkeypatch.setattr(search.Refiner, "moves", lambda *_: iter(()))
    bench = SyntheticBench(LLAMA_8B) if measured else None
    clock = bench.clock if bench is not None else time.monotonic
    assert found() == []
    assert [p.operations for p in found(known)] == [known.operations]


@pytest.mark.usefixtures("quick")
def test_a_search_ends_in_its_time(recorded: Profile) -> None:
    class Slow(SyntheticBench):
        now = 0.0

        def period(self, period: Period, load: Load) -> Timing:
            self.now += 1.0
            return super().period(period, load)

    bench = Slow(LLAMA_8B)
    budget = TimeBudget(400.0, clock=lambda: bench.now)
    search.Search(Machine(recorded, LLAMA_8B), TYPICAL, bench, budget, max_num_seqs=1024).run("x")
    assert 200 < bench.now <= 400


def test_the_solver_keeps_to_its_time_and_every_load_gets_a_share(
    recorded: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that each step of the solver moves by 10 s: all of them would take far longer."""

    class Steps:
        now = 0.0
        loads: ClassVar[list[str]] = []
        shares: ClassVar[list[float]] = []

        def __call__(self, text: str, share: float | None = None) -> None:
            if "stage I" in text:
                self.now += 10.0
                self.loads.append(text.partition(":")[0])
            if share is not None:
                self.shares.append(share)

    monkeypatch.setattr(two_stage_search, "EFFORT", 0.02)
    steps = Steps()
    budget = TimeBudget(600.0, steps, clock=lambda: steps.now)
    search.Search(Machine(recorded, LLAMA_8B), TYPICAL, None, budget, max_num_seqs=1024).run("x")
    assert steps.now <= 600.0
    counts = Counter(steps.loads)
    assert len(counts) >= dense_batch.DENSE_STEPS + len(search.LOADS) - 1
    assert max(counts.values()) <= 3 * min(counts.values())
    assert steps.shares == sorted(steps.shares)
    assert 0 <= steps.shares[0] < 0.1


@pytest.mark.usefixtures("quick")
def test_a_search_that_is_ended_leaves_the_best_so_far(recorded: Profile) -> None:
    said: list[str] = []

    def note(text: str, _: float | None = None) -> None:
        said.append(text)

    budget = TimeBudget(1e6, note, lambda: "1920" in " ".join(said))
    result = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, None, budget, max_num_seqs=1024).run("x")
    assert result.plan.periods
    assert result.plan.made.endswith("ended early")
    assert not [text for text in said if "decodes" in text and "stage" in text]


def test_ctrl_c_writes_the_plan_that_there_is(recorded: Profile, model: Path, tmp_path: Path) -> None:
    recorded.save(tmp_path / "profile.json")
    argv = [sys.executable, "-P", "-m", "weft.server", "search", "--model", str(model), "--predict-only"]
    argv += ["--profile", str(tmp_path / "profile.json"), "--out", str(tmp_path / "p.json")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "stage II" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "ending with the best result so far" in err
    assert load_plan(tmp_path / "p.json").made.endswith("ended early")
    assert "p.json:" in out


@pytest.mark.usefixtures("quick")
def test_a_plan_of_another_model_is_no_start(plan: Plan, model: Path, tmp_path: Path) -> None:
    other = msgspec.structs.replace(plan.target, model="another")
    msgspec.structs.replace(plan, target=other).save(tmp_path / "start.json")
    with pytest.raises(ConfigError, match="a plan for another model"):
        command.known_plan(tmp_path / "start.json", LLAMA_8B)
    plan.save(tmp_path / "own.json")
    assert command.known_plan(tmp_path / "own.json", LLAMA_8B) == plan
    done = cli.main(
        ["search", "--model", str(model), "--out", str(tmp_path / "p.json"), "--start", str(tmp_path / "start.json")]
    )
    assert done == 2
    assert not (tmp_path / "p.json").exists()


def test_a_gpu_machine_needs_neither_the_solver_nor_the_server() -> None:
    code = (
        "import sys\nfor n in ('ortools','fastapi','yaml','uvicorn','transformers'): sys.modules[n] = None\n"
        "import weft.autosearch.profiler, weft.autosearch.refine, weft.autosearch.break_even, weft.autosearch.command, "
        "weft.autosearch.plan_show, weft.autosearch.machine"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


# -- pictures


def test_the_picture_has_every_operation_once_a_period(plan: Plan) -> None:
    period = plan.periods[0]
    bars = gantt.wrapped(gantt.picture(period))
    for op in period.operations:
        own = [b for b in bars if b.op is op]
        index = period.operations.index(op)
        assert sum(b.ms for b in own) == pytest.approx(period.figures[f"ms.{index}"])
        assert all(b.start >= 0 and b.start + b.ms <= period.figures["predicted_ms"] * (1 + 1e-9) for b in own)


def test_the_svg_is_well_formed_and_names_everything(plan: Plan) -> None:
    root = ElementTree.fromstring(gantt.svg(plan.periods[0], 'GPU <1> & "2"'))
    titles = {t.text for t in root.iter("{http://www.w3.org/2000/svg}title")}
    for op in plan.periods[0].operations:
        assert any(t is not None and t.startswith(op.label) for t in titles)
    assert float(root.attrib["width"]) > 0


def test_pages_leave_beside_the_largest_product_and_the_picture_says_so(plan: Plan) -> None:
    period = plan.periods[0]
    assert period.offload == "gate_up"
    (bar,) = (b for b in gantt.picture(period).bars if b.op.operation == "offload")
    first = next(i for i, o in enumerate(period.operations) if o.operation == "gate_up" and o.begin == 0)
    assert (bar.start, bar.ms) == (period.figures[f"start.{first}"], period.figures[f"ms.{first}"])
    assert gantt.lane_of(bar.op) == "copies"
    assert "copy engine" in gantt.svg(period)
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    gantt.draw(period, console)
    assert "copies" in console.export_text()


def test_a_plan_without_figures_is_drawn_by_its_tokens() -> None:
    period = serial_period(LLAMA_8B, 2048, 132)
    assert not gantt.picture(period).timed
    assert "tokens" in gantt.svg(period)
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    gantt.draw(period, console, "by hand")
    assert "gate_up" in console.export_text()


def test_show_prints_a_plan_and_draws_each_pipeline(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    twice = msgspec.structs.replace(plan, periods=(plan.periods[0], plan.periods[0]))
    twice.save(tmp_path / "plan.json")
    assert cli.main(["plan", "show", str(tmp_path / "plan.json"), "--svg", str(tmp_path / "a.svg")]) == 0
    text = capsys.readouterr().out
    assert "Synthetic H200 (132 SMs)" in text
    assert text.count("decode") >= 4
    assert (tmp_path / "a.svg").exists()
    assert (tmp_path / "a-2.svg").exists()


def test_a_picture_that_there_is_nothing_to_draw_for_is_told(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "a.svg"
    msgspec.structs.replace(plan, periods=()).save(tmp_path / "plan.json")
    assert cli.main(["plan", "show", str(tmp_path / "plan.json"), "--svg", str(svg)]) == 0
    assert "a.svg: not written" in capsys.readouterr().out.replace("\n", "")
    arguments = ["--model-preset", "llama-3-8b", "--gpu", "h200", "--budget-seconds", "1e-3", "--svg", str(svg)]
    assert cli.main(["search", *arguments, "--out", str(tmp_path / "plan.json")]) == 0
    assert "a.svg: not written" in capsys.readouterr().out
    assert not svg.exists()


def test_show_refuses_a_plan_that_lacks_an_operation_of_its_model(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, lacking = tmp_path / "plan.json", []
    for period in plan.periods:
        rest = tuple(op for op in period.operations if op.operation != "down")
        lacking.append(msgspec.structs.replace(period, operations=rest, waits=()))
    msgspec.structs.replace(plan, periods=tuple(lacking)).save(file)
    assert plan_show.main([str(file)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(rf"weft plan show: {file} is not a valid plan: a plan must compute down once .*\n", told.err)


def test_show_says_of_which_model_it_knows_nothing(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = tmp_path / "plan.json", plan.target
    plan.save(file)
    assert plan_show.main([str(file), "--model", "demo"]) == 2
    assert "is a plan for another model" in capsys.readouterr().err
    elsewhere = msgspec.structs.replace(target, model=target.model.replace("layers=32", "layers=33"))
    msgspec.structs.replace(plan, target=elsewhere).save(file)
    assert plan_show.main([str(file)]) == 0
    assert capsys.readouterr().out.count("not checked, because no preset has these shapes") == 1


@pytest.mark.parametrize("arguments", [["/nowhere.json"], [], ["--sgv", "x", "y"]])
def test_show_refuses_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = plan_show.main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_cost_model_is_printed_for_a_model(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert cli.main(["plan", "model", "--model", str(model), "--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    assert "gate_up" in text
    assert "bound by compute" in text
    assert f"{989e12 / 2 / LLAMA_8B.num_parameters:,.0f} tokens/s/GPU" in text


@pytest.mark.parametrize("options", [["--gpu", "tpu"], ["--workload", "x"], ["--gpus", "0"], ["--gpu"]])
def test_the_cost_model_refuses_in_one_line(
    model: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    try:
        status = cli.main(["plan", "model", "--model", str(model), *options])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.usefixtures("quick")
def test_a_full_profile_has_every_step_is_kept_and_found_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu(SyntheticBench):
        def close(self) -> None: ...

    target = target_for(LLAMA_8B)
    monkeypatch.setattr(command, "num_gpus", lambda: 1)
    monkeypatch.setattr(command, "open_gpu", lambda *_, **__: (Gpu(LLAMA_8B), target))
    arguments = ["--model", str(model), "--out", str(tmp_path / "p.json"), "--budget-seconds", "1"]
    assert cli.main(["search", *arguments, "--full-profile"]) == 0
    kept = profile.load_profile(profile.cache_path(target))
    for operation in ("qkv", "o", "gate_up", "down"):
        measured = {(p.work, p.sms) for p in kept.points if p.operation == operation}
        assert {(t, s) for t in range(128, 2049, 128) for s in (132, *range(68, 125, 8))} <= measured
    assert {p.guest_sms for p in kept.pairs} == {20, *range(8, 65, 8)}
    assert command.find_profile(LLAMA_8B, TYPICAL, None, target) == kept


@pytest.mark.usefixtures("quick")
def test_a_model_whose_kv_fills_the_gpu_is_searched_at_the_batch_it_can_run() -> None:
    spec = spec_of(5120, 13824, 40, 40, 40)
    bench = SyntheticBench(spec)
    bench.memory = 140 * 10**9
    profiler = Profiler(bench, spec, TYPICAL, Grid.coarse(TYPICAL, 132), lambda *_: None)
    recorded = profiler.run(target_for(spec), 100)
    bench.calls = 0
    budget = TimeBudget(400, clock=bench.clock)
    result = search.Search(Machine(recorded, spec), TYPICAL, bench, budget, max_num_seqs=1024).run("x")
    measured = {line.load for line in result.lines if line.load.endswith("tokens")}
    assert measured == {"384 tokens", "256 tokens"}  # about 100 decodes and the prefill that keeps up with them
    for period in result.plan.periods:
        period.check(spec, 132)


def test_a_model_with_experts_is_refused_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    (model / "config.json").write_text(json.dumps(CONFIG | experts))
    assert cli.main(["search", "--model", str(model), "--out", str(tmp_path / "p.json")]) != 0
    error = capsys.readouterr().err.strip()
    assert "has experts, which weft search cannot measure yet" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("asked", [("--predict-only",), ("--gpu", "h200"), ("--tensor-parallel-size", "2")])
def test_products_in_fp8_are_not_modelled(
    model: Path, tmp_path: Path, asked: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--quantization", "fp8", "--out", str(tmp_path / "p.json"))
    assert cli.main(["search", "--model", str(model), *out, *asked]) != 0
    error = capsys.readouterr().err.strip()
    assert "FP8 GEMMs must be measured on one GPU" in error
    assert len(error.splitlines()) == 1


def test_a_search_takes_weights_alone_in_fp8_for_the_16_bits_that_a_gpu_makes_of_them(
    model: Path, tmp_path: Path, recorded: Profile
) -> None:
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["Linear"]}
    alone = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    (model / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": alone}))
    recorded.save(tmp_path / "profile.json")
    given = ["--profile", str(tmp_path / "profile.json"), "--predict-only", "--budget-seconds", "1"]
    assert cli.main(["search", "--model", str(model), *given, "--out", str(tmp_path / "p.json")]) == 0
    assert "fp8" not in load_plan(tmp_path / "p.json").target.dtype


def test_a_search_tries_the_tiles_of_the_models_number_format() -> None:
    eight = configs_of(replace(LLAMA_8B, quantization=Quantization("fp8")))
    assert all(config.special and config.depth == 128 for config in eight)
    assert not set(eight) & set(configs_of(LLAMA_8B))


def test_a_model_that_leaves_no_room_for_a_request_is_refused_in_one_line(
    model: Path, tmp_path: Path, recorded: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    (model / "config.json").write_text(json.dumps(CONFIG | large))
    target = target_for(spec_of(8192, 28672, 80, 64, 8))
    msgspec.structs.replace(recorded, memory=140 * 10**9, target=target).save(tmp_path / "profile.json")
    arguments = ["--model", str(model), "--profile", str(tmp_path / "profile.json"), "--out", str(tmp_path / "p.json")]
    assert cli.main(["search", *arguments]) != 0
    error = capsys.readouterr().err.strip()
    assert "too little memory for the weights of" in error
    assert len(error.splitlines()) == 1
