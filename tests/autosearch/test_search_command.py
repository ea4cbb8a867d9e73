"""`weft search` and `weft plan`: files, options, pictures and one-line errors."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from synthetic import CONFIG, LLAMA_8B, TYPICAL, SyntheticBench, spec_of, target_for

from weft.autosearch import command, gantt, plan_show, profile, search, two_stage_search
from weft.autosearch.machine import Machine
from weft.autosearch.profile import Profile
from weft.autosearch.time_budget import TimeBudget
from weft.engine.errors import ConfigError
from weft.engine.plans.plan import Plan, load_plan, serial_period
from weft.server.daemon import cli

pytestmark = pytest.mark.slow


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
def test_a_wrong_option_is_a_one_line_error(
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
def test_a_search_that_its_time_limit_ended_reports_it(recorded: Profile) -> None:
    def searched(seconds: float, store: two_stage_search.StageStore) -> tuple[str, str]:
        one = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, None, TimeBudget(seconds), store=store)
        result = one.run("1024:512")
        return " ".join(result.notes), result.plan.made

    store = two_stage_search.StageStore()
    notes, made = searched(2.0, store)
    assert "out of time before all pipelines were tried (a larger --budget-seconds may find a better one)" in notes
    assert "typical, 2048 tokens" in notes
    assert made.endswith("out of time")
    done = {key: results._replace(complete=True) for key, results in store.stages.items()}
    notes, made = searched(1000.0, two_stage_search.StageStore(done))  # nothing is left to solve
    assert notes == ""
    assert "out of time" not in made


def test_a_search_without_a_pipeline_names_the_time_limit() -> None:
    plan = Plan(target_for(LLAMA_8B), "1024:512", (), made=f"today{gantt.OUT_OF_TIME}")
    assert gantt.summary(plan) == "no pipeline beat the serial plan within the time limit; the serial plan runs"


@pytest.mark.nightly
def test_ctrl_c_writes_the_current_plan(recorded: Profile, model: Path, tmp_path: Path) -> None:
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
def test_a_plan_of_another_model_is_rejected_as_a_start(plan: Plan, model: Path, tmp_path: Path) -> None:
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


def test_pages_left_by_the_largest_gemm_are_shown_in_the_picture(plan: Plan) -> None:
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


def test_a_plan_without_a_pipeline_to_draw_is_reported(
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
    reported = capsys.readouterr()
    assert reported.out == ""
    assert re.fullmatch(
        rf"weft plan show: {file} is not a valid plan: a plan must compute down once .*\n", reported.err
    )


def test_show_names_an_unknown_model(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, target = tmp_path / "plan.json", plan.target
    plan.save(file)
    assert plan_show.main([str(file), "--model", "demo"]) == 2
    assert "is a plan for another model" in capsys.readouterr().err
    elsewhere = msgspec.structs.replace(target, model=target.model.replace("layers=32", "layers=33"))
    msgspec.structs.replace(plan, target=elsewhere).save(file)
    assert plan_show.main([str(file)]) == 0
    assert capsys.readouterr().out.count("not checked, because no preset has these shapes") == 1


@pytest.mark.parametrize("arguments", [["/nowhere.json"], ["--model", "demo"], ["--sgv", "x", "y"]])
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


def test_the_cost_model_takes_a_batch_that_fits_the_card(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    workload = ["--gpu", "a100", "--workload", "512:1024"]
    assert cli.main(["plan", "model", "--model-preset", "llama-3-8b", *workload]) == 0
    text = capsys.readouterr().out
    assert "one iteration of 714 tokens, 1 x a100" in text
    assert "2048 tokens do not fit" in text
    assert "476 decodes of 1024 tokens" in text
    (total,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["total"])
    assert float(total[2]) < 82  # GB read: weights, KV and activations
    # the paper's example fits: Table 2
    assert cli.main(["plan", "model", "--model", "llama-2-70b", "--gpus", "8", *workload]) == 0
    text = capsys.readouterr().out
    assert "do not fit" not in text
    assert all(ms in text for ms in ("one iteration of 2048 tokens", "114.17", "45.07", "31.32"))
    assert cli.main(["plan", "model", "--model", "llama-2-70b", *workload]) == 2  # 138 GB of weights
    assert "80 GB are too little for the weights and one request of 1536 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--gpu", "tpu"], ["--workload", "x"], ["--gpus", "0"], ["--gpu"], ["--model-preset", "llama-3-8b"]]
)
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


def test_a_model_with_experts_is_refused_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    (model / "config.json").write_text(json.dumps(CONFIG | experts))
    assert cli.main(["search", "--model", str(model), "--out", str(tmp_path / "p.json")]) != 0
    error = capsys.readouterr().err.strip()
    assert "has experts, which weft search cannot measure yet" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("requested", [("--predict-only",), ("--gpu", "h200"), ("--tensor-parallel-size", "2")])
def test_fp8_gemms_are_not_modelled(
    model: Path, tmp_path: Path, requested: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--quantization", "fp8", "--out", str(tmp_path / "p.json"))
    assert cli.main(["search", "--model", str(model), *out, *requested]) != 0
    error = capsys.readouterr().err.strip()
    assert "FP8 GEMMs must be measured on one GPU" in error
    assert len(error.splitlines()) == 1


def test_a_search_models_weight_only_fp8_as_16_bits(model: Path, tmp_path: Path, recorded: Profile) -> None:
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["Linear"]}
    alone = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    (model / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": alone}))
    recorded.save(tmp_path / "profile.json")
    given = ["--profile", str(tmp_path / "profile.json"), "--predict-only", "--budget-seconds", "1"]
    assert cli.main(["search", "--model", str(model), *given, "--out", str(tmp_path / "p.json")]) == 0
    assert "fp8" not in load_plan(tmp_path / "p.json").target.dtype


def test_a_model_that_leaves_no_memory_for_a_request_is_refused_in_one_line(
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
