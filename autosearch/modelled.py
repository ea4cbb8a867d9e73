"""`modelled_profile`: a profile of formulas for an accelerator of the table, where nothing was recorded.

So that the search has something to search on before there is a machine: nothing in it was measured on the model, or on
several cards of the accelerator at once. What the formulas reach of the table's figures, and what sharing a card costs,
was measured on H200s, or derived from measurements there, or assumed; `SOURCES` says which. Plans found on it carry the
name of no real card, so no engine takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from weft.autosearch.accelerators import Accelerator
from weft.autosearch.bench_protocol import Load
from weft.autosearch.profile import GuestPair, PairPoint, Point, Profile, work_of
from weft.autosearch.structure import every_operation
from weft.engine.errors import ConfigError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.operations import ALL_REDUCE, Operation, Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import TOKEN_STEP, Target, model_key
from weft.kernels.matmul.gemm_config import SPECIAL

SOURCES = (
    "measured on one H200, Llama-3-8B: products reach 0.68 of the printed FLOP/s, attention 0.90 of the bandwidth and "
    "0.53 of the FLOP/s; what sharing SMs with attention costs",
    "measured on four H200s: an all-reduce takes 10 us and 0.67 of one direction of the link; how many SMs it needs",
    "derived there from nano-batches beside collectives: a product runs 1.5 times longer while one does",
    "assumed: halves of an all-reduce take half of it; attention and collectives slow each other down by a tenth",
)
"""what stands behind the formulas, for the reader of a report"""

PRODUCT, READ, PREFILL, LINK = 0.68, 0.90, 0.53, 0.67
"""of the printed FLOP/s, bytes/s, FLOP/s and bytes/s of one direction, sustained"""
LAUNCH_MS, HOP_MS = 0.004, 0.005
"""of any operation; of a scatter or a gather on top, and twice that of an all-reduce"""
READ_ON = ((0, 0.12, 0.18, 0.24, 0.30, 0.36, 0.42, 0.48, 1), (0, 0.30, 0.43, 0.57, 0.68, 0.80, 0.89, 0.95, 1))
"""share of the SMs -> share of the bandwidth that attention reaches on them"""
SEND_ON = ((0, 0.06, 0.12, 0.24, 1), (0, 0.62, 0.93, 1, 1))
"""share of the SMs -> share of the link's speed"""
BESIDE_ATTENTION = ((0.52, 0.64, 0.76, 0.88), (2.70, 2.03, 1.50, 1.26))
"""share of the SMs of a product -> how much longer it takes beside attention that has the others"""
BESIDE_PRODUCT, BESIDE_COLLECTIVE, BESIDE_EACH_OTHER = 1.31, 1.5, 1.1
"""how much longer attention takes beside a product, a product beside a collective, attention and collectives"""
WATTS = {Resource.COMPUTE: 0.99, Resource.MEMORY: 0.94, Resource.NETWORK: 0.34}
"""of the power limit"""
GUEST_SHARES = (0.06, 0.12, 0.18, 0.24, 0.36, 0.48)
"""of the SMs, for attention and collectives beside others"""
WORK_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Formulas:
    """How long operations of one rank's part of a model take on an accelerator."""

    spec: ModelSpec
    device: Accelerator

    def ms(self, op: Operation, work: float, sms: int) -> float:
        """Alone on `sms` SMs."""
        device, share = self.device, sms / self.device.sms
        match op.role:
            case Role.PRODUCT | Role.EXPERTS:
                tiles = -(-int(work) // SPECIAL.tokens) * -(-op.out // SPECIAL.features)
                each = 2 * SPECIAL.tokens * SPECIAL.features * op.inner / (device.gflops * PRODUCT / device.sms) / 1e6
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


def modelled_profile(spec: ModelSpec, load: Load, device: Accelerator) -> Profile:
    """Every operation of one rank, alone and in pairs. Raises `ConfigError` for an accelerator without SMs."""
    if not device.sms:
        raise ConfigError(f"--gpu {device.name}: its multiprocessors are not known, so a plan cannot share them out")
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
    by_resource: dict[Resource, list[Operation]] = {r: [] for r in Resource}
    for op in operations.values():
        if work_of(op, load):
            by_resource[op.resource].append(op)
    target = Target(f"modelled {device.name}", total, model_key(spec), "bfloat16", "none")
    return Profile(
        target, load, {name: op.out for name, op in operations.items()}, tuple(points),
        tuple(_pairs(formulas, load, by_resource, guests)), int((device.built_gb or device.mem_gb) * 1e9),
        made=f"modelled: {device.name} by formulas", modelled=tuple(operations),
        guest_pairs=tuple(_guest_pairs(formulas, load, by_resource, guests)),
    )  # fmt: skip


def _works(op: Operation, load: Load) -> list[float]:
    """Amounts of work from an eighth of the load's to all of it; of products and collectives each step of tokens."""
    if not op.role.attends:
        return [float(t) for t in (*range(TOKEN_STEP, load.tokens, TOKEN_STEP), load.tokens)]
    return sorted({max(1.0, work_of(op, load) * share) for share in WORK_SHARES})


def _pairs(
    formulas: Formulas, load: Load, by_resource: Mapping[Resource, list[Operation]], guests: list[int]
) -> Iterator[PairPoint]:
    total, limit = formulas.device.sms, formulas.device.watts
    for op in by_resource[Resource.COMPUTE]:
        for guest in by_resource[Resource.MEMORY] + by_resource[Resource.NETWORK]:
            works = work_of(op, load), work_of(guest, load)
            for sms in guests:
                own = total - sms
                if guest.resource is Resource.MEMORY:
                    slower = float(np.interp(own / total, *BESIDE_ATTENTION)), BESIDE_PRODUCT
                else:
                    slower = BESIDE_COLLECTIVE, 1.0
                first, second = formulas.ms(op, works[0], own), formulas.ms(guest, works[1], sms)
                yield PairPoint(
                    op.name, guest.name, *works, own, sms, first * slower[0], second * slower[1], limit
                )  # fmt: skip


def _guest_pairs(
    formulas: Formulas, load: Load, by_resource: Mapping[Resource, list[Operation]], guests: list[int]
) -> Iterator[GuestPair]:
    for op in by_resource[Resource.MEMORY]:
        for guest in by_resource[Resource.NETWORK]:
            works = work_of(op, load), work_of(guest, load)
            for sms in guests:
                both = formulas.ms(op, works[0], sms), formulas.ms(guest, works[1], sms)
                slow = both[0] * BESIDE_EACH_OTHER, both[1] * BESIDE_EACH_OTHER
                yield GuestPair(op.name, guest.name, *works, sms, sms, *slow, formulas.device.watts)
