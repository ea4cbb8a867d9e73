"""`formula_profile`: a profile computed from formulas for an accelerator of Table 1, to search before one was recorded.

Nothing in it was measured on the model or on several cards of the accelerator. The efficiency factors and the cost of
sharing a card were measured on H200s, derived from measurements there, or assumed; `SOURCES` lists which. Plans found
on it name no real card, so engines reject them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec
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

Curve = tuple[list[float], list[float]]


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Efficiency and cost of sharing, derived from recorded profiles by `weft bench formulas`.

    A curve is a list of shares of the SMs and the value at each share."""

    profiles: tuple[str, ...]  # The recorded profiles that the constants come from.
    gemm: float  # Share of the rated FLOP/s.
    read: float  # Attention of decodes: share of the rated bytes/s.
    prefill: float  # Attention of prompts: share of the rated FLOP/s.
    launch_ms: float  # Latency of any operation.
    read_on: Curve  # Share of its full speed that the attention of decodes reaches on these SMs.
    gemm_next_to_attention: Curve  # Slowdown of compute operations on these SMs next to attention on the others.
    attention_next_to_gemm: Curve
    link: float  # Share of the link's bytes/s in one direction.
    hop_ms: float  # Additional latency of a scatter or gather; twice that for an all-reduce.
    send_on: Curve  # Share of the link speed that collectives reach on these SMs.
    gemm_next_to_collective: float
    attention_and_collective: float  # Slowdown of both.
    watts: dict[Resource, float]  # Share of the power limit.


CONSTANTS = msgspec.json.decode(Path(__file__).with_name("formula_constants.json").read_bytes(), type=Constants)
SOURCES = (
    f"measured on one H200, Llama-3-8B: GEMMs reach {CONSTANTS.gemm:.2f} of the rated FLOP/s, attention "
    f"{CONSTANTS.read:.2f} of the bandwidth and {CONSTANTS.prefill:.2f} of the FLOP/s; the cost of sharing SMs with "
    "attention",
    f"measured on four H200s: an all-reduce takes {2e3 * CONSTANTS.hop_ms:.0f} us plus the transfer at "
    f"{CONSTANTS.link:.2f} of one link direction; its SMs",
    f"derived there from nano-batches next to collectives: a GEMM takes {CONSTANTS.gemm_next_to_collective:g} times "
    "longer during a collective",
    "assumed: each half of an all-reduce takes half its time; attention and collectives slow each other by a tenth",
)
"""Basis of the formulas, for the report."""
GUEST_SHARES = (0.06, 0.12, 0.18, 0.24, 0.36, 0.48)
"""Shares of the SMs for attention and collectives next to other operations."""
WORK_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Formulas:
    """Durations of the operations of one rank's shard of a model on an accelerator."""

    spec: ModelSpec
    device: Accelerator
    constants: Constants = CONSTANTS

    def ms(self, op: Operation, work: float, sms: int) -> float:
        """Milliseconds alone on `sms` SMs."""
        device, share, k = self.device, sms / self.device.sms, self.constants
        match op.role:
            case Role.PROJECTION | Role.EXPERTS:
                tiles = -(-int(work) // SPECIAL.tokens) * -(-op.out // SPECIAL.features)
                each = 2 * SPECIAL.tokens * SPECIAL.features * op.inner / (device.gflops * k.gemm / device.sms) / 1e6
                read = op.parameters * 2 / (device.mem_gbs * k.read) / 1e6
                return k.launch_ms + max(-(-tiles // sms) * each, read)
            case Role.DECODE_ATTENTION:
                token_bytes = KvLayout.of(self.spec, 1, torch.bfloat16).token_bytes / self.spec.num_layers
                rate = device.mem_gbs * k.read * float(np.interp(share, *k.read_on))
                return k.launch_ms + work * token_bytes / rate / 1e6
            case Role.PREFILL_ATTENTION:
                return k.launch_ms + work * op.flops / (device.gflops * k.prefill * share) / 1e6
            case Role.NETWORK:
                rate = device.net_gbs / 2 * k.link * float(np.interp(share, *k.send_on))
                hops = 2 if op.kernel == ALL_REDUCE else 1
                return hops * k.hop_ms + work * op.sent * 2 / rate / 1e6
            case Role.STATE_STEP | Role.STATE_SCAN:
                raise ConfigError(f"{op.name}: there are no formulas for recurrent states")


def formula_profile(spec: ModelSpec, load: Load, device: Accelerator) -> Profile:
    """Compute every operation of one rank, alone and in pairs. Raises `ConfigError` if the SM count is unknown."""
    if not device.sms:
        raise ConfigError(f"--gpu {device.name}: its number of SMs is unknown, so a plan cannot divide them")
    formulas, operations = Formulas(spec, device), every_operation(spec)
    total = device.sms
    guests = sorted({max(1, round(share * total)) for share in GUEST_SHARES})
    levels = sorted({*guests, *(total - n for n in guests), total})
    points = [
        Point(op.name, work, sms, formulas.ms(op, work, sms), CONSTANTS.watts[op.resource] * device.watts, 0.0)
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
            slower = CONSTANTS.attention_and_collective, CONSTANTS.attention_and_collective
            if guest.resource is Resource.MEMORY:
                curves = CONSTANTS.gemm_next_to_attention, CONSTANTS.attention_next_to_gemm
                slower = float(np.interp(own / total, *curves[0])), float(np.interp(sms / total, *curves[1]))
            elif compute:
                slower = CONSTANTS.gemm_next_to_collective, 1.0
            first, second = formulas.ms(op, works[0], own) * slower[0], formulas.ms(guest, works[1], sms) * slower[1]
            values = (op.name, guest.name, *works, own, sms, first, second, formulas.device.watts)
            yield PairPoint(*values) if compute else GuestPair(*values)
