"""Long prompts at shares of a capacity, in a steady state from the beginning: the load of `slo.py long`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RATIOS = (8.0, 24.0)
"""tokens of a prompt for one of its answer"""


class Costs(NamedTuple):
    """What an engine needs whose iterations take a chunk of one prompt, if there is one, and a token of each answer."""

    prompt_s: float
    """of a prompt alone"""
    chunks: float
    """iterations of a prompt"""
    step_s: float
    """of an iteration without a chunk, whatever runs"""
    each_s: float
    """for each request in it"""
    beside_s: float
    """for each request in an iteration with a chunk"""

    def most(self, answer: float, seats: int) -> int:
        """How many can be decoding: all that have pages, or as many as come when each iteration has a chunk."""
        return max(1, min(seats, int(answer / self.chunks)))

    def request_s(self, answer: float, running: int) -> float:
        """Seconds that each request takes of the device when so many decode, `answer` the mean tokens of an answer.

        Of the iterations that it takes for a part of all `running`, `chunks` have a chunk in them; the others do not.
        """
        steps = max(0.0, answer / running - self.chunks)
        beside = self.prompt_s + self.chunks * running * self.beside_s
        return beside + steps * (self.step_s + running * self.each_s)

    def capacity(self, answer: float, seats: int) -> float:
        """Requests a second that can be kept up."""
        return 1 / min(self.request_s(answer, n) for n in range(1, self.most(answer, seats) + 1))

    def running(self, rate: float, answer: float, seats: int) -> int:
        """Requests that decode at this rate: so few that no time is left over."""
        most = self.most(answer, seats)
        return next((n for n in range(1, most + 1) if self.request_s(answer, n) <= 1 / rate), most)

    def fill_s(self, requests: int) -> float:
        """Until the last of so many that came together has its first token, the earlier ones decoding meanwhile."""
        return requests * self.prompt_s + self.chunks * self.beside_s * requests * (requests - 1) / 2


class Share(NamedTuple):
    """A load and the time (s) in which it is judged."""

    share: float
    rate: float
    """requests a second"""
    running: int
    """at its beginning"""
    filled: float
    """when these have their first tokens, if all is as expected"""
    begin: float
    end: float
    requests: list[tuple[float, int, int]]
    """arrival (s), prompt and answer (tokens)"""


def answers(tokens: int, count: int) -> np.ndarray:
    """Of requests of so many tokens with `RATIOS` evenly spread."""
    return tokens / (1 + RATIOS[0] + (RATIOS[1] - RATIOS[0]) * (np.arange(count) + 0.5) / count)


def arrivals(
    costs: Costs, share: float, tokens: int, seats: int, settle: float, seconds: float, seed: int
) -> Share:  # fmt: skip
    """Requests of `tokens` at a share of the capacity, judged `settle` behind the beginning for `seconds`.

    First as many as run at that rate, each with a part of its answer behind it; then a Poisson process of as many
    arrivals as the rate says (of so few, random counts would be other shares), their lengths those of the distribution.
    """
    rng = np.random.default_rng(seed)
    spread = answers(tokens, 256)
    mean = float(spread.mean())
    rate = share * costs.capacity(mean, seats)
    running = costs.running(rate, mean, seats)
    requests: list[tuple[float, int, int]] = []
    # Of those that run at some time, long answers are the more the longer they are, and any part of one may be left.
    whole = rng.choice(spread, running, p=spread / spread.sum())
    left = whole * rng.permutation((np.arange(running) + 0.5) / running)
    for k in range(running):
        # The prompts of those behind it take as many iterations, each a token of it.
        answer = int(left[k] + (running - 1 - k) * costs.chunks) + 2
        requests.append((k * costs.prompt_s / 2, max(1, tokens - answer), answer))
    filled = costs.fill_s(running)
    begin, end = filled + settle, filled + settle + seconds
    count = max(1, round(rate * (end - filled)))
    lengths = rng.permutation(answers(tokens, count).astype(int))
    for at, answer in zip(np.sort(rng.uniform(filled, end, count)), lengths, strict=True):
        requests.append((float(at), tokens - int(answer), int(answer)))
    return Share(share, rate, running, filled, begin, end, requests)
