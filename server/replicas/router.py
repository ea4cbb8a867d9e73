"""`choose`: which engine gets a request. A pure function of the engines' state, with its policy as data.

Overloaded engines are excluded. Among the rest, `choose` prefers the engines that cache most of the prompt, then the
engine to which the request's key maps, if it has one, then the least loaded engine. Load is measured in tokens: prompt
tokens left to compute plus expected output tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash


class Policy(NamedTuple):
    """Limits on load imbalance and cache misses."""

    load_bound: float = 1.25  # engines above this multiple of the mean load get no requests
    load_slack: float = 4.0  # requests of mean size that an engine may have beyond `load_bound`
    work_bound: float = 1.2  # engines above this multiple of the mean recent work get no requests
    work_slack: float = 8.0
    """Requests of mean size that an engine may have been given beyond `work_bound`."""
    tolerance: float = 0.1
    """Fraction of the prompt by which an engine may cache less than the best one and still tie with it."""
    expected_output: int = 128  # output tokens assumed for a request, unless its limit is lower
    window: int = 2048  # requests after which recent work is halved


POLICY = Policy()


class Candidate(NamedTuple):
    """An engine that accepts requests."""

    engine: int
    cached: int = 0  # prompt tokens whose pages it has cached
    load: float = 0.0  # tokens left to compute
    work: float = 0.0  # tokens it was given recently


def choose(
    candidates: Sequence[Candidate], prompt_tokens: int, mean_size: float, policy: Policy, key: str | None = None
) -> int:
    """The number of the chosen engine. `candidates` must not be empty. `mean_size`: mean tokens per recent request.
    `key`: shared by requests with a common prefix; every process maps it to the same engine (the highest hash wins)."""
    load_bound = policy.load_bound * _mean([c.load for c in candidates]) + policy.load_slack * mean_size
    work_bound = policy.work_bound * _mean([c.work for c in candidates]) + policy.work_slack * mean_size
    idle = [c for c in candidates if c.load <= load_bound]  # never empty: it includes the least loaded engine
    fair = [c for c in idle if c.work <= work_bound] or idle
    enough = max(c.cached for c in fair) - policy.tolerance * prompt_tokens
    near = [c for c in fair if c.cached >= enough]
    if key is not None:
        return max(near, key=lambda c: xxhash.xxh64_intdigest(key.encode(), seed=c.engine)).engine
    return min(near, key=lambda c: (c.load, c.work, c.engine)).engine


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
