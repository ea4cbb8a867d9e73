"""Opens a bench on this machine's GPUs, with kernels compiled and GEMMs tuned as in an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.autosearch.bench_protocol import Load
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import TOKEN_STEP, Target

if TYPE_CHECKING:
    from weft.autosearch.gpu_bench import GpuBench
    from weft.autosearch.ranks_bench import RanksBench

DENSE_BATCH = 2048
"""An engine's default dense batch on a GPU. It is not passed on, so that the engine's compiled kernels are found."""
PROFILE_SECONDS = 0.2
"""Seconds per measurement of a profile. Half a second changes few of them by more than 3 % (H200, 2026-11-22)."""


def compile_first(
    spec: ModelSpec, model: Path, max_tokens: int, tuning_seconds: float, progress: Callable[[str], None]
) -> None:
    """Compile in parallel the kernels that an engine compiles at its start, into the engine's cache.

    Otherwise every rank of a bench would compile them one after another. Kernels with other tiles or SM counts are
    still compiled during the measurements. spec: a rank's shard of the model in the folder `model`, in 16 bits."""
    from weft.engine.runner.device.compile_job import CompileJob

    options: dict[str, Any] = {"model": str(model), "load_format": "dummy", "tuning_seconds": tuning_seconds}
    options["tensor_parallel_size"] = spec.shard_of.ranks
    if max_tokens != DENSE_BATCH:
        options["max_num_batched_tokens"] = max_tokens
    job = CompileJob.begin(EngineConfig.model_validate(options).for_measuring())
    if job is None:  # no GPU, or everything is compiled
        return
    try:
        job.wait(lambda phase, done, total: progress(f"{phase}, {done} of {total}"))
    finally:
        job.stop()


def open_gpu(
    spec: ModelSpec, load: Load, *, progress: Callable[[str], None], model: Path, tuning_seconds: float
) -> tuple[GpuBench | RanksBench, Target]:
    """Open this machine's GPU as a bench, or one GPU for each rank of the model.

    model: folder of the unsharded model. `spec` may be a shard. Raises `ConfigError` if there are too few GPUs."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU to measure on: give a recorded profile with --profile FILE")
    from weft.autosearch.gpu_bench import GpuBench
    from weft.autosearch.ranks_bench import RanksBench
    from weft.engine.plans.choose import target_of
    from weft.engine.runner.start.gemm_tuning import tune_gemms

    context = max(load.prompt, 2 * load.context)
    tokens = -(-load.tokens // TOKEN_STEP) * TOKEN_STEP
    if spec.quantization is None:
        compile_first(spec, model, tokens, tuning_seconds, progress)
    target = target_of(spec, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    if (ranks := spec.shard_of.ranks) > 1:
        if (here := torch.cuda.device_count()) < ranks:
            raise ConfigError(
                f"--tensor-parallel-size {ranks} needs {ranks} GPUs to measure on; this machine has {here}"
            )
        several = RanksBench(
            model, ranks, max_tokens=tokens, max_context=context, seconds=PROFILE_SECONDS,
            tuning_seconds=tuning_seconds, progress=progress,
        )  # fmt: skip
        return several, target
    tune_gemms(  # otherwise the serial plan would be slower than the engine's
        spec, torch.device("cuda"), tokens, EngineConfig.model_validate({}).cache_path, tuning_seconds,
        lambda phase, done, of: progress(f"{phase}, {done} of {of}"),
    )  # fmt: skip
    return GpuBench(spec, max_tokens=tokens, max_context=context, seconds=PROFILE_SECONDS), target
