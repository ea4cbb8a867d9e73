"""`choose`: which engine gets a request. A pure function of what is known of the engines; its policy is data.

Where most of a prompt's pages are kept, as long as that engine has not much more to do than the others; else where
requests with the same key go, if the client gave one; else where the least is to be done. Loads are tokens: of prompts
that are still to be computed, and of outputs as far as expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash


class Policy(NamedTuple):
    """What the router may trade for what."""

    load_bound: float = 1.25
    """times the mean of what engines have to do: who has more gets nothing, whatever it keeps"""
    load_slack: float = 4.0
    """requests of mean size that an engine may have to do beyond that bound"""
    work_bound: float = 1.2
    """times the mean of what engines were given lately: who was given more gets nothing"""
    work_slack: float = 8.0
    """requests of mean size that an engine may have been given beyond that bound"""
    tolerance: float = 0.1
    """of a prompt: an engine that keeps so much less of it than the best one is as good"""
    expected_output: int = 128
    """tokens of an answer, as far as the request does not set a lower limit"""
    window: int = 2048
    """requests that 'lately' goes back, at least half of that"""


POLICY = Policy()


class Candidate(NamedTuple):
    """An engine that takes requests."""

    engine: int
    kept: int = 0
    """tokens of the prompt whose pages it keeps"""
    load: float = 0.0
    """tokens it has to do"""
    work: float = 0.0
    """tokens it was given lately"""


def choose(
    candidates: Sequence[Candidate], prompt_tokens: int, mean_size: float, policy: Policy, key: str | None = None
) -> int:
    """The engine's number. `mean_size`: tokens of a request, on the mean of those given lately. `key`: of requests that
    will have prefixes in common; each engine has a rank for it (the highest hash), the same in every process.

    `candidates`: one at least.
    """
    load_bound = policy.load_bound * _mean([c.load for c in candidates]) + policy.load_slack * mean_size
    work_bound = policy.work_bound * _mean([c.work for c in candidates]) + policy.work_slack * mean_size
    idle = [c for c in candidates if c.load <= load_bound]  # never empty: the least loaded one is among them
    fair = [c for c in idle if c.work <= work_bound] or idle
    enough = max(c.kept for c in fair) - policy.tolerance * prompt_tokens
    near = [c for c in fair if c.kept >= enough]
    if key is not None:
        return max(near, key=lambda c: xxhash.xxh64_intdigest(key.encode(), seed=c.engine)).engine
    return min(near, key=lambda c: (c.load, c.work, c.engine)).engine


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
