"""`kernel_set`: finds all kernels that a model's runner launches on a GPU, without the GPU and the weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from weft.engine.config import EngineConfig
from weft.engine.model.directory import read_config
from weft.engine.model.implementation import choose_spec
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import load_weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.runner.cuda.adapter_slots import AdapterSlots
from weft.engine.runner.cuda.cuda_executor import CudaExecutor
from weft.engine.runner.cuda.cuda_inputs import device_inputs
from weft.engine.runner.cuda.cuda_layers import CudaLayers
from weft.engine.runner.cuda.peer_collectives import MetaMemory, PeerCollectives, PeerLayout
from weft.engine.runner.device.collectives import MEASURED_STEPS
from weft.engine.runner.device.image_rows import ImagePool
from weft.engine.runner.iteration.pipelines import Pipelines
from weft.engine.runner.options.resolve import ResolvedConfig, resolve, served_as
from weft.engine.runner.start.gemm_tuning import launch_tuning_candidates
from weft.engine.runner.start.vision import image_pool
from weft.kernels.attention.triton_backend import TritonAttention
from weft.kernels.common.compilation import Kernel, collect, without_dynamo
from weft.kernels.common.gpu import Gpu, compiling_for, gpu_device
from weft.kernels.matmul import tuned


def kernel_set(config: EngineConfig, gpu: Gpu) -> list[Kernel]:
    """Return all kernels for `gpu`, each once. See `kernel_parts`."""
    return list({kernel.key: kernel for part in kernel_parts(config, gpu) for kernel in part}.values())


def kernel_parts(config: EngineConfig, gpu: Gpu) -> list[list[Kernel]]:
    """Return the kernels of the serial plan, including tiles that tuning would try, then those of each pipeline.

    The list is empty for an attention back end that is not captured, and for `transformers`' code. Raises `WeftError`
    for a model or options that cannot be served on that GPU."""
    spec, _ = choose_spec(config)
    if not spec.native:
        return []
    with compiling_for(gpu), without_dynamo(), torch.inference_mode():
        spec = served_as(spec, config).shard(0, config.tensor_parallel_size)
        resolved = resolve(config, spec)
        if resolved.attention != "triton":
            return []
        tuned.use(tuned.read_cache(resolved.cache_dir, tuned.machine(gpu_device())))
        images = image_pool(read_config(config.model_path), spec, config, resolved)
        return _parts(spec, resolved, gpu, images)


class MetaExecutor(NamedTuple):
    """An executor on the meta device: its launches name kernels and compute nothing."""

    executor: CudaExecutor
    pipelines: Pipelines
    kv: torch.Tensor
    collectives: PeerCollectives | None


def meta_executor(spec: ModelSpec, config: ResolvedConfig, gpu: Gpu, images: ImagePool | None = None) -> MetaExecutor:
    """Build the executor of `config` without weights. Call inside `compiling_for(gpu)` and inference mode. images:
    the pool of embeddings."""
    weights = load_weights(
        spec, Path(), device=config.device, dtype=config.weight_dtype, max_positions=config.max_model_len, dummy_seed=0
    )
    pipelines = Pipelines(spec, config.max_num_batched_tokens, gpu.sms, config.plan)
    collectives = None
    if (ranks := spec.shard_of.ranks) > 1:
        sizes = PeerLayout(spec, config.max_num_batched_tokens, config.max_num_seqs, config.compute_dtype)
        collectives = PeerCollectives(MetaMemory(sizes.total, ranks), 0, ranks, sizes)
    scales = weights.kv_page_scales(spec, config.kv.dtype)
    attention = TritonAttention(config.attention_shape(spec), gpu.sms, scales, batch_invariant=config.batch_invariant)
    adapters = None
    if config.adapter_slots:
        adapters = AdapterSlots(spec, config.adapter_slots, config.adapter_rank, config.compute_dtype, config.device)
    layers = CudaLayers(
        spec, weights, device_inputs(spec, config, pipelines.nano_batches, None if images is None else images.vision),
        config.compute_dtype, attention,
        invariant=config.batch_invariant, collectives=collectives, kv_scales=scales, adapters=adapters,
        images=None if images is None else images.rows,
    )  # fmt: skip
    kv = torch.empty(config.kv.shape(2), dtype=config.kv.dtype, device=config.device)
    return MetaExecutor(CudaExecutor(layers), pipelines, kv, collectives)


def _parts(spec: ModelSpec, config: ResolvedConfig, gpu: Gpu, images: ImagePool | None) -> list[list[Kernel]]:
    tuning = []
    if config.tuning_seconds > 0:
        tuning = collect(lambda: launch_tuning_candidates(spec, config.max_num_batched_tokens, config.cache_dir), gpu)
    executor, pipelines, kv, collectives = meta_executor(spec, config, gpu, images)

    def touch(those: Iterable[Pipeline]) -> None:
        for pipeline in those:
            rows = min(pipeline.tokens, config.max_sampled)
            executor.touch(pipeline, kv, rows)
            executor.sample(rows)

    def touch_serial() -> None:
        if collectives is None:
            touch(pipelines.serial)
            return
        for steps in MEASURED_STEPS if config.tuning_seconds > 0 else (None,):  # a start measures each
            collectives.use({} if steps is None else {0: steps})
            touch(pipelines.serial)

    serial = collect(touch_serial, gpu)
    return [tuning + serial, *(collect(partial(touch, [pipeline]), gpu) for pipeline in pipelines.planned)]
