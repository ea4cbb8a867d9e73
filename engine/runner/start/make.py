"""`make_runner`: creates the runner of the configuration's device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weft import install_hint
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.model.drafts.spec import DraftWeights
from weft.engine.model.spec import ModelSpec
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.model.weights import Weights
from weft.engine.progress import Progress
from weft.engine.runner.device.collectives import RankGroup
from weft.engine.runner.device.compile_job import CompileJob, is_compiled
from weft.engine.runner.device.image_rows import ImagePool
from weft.engine.runner.device.runner import Runner
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.runner.start.gemm_tuning import tune_gemms

if TYPE_CHECKING:
    from weft.engine.model.transformers_impl.module import TransformersModule
    from weft.engine.runner.cuda.cuda_runner import CudaRunner


def make_runner(
    spec: ModelSpec, weights: Weights | TransformersModule, options: EngineConfig, config: ResolvedConfig,
    progress: Progress | None = None, compiling: CompileJob | None = None, rank_group: RankGroup | None = None,
    image_rows: ImagePool | None = None, draft: DraftWeights | None = None,
) -> Runner:  # fmt: skip
    """Create the runner with its KV pool. Raises `OutOfMemory`.

    options: the options that `config` was resolved from. compiling: a job started for them, which ends here or belongs
    to the runner. rank_group: the other ranks, on GPUs; rank 0 tunes and compiles, and the others load its results.
    image_rows: the embeddings of images, if the model takes any. draft: weights of the model that drafts,."""
    if config.device.type == "cuda":
        try:
            from weft.engine.runner.cuda.cuda_runner import CudaRunner
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ConfigError(f"a GPU needs Triton: {install_hint('gpu')}, or use --device cpu") from None
        if isinstance(spec, TransformersSpec):
            return _tested(spec, weights, config, CudaRunner(spec, weights, config, progress))
        if first := rank_group is None or rank_group.host.rank == 0:
            tune_gemms(
                spec, config.device, config.max_num_batched_tokens, config.cache_dir, config.tuning_seconds, progress
            )
            compiling = CompileJob.after_tuning(compiling, options)  # new tiles need new kernels
        try:
            if compiling is not None:
                compiling.wait(progress)
            elif not is_compiled(options):  # no job compiles the plan in the background
                config = replace(config, wait_for_plan=True)
            if rank_group is not None:
                rank_group.host.all_gather(torch.tensor([1]))
            if not first:
                tune_gemms(spec, config.device, config.max_num_batched_tokens, config.cache_dir, 0.0)
            if rank_group is not None:
                rank_group.measure()
            return CudaRunner(spec, weights, config, progress, compiling, rank_group, image_rows, draft)
        except BaseException:
            if compiling is not None:
                compiling.stop()
            raise
    if compiling is not None:
        compiling.stop()
    from weft.engine.runner.cpu.cpu_runner import CpuRunner

    return CpuRunner(spec, weights, config, image_rows=image_rows, draft=draft)


def _tested(
    spec: TransformersSpec, weights: Weights | TransformersModule, config: ResolvedConfig, runner: CudaRunner
) -> CudaRunner:
    """Return the runner after its self-test. Raises `ModelError`."""
    from weft.engine.model.transformers_impl.module import TransformersModule
    from weft.engine.runner.start.self_test import pages_needed, self_test

    assert isinstance(weights, TransformersModule)
    if runner.num_pages <= (needed := pages_needed(config.kv.page_size)):
        raise OutOfMemory(f"the self-test needs {needed + 1} KV pages: raise --kv-cache-gib or --num-pages")
    with torch.inference_mode():
        runner.kv[1 : 1 + needed] = float("nan")  # unwritten pages may contain anything
        torch.cuda.synchronize()
        self_test(spec, weights, runner.logits_of, config)
    return runner
