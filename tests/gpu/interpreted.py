"""A simulated GPU: `CudaRunner` on the CPU, with interpreted kernels, and streams and graphs in order of launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from weft.engine.plans.pipeline import Pipeline
from weft.engine.ranks import loading
from weft.engine.runner.cuda import cuda_eagle3, cuda_runner
from weft.engine.runner.options import resolve
from weft.kernels.attention import backends as attention_backends
from weft.kernels.attention import triton_backend as attention_triton
from weft.kernels.common.gpu import Gpu, compiling_for


class InOrder:
    """A stream or an event of a device that runs each operation at once, in the order of launch."""

    def __init__(self, *_: object, **__: object) -> None:
        self.records = 0

    def record(self, *_: object) -> None:
        self.records += 1

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 1.0


class Replayed:
    """A graph: launches what was captured again."""

    def __init__(self, launch: Callable[[], object] | None = None) -> None:
        if launch is not None:
            self.replay = launch


def _capture_while_running(_: cuda_runner.CudaRunner, graph: Replayed, launch: Callable[[], object]) -> None:
    graph.replay = launch


def _numbers(x: Any) -> Any:
    """The numbers of a tile. A tile of e4m3 holds bytes, one of bfloat16 the upper halves of float32."""
    if x.dtype.scalar == tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    if x.dtype.scalar != tl.float8e4nv:
        return x.data
    return interpreter._convert_float(x.data, tl.float8e4nv, tl.float16, None).view(np.float16)


def exact_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    """A GEMM of 16-bit tiles, rounded once. BLAS adds in an order that depends on a row's place in its tile."""
    product = np.matmul(_numbers(a).astype(np.float64), _numbers(b).astype(np.float64))
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _capture(runner: cuda_runner.CudaRunner, pipeline: Pipeline) -> Any:
    return cuda_runner._Graphs(
        Replayed(lambda: runner._run_model(pipeline)),  # type: ignore[arg-type]
        Replayed(lambda: runner._executor.sample(runner._max_sampled(pipeline))),  # type: ignore[arg-type]
        {},
        Replayed(lambda: runner._run_model(pipeline, adapted=True)),  # type: ignore[arg-type]
    )


def _captured(_: cuda_eagle3.CudaEagle3, launch: Callable[[], object], __: object) -> Replayed:
    return Replayed(launch)


@contextlib.contextmanager
def streams_in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this context, tensors of the CPU stand for those of a GPU of four SMs."""
    zeros, empty = torch.zeros, torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", InOrder)
    monkeypatch.setattr(torch.cuda, "Event", InOrder)
    monkeypatch.setattr(torch.cuda, "current_stream", InOrder)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **{**k, "pin_memory": False}))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **{**k, "pin_memory": False}))
    monkeypatch.setattr(attention_triton, "check", lambda *_: None)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact_dot)
    with torch.inference_mode(), compiling_for(Gpu("interpreter", (8, 0), 4)):
        yield


@contextlib.contextmanager
def interpreted_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this context, an engine with `device="cuda"` runs interpreted on the CPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr(cuda_runner.CudaRunner, "_capture", _capture)
    monkeypatch.setattr(cuda_eagle3.CudaEagle3, "_captured", _captured)
    monkeypatch.setattr(cuda_runner.CudaRunner, "_capture_while_running", _capture_while_running)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(cuda_runner.CudaRunner, "_warm_up", lambda *_: None)
    monkeypatch.setattr(resolve, "gpu_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(attention_backends, "check", lambda *_: None)
    monkeypatch.setattr(attention_backends, "choose", lambda *_: "triton")

    def make(
        spec: Any,
        weights: Any,
        _: Any,
        config: Any,
        progress: Any,
        *__: Any,
        image_rows: Any = None,
        draft: Any = None,
        **___: Any,
    ) -> Any:
        return cuda_runner.CudaRunner(spec, weights, config, progress, image_rows=image_rows, draft=draft)

    monkeypatch.setattr(loading, "make_runner", make)
    monkeypatch.setattr(loading.CompileJob, "begin", lambda *_: None)
    with streams_in_order(monkeypatch):
        yield
