"""Times kernels of recurrent states next to a memory bound: `python -m weft.tools.kernels.bench_states`.

Steps of decoding and scans of a chunk, for shapes of real models. Every timing is a captured graph over several layers
whose states together exceed the L2 cache. Errors are the largest difference from the reference on the CPU over the
largest value.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft import output_file
from weft.engine.memory.state_layout import StateLayout
from weft.engine.model.parts import Recurrence
from weft.kernels.reference import states as reference
from weft.kernels.tuning.measure import Meter, sustained
from weft.tools.kernels.calls import copy_bandwidth
from weft.tools.kernels.states import conv, delta_rule, gated_norm, mamba2
from weft.tools.kernels.states.state_pages import (
    ChunkWork,
    StateTables,
    StateTensor,
    chunk_lists,
    chunk_work,
    unit_places,
)

PAGE_BYTES = 1 << 20
DTYPE, EPS = torch.bfloat16, 1e-6
MODELS = {
    "Qwen3.5-35B-A3B": Recurrence("gated_delta", 32, 16, 128, 128, conv_dtype="bfloat16"),  # also Qwen3-Next
    "Qwen3.5-27B": Recurrence("gated_delta", 48, 16, 128, 128, conv_dtype="bfloat16"),
    "Nemotron-3-Nano-30B-A3B": Recurrence("mamba2", 64, 8, 128, 64, conv_dtype="bfloat16", conv_bias=True),
    "Granite-4-h-tiny": Recurrence("mamba2", 48, 1, 128, 64, conv_dtype="bfloat16", conv_bias=True),
}
STEPS, CHUNKS = (1, 8, 64, 256), (64, 512, 2048, 8192)
SWEEPS: dict[str, Sequence[dict[str, int]]] = {
    "step": [
        {"STEP_COLUMNS": columns, "STEP_WARPS": warps, "STEP_PROGRAMS": programs}
        for columns, warps, programs in itertools.product((16, 32, 64), (4, 8), (2, 4, 6))
    ],
    "chunk": [
        {"SCAN_COLUMNS": columns, "SCAN_ROWS": columns, "SCAN_WARPS": warps, "SCAN_STAGES": stages}
        for columns, warps, stages in itertools.product((16, 32), (2, 4, 8), (1, 2, 3))
    ],
}


class Layer:
    """One layer's weights, its rows of the input projection, and its states in pages of a pool of its own."""

    def __init__(self, of: Recurrence, rows: int, tokens: int, context: int, device: str) -> None:
        """rows: requests of one token if `tokens` is 0; else one chunk of tokens after `context`."""
        self.of, self.rows, self.tokens, self.context, self.device = of, rows, tokens, context, device
        total, heads = tokens or rows, of.heads
        make = partial(torch.randn, device=device)
        self.x = make(total, of.inner, dtype=DTYPE)
        self.weight, self.bias = make(of.channels, of.taps, dtype=DTYPE) / 2, make(of.channels, dtype=DTYPE) / 4
        self.a_log, self.dt_bias, self.d = torch.rand(heads, device=device).log(), make(heads), make(heads, dtype=DTYPE)
        self.delta = of.kind == "gated_delta"
        self.norm = make(of.value_dim if self.delta else of.width, dtype=DTYPE)
        self.layout = StateLayout.of([of.state], PAGE_BYTES)
        n = self.layout.pages
        self.table = 1 + torch.randperm(rows * n).view(rows, n)
        self.given = {t.name: torch.randn(rows, *t.shape).to(getattr(torch, t.dtype)) for t in of.state.tensors}
        pool = torch.zeros(rows * n + 1, PAGE_BYTES, dtype=torch.uint8)
        self.layout.write(pool, self.table, 0, self.given)
        self.pool = pool.to(device)
        self.conv, self.state = (self._tensor(i) for i in range(2))
        pages = self.table.to(device, torch.int32)
        self.tables = StateTables(pages, pages)
        self.positions = torch.full((rows,), context, dtype=torch.int32, device=device)
        self.made = torch.zeros(total, of.channels, dtype=DTYPE, device=device)
        self.out = torch.zeros(total, of.width, dtype=DTYPE, device=device)
        self.arrived = torch.zeros(rows * of.key_heads, dtype=torch.int32, device=device)

    def _tensor(self, index: int) -> StateTensor:
        tensor = self.of.state.tensors[index]
        dtype = getattr(torch, tensor.dtype)
        units = tensor.shape[0] if len(tensor.shape) > 2 else 1
        size = int(np.prod(tensor.shape)) // units * dtype.itemsize
        places = unit_places(self.layout.runs[0][index], units, size, dtype.itemsize)
        return StateTensor(self.pool.view(dtype), torch.from_numpy(places).to(self.device))

    def work(self) -> ChunkWork:
        one = np.zeros(1, np.int64)
        lists = chunk_lists(one, one + self.tokens, one + self.context, one)
        return chunk_work(lists, np.zeros((0, self.layout.pages), np.int32), self.device)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the convolution's channels, the output gate, and the columns with one number a head."""
        heads = self.of.heads
        parts = (self.of.channels, self.of.width, *([heads, heads] if self.delta else [heads]))
        return rows.split(parts, -1)

    def normed(self, num_sms: int) -> object:
        groups = self.of.heads if self.delta else self.of.key_heads
        return gated_norm.gated_norm(
            self.out, self.split(self.x)[1], self.norm, EPS, groups=groups, norm_first=self.delta, out=self.out,
            num_sms=num_sms,
        )  # fmt: skip

    def step(self, num_sms: int) -> list[Callable[[], object]]:
        x, z, *scalars = self.split(self.x)
        options: dict[str, Any] = {
            "state": self.state,
            "tables": self.tables,
            "positions": self.positions,
            "num_sms": num_sms,
        }
        if self.delta:
            b, a = scalars
            return [partial(
                delta_rule.delta_rule_step, x, z, b, a, self.weight, None, self.a_log, self.dt_bias, self.norm, EPS,
                conv=self.conv, key_heads=self.of.key_heads, arrived=self.arrived, out=self.out, **options,
            )]  # fmt: skip
        return [
            partial(conv.conv_step, x, self.weight, self.bias, self.conv, self.tables, self.positions, out=self.made,
                    num_sms=num_sms),
            partial(mamba2.ssd_step, self.made, scalars[0], self.dt_bias, self.a_log, self.d,
                    groups=self.of.key_heads, width=self.of.value_dim, out=self.out, **options),
            partial(self.normed, num_sms),
        ]  # fmt: skip

    def chunk(self, num_sms: int, space: delta_rule.DeltaSpace | None, work: ChunkWork) -> list[Callable[[], object]]:
        x, _, *scalars = self.split(self.x)
        options: dict[str, Any] = {"state": self.state, "tables": self.tables, "work": work, "num_sms": num_sms}
        options["out"] = self.out
        bias = None if self.delta else self.bias
        first = partial(
            conv.conv_chunks, x, self.weight, bias, self.conv, self.tables, work, out=self.made, num_sms=num_sms
        )
        if space is not None:
            scan = partial(
                delta_rule.delta_rule_chunks, self.made, scalars[0], scalars[1], self.a_log, self.dt_bias, space=space,
                key_heads=self.of.key_heads, value_width=self.of.value_dim, **options,
            )  # fmt: skip
        else:
            scan = partial(
                mamba2.ssd_chunks, self.made, scalars[0], self.dt_bias, self.a_log, self.d, groups=self.of.key_heads,
                width=self.of.value_dim, **options,
            )  # fmt: skip
        return [first, scan, partial(self.normed, num_sms)]

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the reference's output and recurrent state."""
        of, one = self.of, np.ones(self.rows, np.int64)
        plan = reference.plan_states(one * max(1, self.tokens), one * self.context)
        x, z, *scalars = (t.cpu() for t in self.split(self.x))
        bias = None if self.delta else self.bias.cpu()
        y, _ = reference.causal_conv(x, self.weight.cpu(), bias, self.given["conv"], plan)
        a_log, dt_bias, norm, state = (t.cpu() for t in (self.a_log, self.dt_bias, self.norm, self.given["recurrent"]))
        parts = [part.unflatten(-1, (-1, width)) for part, width in zip(
            y.split(list(of.sections.values())[:3], -1),
            (of.key_dim, of.key_dim, of.value_dim) if self.delta else (of.value_dim, of.key_dim, of.key_dim),
            strict=True,
        )]  # fmt: skip
        if self.delta:
            q, k, v = parts
            g, beta = reference.delta_gates(scalars[1], scalars[0], a_log, dt_bias)
            values = (reference.l2_norm(q), reference.l2_norm(k), v, g, beta)
            y, state = (
                reference.delta_rule_scan(*values, state, plan) if self.tokens
                else reference.delta_rule_step(*values, state)
            )  # fmt: skip
        else:
            dt = reference.time_steps(scalars[0], dt_bias)
            fixed = (parts[0], dt, -a_log.exp(), parts[1], parts[2], self.d.cpu(), state)
            y, state = reference.ssd_scan(*fixed, plan) if self.tokens else reference.ssd_step(*fixed)
        groups = of.heads if self.delta else of.key_heads
        y = reference.gated_norm(y.flatten(-2).to(DTYPE), z, norm, EPS, groups=groups, norm_first=self.delta)
        return y, state

    def bytes(self) -> int:
        """Least traffic: the state read and written once, the projection's rows read, the output written."""
        return 2 * self.rows * self.layout.nbytes + self.x.nbytes + self.out.nbytes


