"""Defines `Workload`, the requests of a run and their times, determined by the options and the seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from weft.loadgen import arrivals
from weft.loadgen.arrivals import Process, Times
from weft.loadgen.errors import LoadError
from weft.loadgen.lengths import Counts, Lengths
from weft.loadgen.prompts import Content, PromptMaker
from weft.loadgen.traces import Trace

POOL = 1 << 16
"""Lengths drawn for a run with an unknown number of requests; they repeat after that."""
LENGTH_STEP = 7919  # Step in the lengths between a conversation's turns.

INPUT, OUTPUT, ONE = Lengths("constant", 256), Lengths("constant", 128), Lengths("constant", 1)
"""Default lengths."""


@dataclass(frozen=True, slots=True)
class ArrivalOptions:
    """`rate`: requests (or conversations) per second. `users`: concurrent users of a `closed` loop."""

    process: Process = "poisson"
    rate: float | None = 1.0
    end_rate: float = 1.0
    burstiness: float = 1.0
    users: int = 1
    speed: float = 1.0
    duration: float | None = None
    count: int | None = None


@dataclass(frozen=True, slots=True)
class ContentOptions:
    """Source of prompts and lengths: the first one set of `trace`, `prompts`, `pairs`, `input`/`output`."""

    input: Lengths = INPUT
    output: Lengths = OUTPUT
    pairs: Counts | None = None
    prompts: tuple[tuple[Content, int | None], ...] = ()
    trace: Trace | None = None
    turns: Lengths = ONE  # Requests per conversation.
    think: float = 0.0  # Mean seconds between an answer and the user's next request; exponential.
    context: int = 0
    """Extra tokens in a conversation's first prompt: an agent's instructions, tools and files."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request. `at`: seconds after the start; None if it follows an answer. `input_tokens`: 0 if unknown."""

    index: int
    at: float | None
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    content: Content | None = None


@dataclass
class Clipping:
    """Counts of requests and tokens cut to fit the server's context."""

    context: int = 0
    requests: int = 0
    of: int = 0
    tokens: int = 0
    of_tokens: int = 0


@dataclass(frozen=True)
class Workload:
    """`inputs`, `outputs`: `[n]` tokens; request i uses entry i modulo n. `times`: None for a closed loop."""

    times: Times | None
    inputs: Counts
    outputs: Counts
    turns: Counts
    options: ContentOptions
    maker: PromptMaker
    users: int = 0
    count: int | None = None
    duration: float | None = None
    clipping: Clipping = field(default_factory=Clipping)

    @property
    def is_conversation(self) -> bool:
        return self.options.turns != ONE

    def __len__(self) -> int:
        """Return the number of arrivals of an open loop."""
        return 0 if self.times is None else len(self.times)

    def planned(self, index: int) -> Planned:
        """Return request (or conversation) `index`."""
        i = index % len(self.inputs)
        at = None if self.times is None else float(self.times[index])
        planned = Planned(index, at, int(self.inputs[i]), int(self.outputs[i]))
        trace, prompts = self.options.trace, self.options.prompts
        if trace is not None:
            row = trace.rows[index % len(trace.rows)]
            return replace(planned, hash_ids=row.hash_ids, content=row.content)
        return replace(planned, content=prompts[index % len(prompts)][0]) if prompts else planned

    def turn(self, first: int, turn: int) -> tuple[int, int]:
        """Return the new prompt tokens and the output tokens of a turn; each turn has separate lengths."""
        i = (first + turn * LENGTH_STEP) % len(self.inputs)
        return int(self.inputs[i]) + (0 if turn else self.options.context), int(self.outputs[i])

    def share(self, part: int, parts: int) -> range:
        """Return the indices of arrivals that process `part` of `parts` sends, in order."""
        return range(part, len(self), parts)

    def content(self, planned: Planned) -> Content:
        """Return the prompt of a request that does not depend on earlier answers."""
        return self.maker.with_images(planned.index, self._text(planned))

    def _text(self, planned: Planned) -> Content:
        if planned.content is not None:
            return planned.content
        if planned.hash_ids and self.options.trace is not None:
            block = self.options.trace.block
            return self.maker.from_blocks(planned.index, planned.hash_ids, block, planned.input_tokens)
        return self.maker.prompt(planned.index, planned.input_tokens)

    def think(self, session: int, turn: int) -> float:
        """Return the seconds a user waits before this turn."""
        mean = self.options.think
        return float(np.random.default_rng((self.maker.seed, 9, session, turn)).exponential(mean)) if mean else 0.0

    def offered_rate(self) -> float | None:
        """Return scheduled arrivals per second; None for a closed loop, or if all arrive at once."""
        if self.times is None or not len(self.times):
            return None
        if self.duration is not None and len(self.times) != self.count:
            return len(self.times) / self.duration
        # The last arrival ends the schedule: one gap per arrival, less one if the first arrival is at the start.
        first, last = float(self.times[0]), float(self.times[-1])
        return (len(self.times) - (first == 0.0)) / last if last else None


