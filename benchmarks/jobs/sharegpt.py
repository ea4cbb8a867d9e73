"""Poisson arrivals with lengths like ShareGPT's: the load of `latency.py online` and of its simulation."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

SHAREGPT = ((246.0, 547.0), (322.0, 244.0))
"""Mean and standard deviation of prompt and answer lengths, in tokens."""
LONGEST = (4000, 2000)


def sharegpt(rate: float, seconds: float, seed: int) -> list[dict[str, float]]:
    """Requests whose lengths are evenly spaced quantiles of the distribution, in random order."""
    rng = np.random.default_rng(seed)
    count = round(rate * seconds)
    at = np.cumsum(rng.exponential(1 / rate, count))
    lengths = []
    for (mean, deviation), longest in zip(SHAREGPT, LONGEST, strict=True):
        spread = np.log1p((deviation / mean) ** 2)
        normal = NormalDist(np.log(mean) - spread / 2, np.sqrt(spread))
        found = np.exp([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
        lengths.append(rng.permutation(np.clip(np.rint(found), 1, longest)))
    return [
        {"at": float(t), "input_tokens": int(prompt), "output_tokens": int(answer)}
        for t, prompt, answer in zip(at, *lengths, strict=True)
    ]
