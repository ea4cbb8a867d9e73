"""Assembles the shipped profile of Llama-3-8B on an H200 from measurements of its kernels.

No engine was recorded for it. `python -m weft.tools.fleet.h200 FILE` makes it again; docs/simulator.md says how it
compares with real engines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from weft.autosearch.accelerators import accelerator
from weft.autosearch.profile import SHIPPED, Curves, load_profile
from weft.deploy.fleet.profile import Energy, IterationProfile, Limits

PRODUCTS = ("qkv", "o", "gate_up", "down")
FEW_TOKENS_US = {1: 116.5, 8: 116, 16: 117, 32: 121, 64: 133}
"""The four GEMMs of a layer, measured on 2026-11-21 (53bdd71)."""
SOME_TOKENS_US = {128: 153.4, 192: 191.5, 256: 224.7, 384: 311.9, 512: 386.4, 640: 477.8, 1280: 915.1}
"""The same GEMMs with the tuned table, sustained, measured on 2026-11-24 (fca89d6)."""
TILE = 128
"""Tokens of a tile: one token takes as long as a full tile."""
STEPS = sorted({192, *range(TILE, 2049, TILE)})
"""Numbers of tokens after which iterations take longer."""
ATTENTION_MS = 0.0077
"""The constant part of a layer's attention: the intercept of the recorded points, 8 us for one request."""
HEAD_MS = 0.25
"""Reading the LM head once: 1.05 GB at the speed of a device copy."""
AROUND_MS = 0.09
"""Time that the engine adds to a step's kernels, measured on 2026-11-21."""
ROW_MS = 0.00134
"""LM head and sampling per row: 1.0 and 0.16 ms for about 680 rows in the traced iteration, less `HEAD_MS`."""


def derived() -> IterationProfile:
    recorded = load_profile(SHIPPED / "llama-3-8b-h200.json")
    curves, sms = Curves(recorded), recorded.target.sms
    layers, parameters, kv_bytes = 32, 8.03e9, 131_072
    points = {float(tokens): us / 1e3 for tokens, us in FEW_TOKENS_US.items()}
    for tokens in STEPS:
        products_us = SOME_TOKENS_US.get(tokens)
        ms = sum(curves.ms(name, tokens, sms, serial=True) for name in PRODUCTS)
        ms = ms if products_us is None else products_us / 1e3
        points[max(points) + 1] = points[float(tokens)] = ms
    constant = layers * ATTENTION_MS + HEAD_MS + AROUND_MS
    decode = [(p.work, p.ms) for p in recorded.points if p.operation == "decode" and p.sms == sms]
    prefill = [(p.work, p.ms) for p in recorded.points if p.operation == "prefill" and p.sms == sms]
    energy = accelerator("h200").energy
    assert energy is not None
    read = energy.joules_per_gb * parameters * 2 / 1e9
    products = energy.joules_per_tflop * 2 * parameters * 2048 / 1e12
    return IterationProfile(
        model="Llama-3-8B shape, bfloat16",
        device="NVIDIA H200, serial plan",
        made="put together by tools/fleet/h200.py from the kernel profile of autosearch/profiles and BENCHMARKS.md; "
        "num_pages is an estimate, request_ms and answer_ms are guesses after the demo model's TTFT on that machine",
        limits=Limits(
            page_size=64, num_pages=14_000, max_num_seqs=1024, max_num_batched_tokens=2048, max_model_len=8192
        ),
        knots=tuple(points),
        dense_ms=tuple(round(layers * ms + constant, 4) for ms in points.values()),
        context_ms=_slope(decode) * layers,
        pair_ms=_slope(prefill) * layers,
        chunk_ms=0.0,
        decode_ms=ROW_MS,
        gap_ms=0.027,
        host_ms=0.4,
        host_request_ms=0.0012,
        request_ms=2.0,
        answer_ms=0.5,
        energy=Energy(
            idle_watts=energy.idle_watts,
            per_iteration=read,
            per_token=(products - read) / 2048,
            per_context=energy.joules_per_gb * kv_bytes / 1e9,
            per_pair=energy.joules_per_tflop * 4 * 32 * 128 * layers / 1e12,
        ),
    )


def _slope(points: list[tuple[float, float]]) -> float:
    """The slope of the straight line through (work, milliseconds)."""
    work, ms = np.array(sorted(points)).T
    return float(np.polyfit(work, ms, 1)[0])


if __name__ == "__main__":
    derived().save(Path(sys.argv[1]))
