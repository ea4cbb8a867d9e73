"""`compile_first`: a bench's kernels, compiled side by side before it needs the first of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.engine.config import EngineConfig
from weft.engine.model.spec import ModelSpec
from weft.engine.runner.device.compile_job import CompileJob

DENSE_BATCH = 2048
"""of an engine on a GPU that is not told another one: what it has compiled is found where that is not named"""


def compile_first(
    spec: ModelSpec, model: Path, max_tokens: int, tuning_seconds: float, progress: Callable[[str], None]
) -> None:
    """Those that an engine would compile at its start, into its cache, where it has not got them.

    A bench would compile one after the other, on every rank, as it comes to them. What has other tiles or SMs it still
    does. spec: a rank's part of the model in this folder, in 16 bits.
    """
    options: dict[str, Any] = {"model": str(model), "load_format": "dummy", "tuning_seconds": tuning_seconds}
    options["tensor_parallel_size"] = spec.shard_of.ranks
    if max_tokens != DENSE_BATCH:
        options["max_num_batched_tokens"] = max_tokens
    job = CompileJob.begin(EngineConfig.model_validate(options).for_measuring())
    if job is None:  # no GPU, or nothing is missing
        return
    try:
        job.wait(lambda phase, done, total: progress(f"{phase}, {done} of {total}"))
    finally:
        job.stop()
