"""The background compilation of a starting engine, and when it is unnecessary."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.engine.config import EngineConfig
from weft.engine.runner.device import compile_job
from weft.engine.runner.device.compile_job import (
    KERNEL_OPTIONS,
    SERIAL,
    CompileJob,
    is_compiled,
    stamp_file,
    write_stamp,
)
from weft.engine.wire.child import has_ended


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(compile_job, "DRIVER", tmp_path / "driver")
    return EngineConfig(cache_dir=str(tmp_path / "cache"))


def stamped(config: EngineConfig, tmp_path: Path) -> None:
    for name in ("A", "B"):
        (tmp_path / "triton" / name).mkdir(parents=True)
    write_stamp(stamp_file(config), "NVIDIA H200", ["A", "B"])


def test_a_start_with_everything_in_the_cache_compiles_nothing(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_job, "has_gpu", lambda: True)
    stamped(config, tmp_path)
    assert is_compiled(config)
    assert CompileJob.begin(config) is None


def test_the_stamp_covers_code_of_runner_plans_model_and_kernels() -> None:
    assert [folder.name for folder in compile_job.SOURCES] == ["runner", "plans", "model", "kernels"]
    assert all(any(folder.rglob("*.py")) for folder in compile_job.SOURCES)


def test_a_kernel_missing_from_the_cache_is_detected(config: EngineConfig, tmp_path: Path) -> None:
    stamped(config, tmp_path)
    (tmp_path / "triton" / "B").rmdir()
    assert not is_compiled(config)


def test_another_gpu_needs_other_kernels(config: EngineConfig, tmp_path: Path) -> None:
    stamped(config, tmp_path)
    information = tmp_path / "driver" / "0000:01:00.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert is_compiled(config)
    information.write_text("Model: \t\t NVIDIA L40S\nIRQ: 1\n")
    assert not is_compiled(config)


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 32},
        {"max_num_batched_tokens": 512},
        {"plan": "serial"},
        {"batch_invariant": True},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"pod": "on"},
        {"enforce_eager": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_options_that_decide_the_kernels_are_distinguished(config: EngineConfig, tmp_path: Path, change: dict) -> None:
    stamped(config, tmp_path)
    assert not is_compiled(config.model_copy(update=change))


def test_other_options_are_not(config: EngineConfig, tmp_path: Path) -> None:
    stamped(config, tmp_path)
    assert is_compiled(config.model_copy(update={"seed": 5, "host_kv_gib": 1.0, "gpu_memory_utilization": 0.5}))


def test_every_option_is_classified_as_relevant_or_not() -> None:
    """A forgotten option would make a start assume that all is compiled, and compile one kernel at a time: 60 s instead
    of 10."""
    decided = KERNEL_OPTIONS | {
        "model", "model_preset", "revision", "load_format", "dummy_weights", "dummy_skew", "slo", "itl_slo",
        "itl_slo_patience", "kv_cache_gib", "gpu_memory_utilization", "num_pages", "prefix_caching",
        "pinned_cache_share", "host_kv_gib", "idle_spill_seconds", "ssd_kv_path", "tier_kv_format", "ssd_kv_gib",
        "kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic", "cache_dir", "fair_prefill_share",
        "priority_preemption", "async_scheduling", "late_launch", "wait_for_plan", "cpu_threads", "seed", "share",
        "chat_template", "state_interval", "encoder_cache_tokens", "enable_lora", "lora_modules", "lora_dir",
        "max_loras", "max_cpu_loras", "max_lora_rank", "speculation_depth",
    }  # fmt: skip
    assert set(EngineConfig.model_fields) == decided


def test_newly_tuned_tiles_are_detected(config: EngineConfig, tmp_path: Path) -> None:
    stamped(config, tmp_path)
    (tmp_path / "cache" / "gemm-0.json").write_text("{}")
    assert not is_compiled(config)


@pytest.mark.parametrize("content", ["", "[]", '{"gpu": 1}', '{"gpu": "x", "kernels": 3}'])
def test_a_damaged_stamp_counts_as_missing(config: EngineConfig, tmp_path: Path, content: str) -> None:
    stamped(config, tmp_path)
    stamp_file(config).write_text(content)
    assert not is_compiled(config)


def test_a_machine_without_a_gpu_compiles_nothing(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_job, "has_gpu", lambda: False)
    assert CompileJob.begin(config) is None
    monkeypatch.setattr(compile_job, "has_gpu", lambda: True)
    assert CompileJob.begin(config.model_copy(update={"device": "cpu"})) is None


@pytest.mark.slow
def test_a_job_that_fails_to_run_lets_the_engine_continue(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_job, "has_gpu", lambda: True)  # the job's process will not find this
    job = CompileJob.begin(config)
    assert job is not None
    job.wait(lambda *_: None)
    job.stop()
    assert not is_compiled(config)


@pytest.fixture
def preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[str]:
    """A process that was started before the configuration was known; it echoes what it is sent."""
    monkeypatch.setattr(compile_job, "has_gpu", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process = subprocess.Popen(("cat",), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(compile_job, "_start_process", lambda: process)
    CompileJob.preload()
    monkeypatch.setattr(compile_job, "_start_process", lambda: pytest.fail("another process"))
    return process


def test_a_job_takes_the_process_that_was_started_early(config: EngineConfig, preloaded: subprocess.Popen[str]) -> None:
    job = CompileJob.begin(config)
    assert job is not None
    assert preloaded.stdin is not None
    assert preloaded.stdout is not None
    preloaded.stdin.close()
    assert EngineConfig.model_validate_json(preloaded.stdout.read()) == config
    job.stop()


def test_a_process_started_early_ends_if_everything_is_compiled(
    config: EngineConfig, tmp_path: Path, preloaded: subprocess.Popen[str]
) -> None:
    stamped(config, tmp_path)
    assert CompileJob.begin(config) is None
    assert preloaded.returncode == -signal.SIGKILL


def test_no_process_starts_early_if_the_default_cache_has_a_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_job, "has_gpu", lambda: True)
    monkeypatch.setattr(compile_job, "_start_process", lambda: pytest.fail("a process"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "weft").mkdir()
    (tmp_path / "weft" / "kernels-1.json").touch()
    CompileJob.preload()


@pytest.mark.slow
def test_a_process_started_early_ends_with_its_engine() -> None:
    process = compile_job._start_process()
    assert process.communicate(timeout=240) == ("", None)
    assert process.returncode == 0


def test_a_compiler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_job, "TIMEOUT_SECONDS", 0.3)
    words = ("sh", "-c", "sleep 250 & echo 1 2; wait")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert select.select([process.stdout], [], [], 240)[0]  # it has started before its time begins
    job = CompileJob(process)
    reported: list[tuple[str, int, int]] = []
    job.wait(lambda *report: reported.append(report))
    job.stop()
    assert reported == [(compile_job.COMPILING, 1, 2)]


def echoing(**options: bool) -> tuple[CompileJob, Callable[[str], None], Callable[[], None]]:
    """A job whose process echoes its input, and its end."""
    process = subprocess.Popen(("cat",), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
                               start_new_session=True)  # fmt: skip
    stdin = process.stdin
    assert stdin is not None
    return CompileJob(process, **options), stdin.write, stdin.close


def outcome_of(job: CompileJob, pipeline: int) -> str | None:
    """Its outcome, once the process has got that far."""
    end = time.monotonic() + 240
    while (outcome := job.outcome(pipeline)) is None and time.monotonic() < end:
        time.sleep(0.01)
    return outcome


def test_an_engine_that_does_not_wait_starts_with_the_serial_plan_and_is_notified_of_each_pipeline() -> None:
    job, send_line, end = echoing(waits_for_plan=False)
    send_line("0 3\n3 3\nserial\n")
    reported: list[tuple[str, int, int]] = []
    job.wait(lambda *report: reported.append(report))  # its process continues
    assert reported[:2] == [(compile_job.COMPILING, 0, 3), (compile_job.COMPILING, 3, 3)]
    assert job.outcome(0) is None
    send_line("pipeline 1\n1 2\npipeline 0 product_kernel, decode_kernel\npipeline")
    assert outcome_of(job, 0) == "product_kernel, decode_kernel did not compile"
    assert job.outcome(1) == ""
    assert job.outcome(2) is None
    send_line(" 2\n")
    assert outcome_of(job, 2) == ""
    assert job.outcome(3) is None
    end()
    assert outcome_of(job, 3) == "the compiling process has ended"
    assert job.outcome(1) == ""
    job.stop()


def test_an_engine_that_waits_waits_for_all() -> None:
    job, send_line, end = echoing(waits_for_plan=True)
    send_line("1 1\nserial\npipeline 0\n")
    end()
    job.wait()
    assert job.outcome(0) == ""
    assert job.outcome(1) == "the compiling process has ended"


def test_a_serial_plan_in_the_cache_is_not_waited_for() -> None:
    job, send_line, _ = echoing(waits_for_plan=False, serial=True)
    job.wait()  # it has reported nothing
    send_line("pipeline 0\n")
    assert outcome_of(job, 0) == ""
    job.stop()
    assert job.outcome(1) == "the compiling process has ended"


def test_a_background_compiler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_job, "TIMEOUT_SECONDS", 0.2)
    job, _, _ = echoing(waits_for_plan=False, serial=True)
    assert outcome_of(job, 0) == "the compiling process has ended"


COMPILES_FOR_EVER = """
import os, sys, time
from weft.engine.runner.start import compile_kernels
def compile_in_parts(config, target, jobs, tell):
    if (pid := os.fork()) == 0:
        time.sleep(600)
    while True:
        tell(f"{pid} 0")
        time.sleep(0.02)
