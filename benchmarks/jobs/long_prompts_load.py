"""Arrivals of long prompts at a share of the capacity, in a steady state: the load of `latency.py long`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RATIOS = (8.0, 24.0)
"""Smallest and largest ratio of prompt tokens to answer tokens."""


class Costs(NamedTuple):
    """Times of an engine whose iterations compute a chunk of one prompt, if any, and a token of each running answer."""

    prompt_s: float
    """Seconds of a prompt on its own."""
    chunks: float
    """Iterations per prompt."""
    step_s: float
    """Fixed seconds of an iteration without a chunk."""
    each_s: float
    """Seconds per request in such an iteration."""
    beside_s: float
    """Seconds per request in an iteration with a chunk."""

    def most(self, answer: float, slots: int) -> int:
        """The most requests that can decode: limited by pages, or by a chunk in every iteration."""
        return max(1, min(slots, int(answer / self.chunks)))

    def request_s(self, answer: float, running: int) -> float:
        """Device seconds per request when `running` requests decode answers of `answer` tokens on average.

        A request accounts for `answer / running` iterations, `chunks` of which contain a chunk.
        """
        steps = max(0.0, answer / running - self.chunks)
        beside = self.prompt_s + self.chunks * running * self.beside_s
        return beside + steps * (self.step_s + running * self.each_s)

    def capacity(self, answer: float, slots: int) -> float:
        """Sustainable requests per second."""
        return 1 / min(self.request_s(answer, n) for n in range(1, self.most(answer, slots) + 1))

    def running(self, rate: float, answer: float, slots: int) -> int:
        """The smallest number of decoding requests that uses all device time at this rate."""
        most = self.most(answer, slots)
        return next((n for n in range(1, most + 1) if self.request_s(answer, n) <= 1 / rate), most)

    def fill_s(self, requests: int) -> float:
        """Seconds until the last of `requests` simultaneous prompts is computed while the earlier ones decode."""
        return requests * self.prompt_s + self.chunks * self.beside_s * requests * (requests - 1) / 2


class Share(NamedTuple):
    """A load and the times in seconds between which it is judged."""

    share: float
    rate: float
    """Requests per second."""
    running: int
    """Requests that decode at the start."""
    filled: float
    """Expected time at which they all have their first tokens."""
    begin: float
    end: float
    requests: list[tuple[float, int, int]]
    """Arrival in seconds, prompt and answer in tokens."""


def answers(tokens: int, count: int) -> np.ndarray:
    """Answer lengths of `count` requests of `tokens` tokens, with evenly spread `RATIOS`."""
    return tokens / (1 + RATIOS[0] + (RATIOS[1] - RATIOS[0]) * (np.arange(count) + 0.5) / count)


def arrivals(
    costs: Costs, share: float, tokens: int, slots: int, settle: float, seconds: float, seed: int
) -> Share:  # fmt: skip
    """Requests of `tokens` tokens at a share of the capacity, judged for `seconds` after `settle` seconds.

    The load begins with as many requests as run at that rate, each with only a rest of its answer. Then a fixed number
    of arrivals follows at uniform random times, because a random number would change the share.
    """
    rng = np.random.default_rng(seed)
    spread = answers(tokens, 256)
    mean = float(spread.mean())
    rate = share * costs.capacity(mean, slots)
    running = costs.running(rate, mean, slots)
    requests: list[tuple[float, int, int]] = []
    # A running answer is long with a probability proportional to its length; any share of it may be left.
    whole = rng.choice(spread, running, p=spread / spread.sum())
    left = whole * rng.permutation((np.arange(running) + 0.5) / running)
    for k in range(running):
        # Each iteration of a later prompt decodes one token of this answer.
        answer = int(left[k] + (running - 1 - k) * costs.chunks) + 2
        requests.append((k * costs.prompt_s / 2, max(1, tokens - answer), answer))
    filled = costs.fill_s(running)
    begin, end = filled + settle, filled + settle + seconds
    count = max(1, round(rate * (end - filled)))
    lengths = rng.permutation(answers(tokens, count).astype(int))
    for at, answer in zip(np.sort(rng.uniform(filled, end, count)), lengths, strict=True):
        requests.append((float(at), tokens - int(answer), int(answer)))
    return Share(share, rate, running, filled, begin, end, requests)
