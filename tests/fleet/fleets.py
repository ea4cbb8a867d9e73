"""Small profiles, fleets and loads."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.deploy.fleet.engine import EngineOptions
from weft.deploy.fleet.front import FrontOptions
from weft.deploy.fleet.profile import Energy, IterationProfile, Limits
from weft.deploy.fleet.simulation import Failure, Fleet, Result, simulate
from weft.loadgen import slo
from weft.loadgen.lengths import Lengths
from weft.loadgen.prompts import PromptMaker
from weft.loadgen.workload import ONE, ArrivalOptions, ContentOptions, Workload, build

ENGINE = EngineOptions(page_size=16, num_pages=400, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)


def profile(**fields: Any) -> IterationProfile:
    """10 ms an iteration, independent of its content."""
    known: dict[str, Any] = {
        "model": "m", "device": "d", "made": "", "limits": Limits(16, 400, 8, 64, 1024), "knots": (1.0,),
        "dense_ms": (10.0,), "context_ms": 0.0, "pair_ms": 0.0, "chunk_ms": 0.0, "decode_ms": 0.0,
        "energy": Energy(idle_watts=100.0, per_iteration=1.0),
    }  # fmt: skip
    known |= fields
    if len(known["knots"]) == 1:
        known["knots"], known["dense_ms"] = (1.0, 1e6), known["dense_ms"] * 2
    return IterationProfile(**known)


def at(times: list[float], inputs: int | list[int], outputs: int | list[int]) -> Workload:
    """Requests of the given lengths at the given times."""
    n = len(times)
    a, b = (np.full(n, x) if isinstance(x, int) else np.array(x) for x in (inputs, outputs))
    return Workload(np.array(times), a, b, np.ones(n, np.int64), ContentOptions(), PromptMaker("ids", 0))


def drawn(
    rate: float = 10.0, duration: float = 10.0, *, inputs: str = "64", outputs: str = "16", turns: Lengths = ONE,
    think: float = 0.0, seed: int = 0, context: int = 1024, **maker: Any,
) -> Workload:  # fmt: skip
    from weft.loadgen.lengths import parse

    content = ContentOptions(parse(inputs, ""), parse(outputs, ""), turns=turns, think=think)
    arrival = ArrivalOptions(rate=rate, duration=duration)
    return build(arrival, content, PromptMaker("ids", seed, **maker), context)


def run(
    workload: Workload, engines: int = 1, *, objectives: str = "", failures: tuple[Failure, ...] = (),
    cores: float | None = None, of: IterationProfile | None = None, engine: EngineOptions = ENGINE, **front: Any,
) -> Result:  # fmt: skip
    requested = slo.parse(objectives) if objectives else []
    return simulate(
        Fleet(of or profile(), engine, FrontOptions(engines, **front), cores, failures), workload, requested
    )