def delta_space(tokens: int, of: Recurrence, device: str) -> delta_rule.DeltaSpace | None:
    """Return scratch for a chunk of these tokens, if its scan needs any."""
    if of.kind != "gated_delta":
        return None
    return delta_rule.delta_space(tokens, of.heads, of.key_dim, of.value_dim, DTYPE, device)


def _error(a: Tensor, b: Tensor) -> float:
    return float((a.float().cpu() - b.float()).abs().max() / b.float().abs().max())


def errors(name: str, num_sms: int, device: str) -> Iterator[dict[str, object]]:
    """Yield the error of a step of 9 requests, and of a chunk of 300 tokens after 64, of a model's layer."""
    of = MODELS[name]
    for what, rows, tokens in (("step", 9, 0), ("chunk", 1, 300)):
        layer = Layer(of, rows, tokens, 64, device)
        space = delta_space(300, of, device)
        y, state = layer.expected()
        for call in layer.chunk(num_sms, space, layer.work()) if tokens else layer.step(num_sms):
            call()
        after = layer.layout.read(layer.pool.cpu(), layer.table, 0)["recurrent"]
        yield {"model": name, "what": what, "error": _error(layer.out, y), "state_error": _error(after, state)}


class Timed(NamedTuple):
    """Graphs of some layers: all launches, and each launch alone."""

    calls: list[list[Callable[[], object]]]  # For each layer: its launches.
    bytes: int  # Bytes that one layer moves at least.


