"""The cost model of NanoFlow §3: Equations 1-5, the ratio T_R, and Table 2. Adds energy to the paper's times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch

from weft.autosearch.accelerators import Accelerator
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.operations import Resource, Role
from weft.engine.model.parts import Layer
from weft.engine.model.spec import ModelSpec, Shard

ITEMSIZE = 2  # Bytes per element of weights, activations and KV.


class Usage(NamedTuple):
    """Workload of an iteration: a dense batch in the steady state of `prompt` and `output` tokens per request."""

    dense_batch: int
    prompt: float
    output: float

    @property
    def decodes(self) -> float:
        """d of every p + d tokens are decodes."""
        return self.dense_batch * self.output / (self.prompt + self.output)

    @property
    def prefills(self) -> float:
        return self.dense_batch - self.decodes

    @property
    def context(self) -> float:
        """Mean keys of a decode: the prompt and half of the output."""
        return self.prompt + self.output / 2


class Cost(NamedTuple):
    """The cost of one operation per iteration, over all layers and GPUs (a row of Table 2)."""

    name: str
    gflop: float
    mem_gb: float
    net_gb: float

    def seconds(self, device: Accelerator, gpus: int = 1) -> dict[Resource, float]:
        """T_compute, T_mem and T_net. T_net uses the bandwidth of one direction (footnote 5)."""
        return {
            Resource.COMPUTE: self.gflop / (gpus * device.gflops),
            Resource.MEMORY: self.mem_gb / (gpus * device.mem_gbs),
            Resource.NETWORK: self.net_gb / (gpus * device.net_gbs / 2),
        }

    def bound(self, device: Accelerator, gpus: int = 1) -> Resource:
        """The bottleneck: the resource with the longest time."""
        seconds = self.seconds(device, gpus)
        return max(seconds, key=lambda r: seconds[r])

    def joules(self, device: Accelerator) -> float | None:
        """Energy beyond idling, or None if this device was never measured.

        The coefficient of GEMMs includes their operand traffic, so the larger of both terms counts."""
        if (energy := device.energy) is None:
            return None
        return max(self.gflop / 1e3 * energy.joules_per_tflop, self.mem_gb * energy.joules_per_gb)

    def power_seconds(self, device: Accelerator, gpus: int = 1) -> float | None:
        """The fourth resource: energy divided by the power limit above idling."""
        joules = self.joules(device)
        return None if joules is None or device.energy is None else joules / (
            gpus * (device.watts - device.energy.idle_watts)
        )  # fmt: skip


def t_mem(device: Accelerator) -> float:
    """Equation 1: seconds to read all of the memory once, on any number of GPUs."""
    return device.mem_seconds


def t_compute(dense_batch: int, parameters: float, device: Accelerator, gpus: int = 1) -> float:
    """Equation 2: seconds of the dense operations."""
    return 2 * dense_batch * parameters / (gpus * device.gflops * 1e9)


def t_ratio(dense_batch: int, parameters: float, device: Accelerator, gpus: int = 1) -> float:
    """Equation 4, T_R: above 1 the workload is memory-bound, below compute-bound."""
    return t_mem(device) / t_compute(dense_batch, parameters, device, gpus)


def classify(dense_batch: int, parameters: float, device: Accelerator, gpus: int = 1) -> Resource:
    return Resource.MEMORY if t_ratio(dense_batch, parameters, device, gpus) > 1 else Resource.COMPUTE


def optimal_throughput(flops: float, parameters: float) -> float:
    """Equation 5: tokens/s of one GPU that sustains `flops` FLOP/s."""
    return flops / (2 * parameters)


def _kinds(spec: ModelSpec) -> Counter[int]:
    """Count layers by kind, keyed by the first of each kind. Kinds differ in windows and experts."""
    first: dict[Layer, int] = {}
    return Counter(first.setdefault(spec.layer(i), i) for i in range(spec.num_layers))


def collective_costs(spec: ModelSpec, tokens: float) -> list[Cost]:
    """Return every collective of an iteration over all layers and ranks. spec: of one rank, with its collectives.

    Another GPU reads the data that a GPU sends from its memory, and adds it up if it is a partial sum."""
    found: dict[str, Cost] = {}
    for layer, layers in _kinds(spec).items():
        for op in spec.layer_operations(layer):
            if op.role is Role.NETWORK:
                numbers = spec.shard_of.ranks * layers * tokens / 1e9
                before = found.get(op.name, Cost(op.name, 0.0, 0.0, 0.0))
                sent = before.net_gb + op.sent * numbers * ITEMSIZE
                found[op.name] = Cost(op.name, before.gflop + op.flops * numbers, sent, sent)
    return list(found.values())


def operation_costs(spec: ModelSpec, usage: Usage, gpus: int = 1) -> list[Cost]:
    """Table 2: every operation of an iteration over all layers. `gpus` > 1 adds the collectives as one row.

    A GEMM reads its weights (of all experts) and its input once, and writes its output once. Attention reads queries,
    keys and values, and writes outputs and the new keys and values. Prompts attend to all of their tokens, not to half
    of them, as in the paper's table. A recurrence reads and writes its state for each decode, and once for a prompt."""
    tokens = usage.dense_batch
    kv_bytes = KvLayout.of(spec, 1, torch.bfloat16).token_values * ITEMSIZE / max(1, len(spec.kv_heads))
    found: dict[str, Cost] = {}
    for layer, layers in _kinds(spec).items():
        window = spec.layer(layer).window or math.inf
        context, prompt = min(usage.context, window), min(usage.prompt, window)
        state = spec.layer(layer).state
        state_bytes = 2 * state.nbytes if state is not None else 0
        for op in spec.layer_operations(layer):
            gflop, moved = 0.0, 0.0
            match op.role:
                case Role.PROJECTION | Role.EXPERTS:
                    gflop = op.flops * tokens
                    moved = (op.parameters + tokens * op.moved) * ITEMSIZE
                case Role.DECODE_ATTENTION:
                    gflop = op.flops * usage.decodes * context
                    moved = usage.decodes * (context * kv_bytes + op.moved * ITEMSIZE + kv_bytes)
                case Role.PREFILL_ATTENTION:
                    gflop = op.flops * usage.prefills * prompt
                    moved = usage.prefills * (op.moved * ITEMSIZE + kv_bytes)
                case Role.STATE_STEP:
                    gflop = op.flops * usage.decodes
                    moved = usage.decodes * (op.moved * ITEMSIZE + state_bytes)
                case Role.STATE_SCAN:
                    gflop = op.flops * usage.prefills
                    moved = usage.prefills * (op.moved * ITEMSIZE + state_bytes / max(usage.prompt, 1))
                case Role.NETWORK:
                    continue  # one row, added below
            before = found.get(op.name, Cost(op.name, 0.0, 0.0, 0.0))
            gflop, moved = gflop * layers / 1e9, moved * layers / 1e9
            found[op.name] = Cost(op.name, before.gflop + gflop, before.mem_gb + moved, 0.0)
    out = list(found.values())
    if gpus > 1:
        shared = replace(spec, shard_of=Shard(ranks=gpus))  # the reductions have the same width for any split
        out.append(total(collective_costs(shared, tokens))._replace(name="network"))
    return out


def most_tokens(spec: ModelSpec, usage: Usage, memory_gb: float) -> int:
    """Return the largest dense batch of a workload whose weights, KV and recurrent states (two for each request) fit
    all of the memory; 0: not one request."""
    free = memory_gb * 1e9 - spec.num_parameters * ITEMSIZE
    states = 2 * sum(state.nbytes for state in spec.states if state is not None)
    requests = free / (KvLayout.of(spec, 1, torch.bfloat16).token_values * ITEMSIZE * usage.context + states)
    return int(requests * (usage.prompt + usage.output) / usage.output) if requests >= 1 else 0


def total(costs: list[Cost]) -> Cost:
    return Cost("total", *(sum(getattr(c, f) for c in costs) for f in ("gflop", "mem_gb", "net_gb")))
