"""`Runner`: what the engine asks of a device. One implementation for CPUs, one for CUDA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from weft import install_hint
from weft.engine.errors import ConfigError
from weft.engine.memory.transfer import Gate
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.progress import Progress
from weft.engine.runner.batch import Batch, StepResult
from weft.engine.runner.products import prepare_products
from weft.engine.runner.resolve import DevicePlan

PROMPT_LOGPROB_ROWS = 256
"""rows of logits at once: bounds memory for long prompts with a large vocabulary"""


class InFlight(Protocol):
    """An iteration that was launched. `wait()` gives its result, or raises what went wrong."""

    @property
    def batch(self) -> Batch: ...

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Owns a device's weights, KV pool and resident arrays; runs batches in the order of launch."""

    @property
    def num_pages(self) -> int: ...

    @property
    def kv(self) -> Tensor:
        """`[pages, layers, 2, page_size, Hkv, D]`"""
        ...

    @property
    def copy_gates(self) -> Sequence[Gate]:
        """Where, in order, copies to the host have their place in the iteration launched last; open if it has none."""
        ...

    def launch(self, batch: Batch) -> InFlight:
        """Start an iteration and return at once."""
        ...

    def close(self) -> None: ...


def make_runner(spec: ModelSpec, weights: Weights, plan: DevicePlan, progress: Progress | None = None) -> Runner:
    """The runner for the plan's device, its KV pool allocated. Raises `OutOfMemory`."""
    if plan.device.type == "cuda":
        try:
            from weft.engine.runner.cuda_runner import CudaRunner
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ConfigError(f"a GPU needs Triton: {install_hint('gpu')}, or use --device cpu") from None
        prepare_products(spec, plan.device, plan.max_num_batched_tokens, plan.cache_dir, plan.tuning_seconds, progress)
        return CudaRunner(spec, weights, plan, progress)
    from weft.engine.runner.cpu_runner import CpuRunner

    return CpuRunner(spec, weights, plan)
