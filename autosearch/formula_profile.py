"""`formula_profile`: a profile computed from formulas for an accelerator of Table 1, to search before one was recorded.

Nothing in it was measured on the model or on several cards of the accelerator. The efficiency factors and the cost of
sharing a card were measured on H200s, derived from measurements there, or assumed; `SOURCES` lists which. Plans found
on it name no real card, so engines reject them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from weft.autosearch.accelerators import Accelerator
from weft.autosearch.bench_protocol import Load
from weft.autosearch.pipeline_structure import every_operation
from weft.autosearch.profile import GuestPair, PairPoint, Point, Profile, work_of
from weft.engine.errors import ConfigError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.operations import ALL_REDUCE, Operation, Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import TOKEN_STEP, Target, model_key
from weft.kernels.matmul.gemm_config import SPECIAL

SOURCES = (
    "measured on one H200, Llama-3-8B: GEMMs reach 0.68 of the rated FLOP/s, attention 0.90 of the bandwidth and "
    "0.53 of the FLOP/s; the cost of sharing SMs with attention",
    "measured on four H200s: an all-reduce takes 10 us plus the transfer at 0.67 of one link direction; its SMs",
    "derived there from nano-batches next to collectives: a GEMM takes 1.5 times longer during a collective",
    "assumed: each half of an all-reduce takes half its time; attention and collectives slow each other by a tenth",
)
"""Basis of the formulas, for the report."""

GEMM, READ, PREFILL, LINK = 0.68, 0.90, 0.53, 0.67
"""Sustained shares of the rated FLOP/s, bytes/s, FLOP/s, and link bytes/s of one direction."""
LAUNCH_MS, HOP_MS = 0.004, 0.005
"""Latency of any operation, and additional latency of a scatter or gather (twice that for an all-reduce)."""
READ_ON = ((0, 0.12, 0.18, 0.24, 0.30, 0.36, 0.42, 0.48, 1), (0, 0.30, 0.43, 0.57, 0.68, 0.80, 0.89, 0.95, 1))
"""Share of the SMs -> share of the bandwidth that attention reaches."""
SEND_ON = ((0, 0.06, 0.12, 0.24, 1), (0, 0.62, 0.93, 1, 1))  # Share of the SMs -> share of the link speed.
NEXT_TO_ATTENTION = ((0.52, 0.64, 0.76, 0.88), (2.70, 2.03, 1.50, 1.26))
"""Share of the SMs of a GEMM -> its slowdown next to attention on the other SMs."""
NEXT_TO_GEMM, NEXT_TO_COLLECTIVE, NEXT_TO_EACH_OTHER = 1.31, 1.5, 1.1
"""Slowdown of attention next to a GEMM, of a GEMM next to a collective, of attention and collectives."""
WATTS = {Resource.COMPUTE: 0.99, Resource.MEMORY: 0.94, Resource.NETWORK: 0.34}  # Share of the power limit.
GUEST_SHARES = (0.06, 0.12, 0.18, 0.24, 0.36, 0.48)
"""Shares of the SMs for attention and collectives next to other operations."""
WORK_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Formulas:
    """Durations of the operations of one rank's shard of a model on an accelerator."""

    spec: ModelSpec
    device: Accelerator

    def ms(self, op: Operation, work: float, sms: int) -> float:
        """Milliseconds alone on `sms` SMs."""
        device, share = self.device, sms / self.device.sms
        match op.role:
            case Role.PROJECTION | Role.EXPERTS:
                tiles = -(-int(work) // SPECIAL.tokens) * -(-op.out // SPECIAL.features)
                each = 2 * SPECIAL.tokens * SPECIAL.features * op.inner / (device.gflops * GEMM / device.sms) / 1e6
                read = op.parameters * 2 / (device.mem_gbs * READ) / 1e6
                return LAUNCH_MS + max(-(-tiles // sms) * each, read)
            case Role.DECODE_ATTENTION:
                token_bytes = KvLayout.of(self.spec, 1, torch.bfloat16).token_bytes / self.spec.num_layers
                rate = device.mem_gbs * READ * float(np.interp(share, *READ_ON))
                return LAUNCH_MS + work * token_bytes / rate / 1e6
            case Role.PREFILL_ATTENTION:
                return LAUNCH_MS + work * op.flops / (device.gflops * PREFILL * share) / 1e6
            case Role.NETWORK:
                rate = device.net_gbs / 2 * LINK * float(np.interp(share, *SEND_ON))
                hops = 2 if op.kernel == ALL_REDUCE else 1
                return hops * HOP_MS + work * op.sent * 2 / rate / 1e6


def formula_profile(spec: ModelSpec, load: Load, device: Accelerator) -> Profile:
    """Compute every operation of one rank, alone and in pairs. Raises `ConfigError` if the SM count is unknown."""
    if not device.sms:
        raise ConfigError(f"--gpu {device.name}: its number of SMs is unknown, so a plan cannot divide them")
    formulas, operations = Formulas(spec, device), every_operation(spec)
    total = device.sms
    guests = sorted({max(1, round(share * total)) for share in GUEST_SHARES})
    levels = sorted({*guests, *(total - n for n in guests), total})
    points = [
        Point(op.name, work, sms, formulas.ms(op, work, sms), WATTS[op.resource] * device.watts, 0.0)
        for op in operations.values()
        for work in _works(op, load)
        for sms in levels
    ]
    pairs = list(_pairs(formulas, load, list(operations.values()), guests))
    target = Target(f"modelled {device.name}", total, model_key(spec), "bfloat16", "none")
    return Profile(
        target, load, {name: op.out for name, op in operations.items()}, tuple(points),
        tuple(p for p in pairs if isinstance(p, PairPoint)), int((device.built_gb or device.mem_gb) * 1e9),
        made=f"modelled: {device.name} by formulas", modelled=tuple(operations),
        guest_pairs=tuple(p for p in pairs if isinstance(p, GuestPair)),
    )  # fmt: skip


def _works(op: Operation, load: Load) -> list[float]:
    """Amounts of work from an eighth of the load's to all of it; each step of tokens for GEMMs and collectives."""
    if not op.role.attends:
        return [float(t) for t in (*range(TOKEN_STEP, load.tokens, TOKEN_STEP), load.tokens)]
    return sorted({max(1.0, work_of(op, load) * share) for share in WORK_SHARES})


def _pairs(
    formulas: Formulas, load: Load, operations: Sequence[Operation], guests: list[int]
) -> Iterator[PairPoint | GuestPair]:
    """Yield compute operations next to memory operations and collectives, then memory ones next to collectives."""
    total, order = formulas.device.sms, [Resource.COMPUTE, Resource.MEMORY, Resource.NETWORK]
    present = sorted((o for o in operations if work_of(o, load)), key=lambda o: order.index(o.resource))
    for op, guest in product(present, present):
        if order.index(op.resource) >= order.index(guest.resource):
            continue
        works, compute = (work_of(op, load), work_of(guest, load)), op.resource is Resource.COMPUTE
        for sms in guests:
            own = total - sms if compute else sms
            slower = NEXT_TO_EACH_OTHER, NEXT_TO_EACH_OTHER
            if guest.resource is Resource.MEMORY:
                slower = float(np.interp(own / total, *NEXT_TO_ATTENTION)), NEXT_TO_GEMM
            elif compute:
                slower = NEXT_TO_COLLECTIVE, 1.0
            first, second = formulas.ms(op, works[0], own) * slower[0], formulas.ms(guest, works[1], sms) * slower[1]
            values = (op.name, guest.name, *works, own, sms, first, second, formulas.device.watts)
            yield PairPoint(*values) if compute else GuestPair(*values)
