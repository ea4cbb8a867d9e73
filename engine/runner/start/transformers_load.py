"""`load_tested`: loads a `transformers` model, and runs the self-test on a CPU. On a GPU `make_runner` runs it."""

from __future__ import annotations

import torch

from weft.engine.config import EngineConfig
from weft.engine.model.transformers_impl.module import TransformersModule
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.model.transformers_impl.weights import load_transformers
from weft.engine.runner.cpu.transformers_cpu import TransformersCpuExecutor
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.runner.start.self_test import pages_needed, self_test


def load_tested(spec: TransformersSpec, options: EngineConfig, config: ResolvedConfig) -> TransformersModule:
    """Load the model. Raises `ModelError`, also if its results in weft's batches differ from those on its own."""
    model = load_transformers(
        spec,
        options.model_path,
        device=config.device,
        dtype=config.weight_dtype,
        max_positions=config.max_model_len,
        dummy_seed=options.seed if options.load_format == "dummy" else None,
        trusted=options.trust_remote_code,
    )
    if config.attention != "triton":  # a GPU's test needs its runner's work lists
        _test(spec, model, config)
    return model


def _test(spec: TransformersSpec, model: TransformersModule, config: ResolvedConfig) -> None:
    shape = config.kv.shape(1 + pages_needed(config.kv.page_size))
    with torch.inference_mode():
        # Unwritten pages may contain anything.
        pool = torch.full(shape, float("nan"), dtype=config.kv.dtype)
        pool[0] = 0
    executor = TransformersCpuExecutor(spec, model, pool, config)

    def run(batch: Batch) -> torch.Tensor:
        inputs = executor.inputs(batch, torch.from_numpy(batch.token_ids).long())
        x, place = executor.forward(inputs)
        return executor.logits(x, place, torch.from_numpy(batch.sampling.logit_tokens).long())

    self_test(
        spec, model, run, page_size=config.kv.page_size, max_model_len=config.max_model_len, dtype=config.compute_dtype
    )
