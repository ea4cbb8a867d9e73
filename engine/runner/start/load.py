"""`load_model`: provides a model's weights: from a checkpoint, as dummy weights, or from another replica."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from weft.engine.config import EngineConfig
from weft.engine.errors import OutOfMemory
from weft.engine.model.spec import ModelSpec
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.model.weights import Weights, load_weights
from weft.engine.progress import Phases, Progress
from weft.engine.runner.memory.shared_memory import shared_memory
from weft.engine.runner.memory.shared_weights import shared_weights
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.wire.weight_exchange import WeightExchange

if TYPE_CHECKING:
    from weft.engine.model.transformers_impl.module import TransformersModule


def load_model(
    spec: ModelSpec | TransformersSpec, config: EngineConfig, resolved: ResolvedConfig, phases: Phases, *,
    exchange: WeightExchange | None, model: str,
) -> Weights | TransformersModule:  # fmt: skip
    """Load the weights to `resolved.device`. exchange: lets replicas share weights; `model` identifies them there.

    Raises `ModelError`."""
    prepare(resolved)
    if isinstance(spec, TransformersSpec):
        from weft.engine.runner.start.self_test import load_tested

        return load_tested(spec, config, resolved)

    def read() -> Weights:
        return read_weights(spec, config, resolved, phases)

    if exchange is None:
        return read()
    name = f"{model}|{resolved.weight_dtype}|{resolved.max_model_len}"
    return shared_weights(
        exchange, name, shared_memory(resolved.device), read, lambda: phases("waiting for another's weights", 0, 1)
    )


@contextmanager
def within_memory() -> Iterator[None]:
    """Turn torch's error into `OutOfMemory` if the GPU's memory does not suffice for a start."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise OutOfMemory(
            "the model and its buffers do not fit the GPU: use a smaller model, "
            "or lower --max-num-seqs or --max-num-batched-tokens"
        ) from None


def prepare(resolved: ResolvedConfig) -> None:
    """Set up this process and thread for loading weights."""
    torch.set_num_threads(resolved.cpu_threads)
    if resolved.device.type == "cuda":
        use_expandable_segments()


def use_expandable_segments() -> None:
    """Let torch use expandable segments, unless the operator has set this. Otherwise gaps that reading and packing
    weights leave between segments are lost to KV pages."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def read_weights(spec: ModelSpec, config: EngineConfig, resolved: ResolvedConfig, progress: Progress) -> Weights:
    """Read the weights of a model or of a rank's shard. Raises `ModelError`."""
    weights = load_weights(
        spec, config.model_path, device=resolved.device, dtype=resolved.weight_dtype,
        max_positions=resolved.max_model_len, dummy_seed=config.seed if config.load_format == "dummy" else None,
        dummy_skew=config.dummy_skew, dummy_realistic=config.dummy_weights == "realistic", progress=progress,
    )  # fmt: skip
    if resolved.device.type == "cpu":
        give_back_freed_memory()
    return weights


def give_back_freed_memory() -> None:
    """Return what loading has freed to the system: glibc keeps it for each thread that converted tensors."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