compile_kernels.gpu = lambda: "a GPU"
compile_kernels.compile_in_parts = compile_in_parts
sys.exit(compile_kernels.main())
"""


def test_compilers_end_with_their_engine() -> None:
    words = (sys.executable, "-P", "-c", COMPILES_FOR_EVER)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(EngineConfig(wait_for_plan=False).model_dump_json().encode() + b"\n")
        process.stdin.flush()
        compiler = int(process.stdout.readline().split()[0])
        assert not has_ended(compiler)
        process.stdout.close()  # as a killed engine does
        assert process.wait(240) == -signal.SIGKILL
    end = time.monotonic() + 240
    while not has_ended(compiler):
        assert time.monotonic() < end
        time.sleep(0.01)


COMPILES_ON_COMMAND = """
import sys, time
from pathlib import Path
from weft.engine.runner.start import compile_kernels
from weft.engine.runner.device.compile_job import stamp_file, write_stamp
def compile_all(config, target, jobs, progress):
    progress(1, 2)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    write_stamp(stamp_file(config), "NVIDIA H200", [])
compile_kernels.WAIT_SECONDS = 0.02
compile_kernels.gpu = lambda: "a GPU"
compile_kernels.compile_kernels = compile_all
sys.exit(compile_kernels.main())
"""


@pytest.mark.parametrize("ends", ["done", "killed"])
def test_engines_that_start_together_compile_once(config: EngineConfig, tmp_path: Path, ends: str) -> None:
    """The others wait, and one of them takes over if the first does not finish."""
    config = config.model_copy(update={"wait_for_plan": True})

    def begin() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            (sys.executable, "-P", "-c", COMPILES_ON_COMMAND, str(tmp_path / "go")), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(config.model_dump_json() + "\n")
        process.stdin.flush()
        return process

    def lines_of(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    first = begin()
    assert lines_of(first) == "1 2\n"
    second = begin()
    assert lines_of(second) == "0 1\n"
    if ends == "killed":
        first.kill()
        while (line := lines_of(second)) != "1 2\n":
            assert line == "0 1\n"
    (tmp_path / "go").touch()
    assert [second.wait(240), first.wait(240)] == [0, 0 if ends == "done" else -signal.SIGKILL]
    assert second.stdout is not None
    assert "1 2" not in second.stdout.read()
    assert is_compiled(config)


def test_tuned_tiles_start_another_job(config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[EngineConfig] = []
    monkeypatch.setattr(CompileJob, "begin", classmethod(lambda _, options: begun.append(options)))
    (tmp_path / "triton" / "A").mkdir(parents=True)
    write_stamp(stamp_file(config, SERIAL), "NVIDIA H200", ["A"])
    assert is_compiled(config, SERIAL)
    assert not is_compiled(config)
    job, _, _ = echoing(waits_for_plan=False, serial=True)
    assert CompileJob.after_tuning(job, config) is job
    (tmp_path / "cache" / "gemm-0.json").write_text("{}")
    assert CompileJob.after_tuning(job, config) is None
    assert begun == [config]
    assert job.outcome(0) == "the compiling process has ended"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, list[str]], list[str]]:
    """Kernels of a serial plan and three pipelines, by name, of which "bad" does not compile; and the attempts."""
    pytest.importorskip("triton")
    from weft.engine.runner.start import kernel_set
    from weft.kernels.common import compilation
    from weft.kernels.common.compilation import Kernel

    class Function:
        def __init__(self, name: str) -> None:
            self.fn = type(name, (), {})

    names: dict[str, list[str]] = {"serial": ["a", "b"], "0": ["a", "c"], "1": ["b", "bad", "d"], "2": ["bad", "c"]}
    tried: list[str] = []
    functions = {name: Function(name) for name in ["a", "b", "c", "d", "bad"]}

    def fake_parts(*_: object) -> list[list[Kernel]]:
        return [[Kernel(functions[name], (name,)) for name in part] for part in names.values()]

    def fake_compile(kernels: list[Kernel], _jobs: int, progress: Callable[[int, int], None]) -> Any:
        tried.extend(kernel.name for kernel in kernels)
        progress(len(kernels), len(kernels))
        good = [kernel for kernel in kernels if kernel.name != "bad"]
        return [f"{ord(kernel.name):064x}" for kernel in good], [k for k in kernels if k.name == "bad"]

    monkeypatch.setattr(kernel_set, "kernel_parts", fake_parts)
    monkeypatch.setattr(compilation, "compile_all", fake_compile)
    monkeypatch.setattr(os, "nice", lambda _: tried.append("nice"))
    return names, tried


def test_the_serial_plan_is_compiled_first_and_a_bad_kernel_affects_only_its_pipelines(
    config: EngineConfig, parts: tuple[dict[str, list[str]], list[str]]
) -> None:
    from weft.engine.runner.start.compile_kernels import compile_in_parts
    from weft.kernels.common.gpu import KNOWN

    reported: list[str] = []
    compile_in_parts(config, KNOWN["h200"], 1, reported.append)
    assert parts[1] == ["a", "b", "nice", "c", "bad", "d"]  # each once
    assert reported == ["2 2", "serial", "1 1", "pipeline 0", "2 2", "pipeline 1 bad", "pipeline 2 bad"]
    assert is_compiled(config, SERIAL)
    assert not is_compiled(config)


def test_all_parts_together_are_those_of_a_later_start(
    config: EngineConfig, parts: tuple[dict[str, list[str]], list[str]]
) -> None:
    from weft.engine.runner.start.compile_kernels import compile_in_parts
    from weft.kernels.common.gpu import KNOWN

    for pipeline in ("1", "2"):
        parts[0][pipeline].remove("bad")
    compile_in_parts(config, KNOWN["h200"], 1, lambda _: None)
    assert is_compiled(config)
    stamp = json.loads(stamp_file(config).read_text())
    assert len(stamp["kernels"]) == len(set(stamp["kernels"])) == 4


def llama(folder: Path, **fields: object) -> str:
    folder.mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape | fields))
    return str(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU has Triton's driver for it")
def test_the_kernels_of_a_model_are_known_without_its_weights_and_gpu(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    from weft.engine.runner.start.kernel_set import kernel_parts
    from weft.kernels.common.gpu import KNOWN

    def parts(**options: object) -> list[list[Any]]:
        known = config.model_copy(update={"model": llama(tmp_path / str(len(options)))} | options)
        return kernel_parts(known, KNOWN["h200"])

    monkeypatch.setattr(driver, "_active", None)
    first, *pipelines = parts()
    (alone,) = parts(plan="serial")
    assert {kernel.key for kernel in first} == {kernel.key for kernel in alone}
    assert len(pipelines) == 4
    planned = Counter(name for _, name in {(kernel.key, kernel.name) for kernel in sum(pipelines, first)})
    serial = Counter(kernel.name for kernel in first)
    # each kernel of a step is there, and the shipped plan for this shape brings its own kernels
    assert {"_embed_kernel", "product_kernel", "decode_kernel", "prefill_kernel", "_sample_kernel"} <= set(planned)
    assert planned["product_kernel"] > serial["product_kernel"] > 4
    assert planned["decode_kernel"] > serial["decode_kernel"] == 1
    assert planned["plain_decode_kernel"] == serial["plain_decode_kernel"] == 1  # for few tokens


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process with a GPU has Triton's driver for it")
def test_the_kernels_of_weights_and_pages_in_fp8_are_known_too(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    from weft.engine.runner.start.kernel_set import kernel_set
    from weft.kernels.common.gpu import KNOWN

    def modules(layers: int = 3, **options: object) -> Counter[str]:
        monkeypatch.setattr(driver, "_active", None)
        if not (tmp_path / str(layers)).exists():
            llama(tmp_path / str(layers), num_hidden_layers=layers)
        known = config.model_copy(update={"model": str(tmp_path / str(layers)), "tuning_seconds": 0.0} | options)
        names = (kernel.function.fn.__module__.rpartition(".")[2] for kernel in kernel_set(known, KNOWN["h200"]))
        return Counter("fp8_decode" if name.startswith("fp8_decode") else name for name in names)

    both, weights, pages = (
        modules(**options)
        for options in ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, {"quantization": "fp8"},
                        {"kv_cache_dtype": "fp8", "plan": "serial"})
    )  # fmt: skip
    products = {"fp8_few_hopper", "fp8_hopper", "fp8_triton"}
    assert products <= set(both) & set(weights)
    assert "fp8_rows" not in set(both) | set(weights), "no pass quantises: heads have 128 numbers"
    assert both == modules(2, quantization="fp8", kv_cache_dtype="fp8"), "nothing of the first or the last layer lacks"
    assert not products & set(pages)
    assert {"fp8_decode", "prefill_attention"} <= set(both) & set(pages)
    assert both["fp8_decode"] == 1
    assert not {"fp8_decode", "prefill_attention"} & set(weights)
    assert "decode_hopper" not in set(both) | set(pages)
    assert both["fp8_unpack"] == both["prefill_hopper"] == 1
    assert pages["heads"] == 1  # 16-bit GEMMs that write to FP8 pages