def timed(name: str, rows: int, tokens: int, num_sms: int, device: str) -> Timed:
    of = MODELS[name]
    one = Layer(of, rows, tokens, 0 if tokens else 1000, device)
    space = delta_space(tokens, of, device)
    count = max(2, min(48, -(-200_000_000 // one.bytes())))
    layers = [one, *(Layer(of, rows, tokens, one.context, device) for _ in range(count - 1))]
    work = one.work() if tokens else None
    return Timed(
        [layer.step(num_sms) if work is None else layer.chunk(num_sms, space, work) for layer in layers], one.bytes()
    )


@contextmanager
def constants(modules: Sequence[ModuleType], values: dict[str, int]) -> Iterator[None]:
    """Use other launch constants inside this context."""
    before = [(module, name, getattr(module, name)) for module in modules for name in values if hasattr(module, name)]
    try:
        for module, name, _ in before:
            setattr(module, name, values[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0] + ".")
    parser.add_argument("--models", default="Qwen3.5-35B-A3B,Nemotron-3-Nano-30B-A3B", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of each measurement")
    parser.add_argument("--sweep", action="store_true", help="try other tiles at 64 rows and 2,048 tokens")
    parser.add_argument("--json", type=output_file, help="write the rows here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    bandwidth, meter = copy_bandwidth(), Meter()
    print(f"{torch.cuda.get_device_name()} torch {torch.__version__}, scaled copy {bandwidth:.2f} TB/s")
    rows: list[dict[str, object]] = []

    def keep(row: dict[str, object]) -> None:
        rows.append(row)
        print(" ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                       for key, value in row.items()), flush=True)  # fmt: skip
        if options.json:
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)

    def measure(name: str, what: str, size: int, extra: dict[str, object], *, parts: bool) -> None:
        made = timed(name, size if what == "step" else 1, 0 if what == "step" else size, num_sms, "cuda")
        whole = sustained([call for layer in made.calls for call in layer], meter, options.seconds)
        us = whole.ms * 1e3 * len(made.calls[0])
        bound = made.bytes / bandwidth / 1e6
        alone = {}
        if parts and len(made.calls[0]) > 1:
            for i, call in enumerate(made.calls[0]):
                function = getattr(call, "func", call)
                ms = sustained([layer[i] for layer in made.calls], meter, options.seconds / 2).ms
                alone[f"{function.__name__}_us"] = ms * 1e3
        keep({"model": name, "what": what, "size": size, "us": us, "bound_us": bound, "of_bound": bound / us,
              "watts": whole.watts, **alone, **extra})  # fmt: skip

    for name in options.models.split(","):
        for row in errors(name, num_sms, "cuda"):
            keep(row)
        for what, sizes in (("step", STEPS), ("chunk", CHUNKS)):
            for size in sizes:
                measure(name, what, size, {}, parts=True)
            for values in SWEEPS[what] if options.sweep else ():
                with constants((delta_rule, mamba2), values):
                    try:
                        measure(name, what, 64 if what == "step" else 2048, dict(values), parts=False)
                    except Exception as error:  # a tile that does not fit is a row of the sweep
                        keep({"model": name, "what": what, **values, "failed": str(error)[:100]})
    meter.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
