"""`load_model`: a model's weights as an engine's configuration asks for them, read, made up or another replica's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from weft.engine.config import EngineConfig
from weft.engine.errors import OutOfMemory
from weft.engine.model.broad.spec import BroadSpec
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights, load_weights
from weft.engine.progress import Phases, Progress
from weft.engine.runner.memory.shared_memory import shared_memory
from weft.engine.runner.memory.shared_weights import shared_weights
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.wire.weight_exchange import WeightExchange

if TYPE_CHECKING:
    from weft.engine.model.broad.module import BroadModule


def load_model(
    spec: ModelSpec | BroadSpec,
    config: EngineConfig,
    resolved: ResolvedConfig,
    phases: Phases,
    *,
    exchange: WeightExchange | None,
    model: str,
) -> Weights | BroadModule:
    """On `resolved.device`. exchange: where replicas find each other's weights; `model` is their identity there.

    Raises `ModelError`.
    """
    prepare(resolved)
    if isinstance(spec, BroadSpec):
        from weft.engine.runner.start.broad_load import load_tested

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
    """For whatever of a start allocates with torch. Raises `OutOfMemory` where that finds no room on the GPU."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise OutOfMemory(
            "the model and its buffers do not fit the GPU: use a smaller model, "
            "or lower --max-num-seqs or --max-num-batched-tokens"
        ) from None


def prepare(resolved: ResolvedConfig) -> None:
    """This process and thread, before weights come into it."""
    torch.set_num_threads(resolved.cpu_threads)
    if resolved.device.type == "cuda":
        grow_in_place()


def grow_in_place() -> None:
    """Have torch extend the segments of GPU memory that it holds, which gives the ends back: what reading and packing
    weights leaves between segments is else lost to KV pages. An operator's setting stays.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def read_weights(spec: ModelSpec, config: EngineConfig, resolved: ResolvedConfig, progress: Progress) -> Weights:
    """Of all of a model or of a rank's part of it. Raises `ModelError`."""
    return load_weights(
        spec,
        config.model_path,
        device=resolved.device,
        dtype=resolved.weight_dtype,
        max_positions=resolved.max_model_len,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        dummy_skew=config.dummy_skew,
        dummy_realistic=config.dummy_weights == "realistic",
        progress=progress,
    )
