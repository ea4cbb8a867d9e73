"""What a starting engine compiles beside itself, and when it need not."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from weft.engine.config import EngineConfig
from weft.engine.runner import compile_job
from weft.engine.runner.compile_job import CompileJob, is_compiled, stamp_file, write_stamp


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


def test_a_kernel_that_left_the_cache_is_noticed(config: EngineConfig, tmp_path: Path) -> None:
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
    [{"page_size": 32}, {"max_num_batched_tokens": 512}, {"plan": "serial"}, {"batch_invariant": True}],
    ids=lambda change: next(iter(change)),
)
def test_options_that_decide_the_kernels_are_told_apart(config: EngineConfig, tmp_path: Path, change: dict) -> None:
    stamped(config, tmp_path)
    assert not is_compiled(config.model_copy(update=change))


def test_options_that_do_not_are_not(config: EngineConfig, tmp_path: Path) -> None:
    stamped(config, tmp_path)
    assert is_compiled(config.model_copy(update={"seed": 5, "host_kv_gib": 1.0, "gpu_memory_utilization": 0.5}))


def test_newly_tuned_tiles_are_noticed(config: EngineConfig, tmp_path: Path) -> None:
    stamped(config, tmp_path)
    (tmp_path / "cache" / "gemm-0.json").write_text("{}")
    assert not is_compiled(config)


@pytest.mark.parametrize("content", ["", "[]", '{"gpu": 1}', '{"gpu": "x", "kernels": 3}'])
def test_a_damaged_stamp_is_none(config: EngineConfig, tmp_path: Path, content: str) -> None:
    stamped(config, tmp_path)
    stamp_file(config).write_text(content)
    assert not is_compiled(config)


def test_a_machine_without_a_gpu_compiles_nothing(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_job, "has_gpu", lambda: False)
    assert CompileJob.begin(config) is None
    monkeypatch.setattr(compile_job, "has_gpu", lambda: True)
    assert CompileJob.begin(config.model_copy(update={"device": "cpu"})) is None


@pytest.mark.slow
def test_a_job_that_cannot_work_lets_the_engine_go_on(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_job, "has_gpu", lambda: True)  # which the job's process will not find
    job = CompileJob.begin(config)
    assert job is not None
    job.wait(lambda *_: None)
    job.stop()
    assert not is_compiled(config)


def test_a_compiler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_job, "PATIENCE_SECONDS", 0.3)
    words = ("sh", "-c", "sleep 250 & echo 1 2; wait")
    job = CompileJob(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True))
    told: list[tuple[str, int, int]] = []
    job.wait(lambda *report: told.append(report))
    job.stop()
    assert told == [(compile_job.COMPILING, 1, 2)]


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

    from weft.engine.runner.kernel_set import kernel_set
    from weft.kernels.gpu import KNOWN

    def names(**options: object) -> Counter[str]:
        known = config.model_copy(update={"model": llama(tmp_path / str(len(options)))} | options)
        return Counter(kernel.name for kernel in kernel_set(known, KNOWN["h200"]))

    monkeypatch.setattr(driver, "_active", None)
    planned = names()
    serial = names(plan="serial")
    # each kernel of a step is there, and the shipped plan for this shape brings kernels of its own
    assert {"_embed_kernel", "product_kernel", "decode_kernel", "prefill_kernel", "_sample_kernel"} <= set(planned)
    assert planned["product_kernel"] > serial["product_kernel"] > 4
    assert planned["decode_kernel"] > serial["decode_kernel"] == 1