def build(arrival: ArrivalOptions, content: ContentOptions, maker: PromptMaker, context: int | None) -> Workload:
    """Draw a workload whose requests are cut to the server's `context`. Raises `LoadError` if it has no request."""
    rng_times, rng_lengths, rng_turns = (np.random.default_rng((maker.seed, 8, part)) for part in range(3))
    trace, duration, count = content.trace, arrival.duration, arrival.count
    times: Times | None
    if arrival.process == "closed":
        times = None
    elif trace is not None:
        times = arrivals.replay(trace.times, speed=arrival.speed, rate=arrival.rate, duration=duration, count=count)
    elif arrival.process == "ramp":
        assert arrival.rate is not None
        assert duration is not None
        times = arrivals.ramp(arrival.rate, arrival.end_rate, duration, rng_times)[:count]
    else:
        assert arrival.rate is not None
        times = arrivals.renewal(
            arrival.process, arrival.rate, rng_times, duration=duration, count=count, burstiness=arrival.burstiness
        )
    if times is not None and not len(times):
        raise LoadError("no request arrives in this time; increase --duration or --rate")
    n = len(times) if times is not None else (count or POOL)
    inputs, outputs = _lengths(content, n, rng_lengths)
    clipping = Clipping()
    if context is not None:
        inputs, outputs, clipping = clip(inputs, outputs, context)
    turns, users = content.turns.draw(rng_turns, n), arrival.users if times is None else 0
    return Workload(times, inputs, outputs, turns, content, maker, users, count, duration, clipping)


def _lengths(content: ContentOptions, n: int, rng: np.random.Generator) -> tuple[Counts, Counts]:
    if content.trace is not None:
        rows = content.trace.rows[:n]
        inputs = np.array([0 if row.content is not None else row.input_tokens for row in rows])
        return inputs, np.array([row.output_tokens for row in rows])
    if content.prompts:
        drawn = content.output.draw(rng, n)
        given = [content.prompts[i % len(content.prompts)][1] for i in range(n)]
        return np.zeros(n, np.int64), np.array([d if g is None else g for g, d in zip(given, drawn, strict=True)])
    if content.pairs is not None:
        chosen = content.pairs[rng.integers(len(content.pairs), size=n)]
        return chosen[:, 0], chosen[:, 1]
    return content.input.draw(rng, n), content.output.draw(rng, n)


def clip(inputs: Counts, outputs: Counts, context: int) -> tuple[Counts, Counts, Clipping]:
    """Cut requests of more than `context` tokens: first the prompt, down to one token, then the output."""
    new_outputs = np.minimum(outputs, context - 1)
    new_inputs = np.minimum(inputs, context - new_outputs)
    cut = (new_inputs < inputs) | (new_outputs < outputs)
    lost = int((inputs - new_inputs).sum() + (outputs - new_outputs).sum())
    clipping = Clipping(context, int(cut.sum()), len(inputs), lost, int(inputs.sum() + outputs.sum()))
    return new_inputs, new_outputs, clipping
