"""The measurements of `mid_tuning`: a GEMM checked and timed in every variant, a layer sustained."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from weft.kernels.matmul import gemm_launch, mid_config, mid_projections, mid_table, projections
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.matmul.mid_config import MidConfig
from weft.kernels.matmul.projections import sumsq_buffer
from weft.kernels.matmul.tuned import Shape
from weft.kernels.tuning import calls as bench_calls
from weft.tools.kernels.calls import LLAMA_1B, LLAMA_8B, cublas, layer_shapes
from weft.tools.kernels.mid_configs import candidates

ERROR = 6e-3
"""Largest relative difference between two results of the same operands."""
REPEATS = 7


class Model(NamedTuple):
    shapes: list[Shape]
    head_dim: int
    kv_heads: int


def _half(shapes: list[Shape]) -> list[Shape]:
    """Return the shapes of one of two ranks: rows of the first and third GEMM, columns of the others."""
    qkv, o, gate_up, down = shapes
    return [
        qkv._replace(features=qkv.features // 2), o._replace(depth=o.depth // 2),
        gate_up._replace(features=gate_up.features // 2), down._replace(depth=down.depth // 2),
    ]  # fmt: skip


MODELS = {
    "8b": Model(LLAMA_8B, 128, 8),
    "1b": Model(LLAMA_1B, 64, 8),
    "70b/2": Model(_half(layer_shapes(8192, 28672, 64, 8)), 128, 4),
}


class Operands:
    """Inputs and outputs of one shape's GEMM, made once; `run` computes it."""

    def __init__(self, shape: Shape, tokens: int, model: Model, num_sms: int, device: str) -> None:
        n, k = shape.features, shape.depth
        self.shape, self.model, self.device = shape, model, device
        dtype = bench_calls.DTYPE
        self.a = torch.randn(tokens, k, device=device, dtype=dtype)
        self.sumsq = self.a.float().square().view(tokens, 16, -1).sum(-1).t().contiguous()
        self.live = torch.tensor([tokens], dtype=torch.int32, device=device)
        self.common: dict[str, Any] = {
            "num_sms": num_sms, "space": gemm_launch.workspace(device), "num_tokens": self.live
        }  # fmt: skip
        self.written: list[Tensor] = []
        if shape.kind == "qkv":
            d, heads = model.head_dim, n // model.head_dim - 2 * model.kv_heads
            self.kv = torch.zeros(tokens // 64 + 2, 2, 2, 64, model.kv_heads, d, device=device, dtype=dtype)
            angles = torch.randn(1024, d // 2, device=device)
            self.rotary = torch.stack((angles.cos(), angles.sin()), dim=-1).contiguous()
            self.positions = torch.arange(tokens, device=device, dtype=torch.int32)
            self.out = torch.empty(tokens, heads, d, device=device, dtype=dtype)
            self.written = [self.out, self.kv]
        elif shape.kind == "residual":
            self.x = torch.randn(tokens, n, device=device, dtype=dtype)
            self.out, self.parts = torch.empty_like(self.x), sumsq_buffer(n, tokens, device)
            self.written = [self.out]
        else:
            self.out = torch.empty(tokens, n // 2, device=device, dtype=dtype)
            self.written = [self.out]

    def run(self, weight: Tensor, config: GemmConfig | MidConfig | None) -> Tensor | None:
        """Run the GEMM and return its sums of squares, if it writes any."""
        options = self.common | {"config": config}
        module: Any = mid_projections if isinstance(config, MidConfig) else projections  # no table in between
        if self.shape.kind == "qkv":
            module.qkv_project(
                self.a, self.sumsq, weight, None, 1e-5, self.rotary, self.positions, self.positions + 64, self.kv, 1,
                self.out.shape[1], out=self.out, **options,
            )  # fmt: skip
            return None
        if self.shape.kind == "residual":
            _, sums = module.residual_project(self.a, weight, self.x, out=self.out, sumsq=self.parts, **options)
            return sums.sum(0)
        module.gate_up_project(self.a, self.sumsq, weight, 1e-5, out=self.out, **options)
        return None

    def call(self, weight: Tensor, config: GemmConfig | MidConfig | None) -> Callable[[], object]:
        """Return the call to time, the GEMM alone. None: the choice without a table."""
        module: Any = mid_projections if isinstance(config, MidConfig) else projections
        if self.shape.kind == "residual":
            options = self.common | {"config": config}
            return lambda: module.residual_project(self.a, weight, self.x, out=self.out, sumsq=self.parts, **options)
        if self.shape.kind == "qkv":
            slots, options = self.positions + 64, self.common | {"config": config}
            return lambda: module.qkv_project(
                self.a, self.sumsq, weight, None, 1e-5, self.rotary, self.positions, slots, self.kv, 1,
                self.out.shape[1], out=self.out, **options,
            )  # fmt: skip
        return lambda: self.run(weight, config)

    def results(self, weight: Tensor, config: GemmConfig | MidConfig | None, live: int) -> list[Tensor]:
        """Return everything that a GEMM writes with `live` tokens, from buffers filled with NaN."""
        self.live.fill_(live)
        for place in self.written:
            place.fill_(float("nan"))
        if self.shape.kind == "qkv":
            self.kv.zero_()
        sums = self.run(weight, config)
        found = [self.kv.float()] if self.shape.kind == "qkv" else []
        return [self.out[:live].float(), *found, *([] if sums is None else [sums[:live]])]


def error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Return the largest relative error by norm; NaN is worse than any number."""
    errors = [float((g.double() - w.double()).norm() / w.double().norm()) for g, w in zip(got, want, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def others(shape: Shape, tokens: int, num_sms: int) -> list[GemmConfig]:
    """Return configurations of the other kernels that their tuning does not try for so few tokens."""
    tiles = -(-tokens // 128) * -(-shape.features // 128)
    cut = [GemmConfig(128, 128, 64, 4, 8, 8, split) for split in (2, 4) if tiles * split <= 2 * num_sms]
    return ([SPECIAL] if tokens <= 256 else []) + cut


def label(config: GemmConfig | MidConfig | None) -> str:
    if config is None:
        return "now"
    if isinstance(config, MidConfig):
        by = f" by {config.box}" if config.box < mid_config.BLOCK_TOKENS else ""
        tall = f"{config.rows} x " if config.rows > mid_config.BLOCK_TOKENS else ""
        return f"{tall}{config.width}/{config.split}{'+' if config.ahead else ''}{by}"
    return "special" if config.special else f"{config.tokens}x{config.features}/{config.split} plain"


def item(model_name: str, index: int, tokens: int, done: set[str], say: Callable[[dict[str, Any]], None]) -> None:
    """Check and time one GEMM; reports each action before it starts. done: labels to skip."""
    from weft.kernels.tuning.measure import capture

    model = MODELS[model_name]
    shape = model.shapes[index]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    ops = Operands(shape, tokens, model, sms, bench_calls.DEVICE)
    weights = bench_calls.weights(shape, bench_calls.copies_for(shape))
    fills = {"full": tokens, "partly": mid_table.PARTLY_LIVE[tokens]}
    want = {fill: ops.results(weights[0], None, live) for fill, live in fills.items()}
    tried: list[GemmConfig | MidConfig | None] = [None, *others(shape, tokens, sms)]
    tried += candidates(shape.kind, tokens, shape.features, shape.depth, sms)
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    calls: dict[str, list[Callable[[], object]]] = {}  # they own memory that the graphs read and write
    errors: dict[str, float] = {}
    configs: dict[str, GemmConfig | MidConfig | None] = {}
    say({"doing": "cublas"})
    calls["cublas"] = [cublas(tokens, w) for w in weights]
    graphs["cublas"] = capture(calls["cublas"])
    for config in tried:
        name = label(config)
        if name in done or name in graphs:
            continue
        say({"doing": name})
        try:
            errors[name] = max(error(ops.results(weights[0], config, live), want[fill]) for fill, live in fills.items())
            torch.cuda.synchronize()
            if errors[name] > ERROR:
                continue
            calls[name] = [ops.call(w, config) for w in weights]
            graphs[name], configs[name] = capture(calls[name]), config
        except Exception as problem:  # a compiler may raise anything for a tile that does not fit
            say({"failed": name, "why": f"{type(problem).__name__}: {problem}"[:200]})
            if "CUDA" in str(problem):
                raise
    us: dict[str, dict[str, float]] = {}
    for fill, live in fills.items():
        ops.live.fill_(live)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(REPEATS):  # alternating, because clocks drift
            for name, (graph, count) in graphs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) / count)
        us[fill] = {name: statistics.median(t[1:]) * 1e3 for name, t in times.items()}
    say({
        "us": us, "errors": errors,
        "configs": {name: list(c) for name, c in configs.items() if isinstance(c, MidConfig)},
    })  # fmt: skip


def hold(model_name: str, tokens: int, live: int, table: dict[mid_table.Key, MidConfig], seconds: float,
         say: Callable[[dict[str, Any]], None]) -> None:  # fmt: skip
    """Run a layer's four GEMMs in sequence for `seconds`: plain cuBLAS, the choice without a table, the table's.

    live: number of live tokens; cuBLAS computes all.
    """
    from weft.kernels.tuning.measure import Meter, sustained

    model, sms = MODELS[model_name], torch.cuda.get_device_properties(0).multi_processor_count
    ops = [Operands(shape, tokens, model, sms, bench_calls.DEVICE) for shape in model.shapes]
    for each in ops:
        each.live.fill_(live)
    copies = 3 if model_name == "8b" else 6 if model_name == "1b" else 2
    weights = [bench_calls.weights(shape, copies) for shape in model.shapes]
    best = [table.get((tokens, s.features, s.depth)) for s in model.shapes]
    ways: dict[str, list[Callable[[], object]]] = {"cublas": [], "now": [], "table": []}
    for copy in range(copies):
        for i in range(len(ops)):
            w = weights[i][copy]
            ways["cublas"].append(cublas(tokens, w))
            ways["now"].append(ops[i].call(w, None))
            ways["table"].append(ops[i].call(w, best[i]))
    meter = Meter()
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    try:
        for _ in range(2):
            for name, calls in ways.items():
                say({"doing": f"hold {name}"})
                r = sustained(calls, meter, seconds)
                rows[name].append((r.ms * len(ops) * 1e3, r.watts, r.mhz))
    finally:
        meter.close()
    say({"layer_us": {name: [statistics.fmean(v) for v in zip(*r, strict=True)] for name, r in rows.items()},
         "best": [None if b is None else list(b) for b in best]})  # fmt: skip


def work(tasks: TextIO) -> None:
    """Run the measuring process: a task per line in JSON, answers likewise."""
    torch.set_grad_enabled(False)

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), flush=True)

    say({"ready": torch.cuda.get_device_name(0)})
    for line in tasks:
        task = json.loads(line)
        torch.manual_seed(0)
        if "seconds" in task:
            table = mid_table.decoded(task["table"])
            hold(task["model"], task["tokens"], task["live"], table, task["seconds"], say)
        else:
            item(task["model"], task["index"], task["tokens"], set(task["done"]), say)
        torch.cuda.empty_cache()
        say({"end": True})


if __name__ == "__main__":
    work(sys.stdin)
