"""`Workload`: which requests a run makes, and when; a function of the options and the seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from weft.loadgen import arrivals
from weft.loadgen.arrivals import Process, Times
from weft.loadgen.errors import LoadError
from weft.loadgen.lengths import Counts, Lengths
from weft.loadgen.prompts import Content, PromptMaker
from weft.loadgen.traces import Trace

POOL = 1 << 16
"""lengths drawn for a run that does not know how many requests it will make; then they repeat"""
LENGTH_STEP = 7919
"""between the lengths of a conversation's turns"""


INPUT, OUTPUT, ONE = Lengths("constant", 256), Lengths("constant", 128), Lengths("constant", 1)
"""defaults"""


@dataclass(frozen=True, slots=True)
class ArrivalOptions:
    """`rate`: requests (or conversations) per second. `users`, with `closed`: how many are active at any time."""

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
    """Where prompts and lengths come from: the first that is set of `trace`, `prompts`, `pairs`, `input`/`output`."""

    input: Lengths = INPUT
    output: Lengths = OUTPUT
    pairs: Counts | None = None
    prompts: tuple[tuple[Content, int | None], ...] = ()
    trace: Trace | None = None
    turns: Lengths = ONE
    """requests per conversation"""
    think: float = 0.0
    """mean seconds between an answer and the user's next request; exponential"""
    context: int = 0
    """tokens that the first prompt of a conversation has beside: an agent's instructions, tools and files"""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. `at`: seconds after the start, None where it follows an answer. `input_tokens` 0: not known."""

    index: int
    at: float | None
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    content: Content | None = None


@dataclass
class Clipping:
    """What had to be cut for requests to fit the server's context."""

    context: int = 0
    requests: int = 0
    of: int = 0
    tokens: int = 0
    of_tokens: int = 0


@dataclass(frozen=True)
class Workload:
    """`inputs`, `outputs`: `[n]` tokens; request i has number i modulo n. `times`: None for a closed loop."""

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
        """Arrivals of an open loop."""
        return 0 if self.times is None else len(self.times)

    def planned(self, index: int) -> Planned:
        """Request (or conversation) `index`."""
        i = index % len(self.inputs)
        at = None if self.times is None else float(self.times[index])
        trace, prompts = self.options.trace, self.options.prompts
        hash_ids: tuple[int, ...] = ()
        content: Content | None = None
        if trace is not None:
            row = trace.rows[index % len(trace.rows)]
            hash_ids, content = row.hash_ids, row.content
        elif prompts:
            content = prompts[index % len(prompts)][0]
        return Planned(index, at, int(self.inputs[i]), int(self.outputs[i]), hash_ids, content)

    def turn(self, first: int, turn: int) -> tuple[int, int]:
        """New prompt tokens and output tokens of a turn of conversation `first`: lengths of its own for every turn."""
        i = (first + turn * LENGTH_STEP) % len(self.inputs)
        return int(self.inputs[i]) + (0 if turn else self.options.context), int(self.outputs[i])

    def share(self, part: int, parts: int) -> Iterator[int]:
        """The arrivals that process `part` of `parts` sends, in order."""
        return iter(range(part, len(self), parts))

    def content(self, planned: Planned) -> Content:
        """The prompt of a request that does not depend on earlier answers."""
        if planned.content is not None:
            return planned.content
        if planned.hash_ids and self.options.trace is not None:
            block = self.options.trace.block
            return self.maker.from_blocks(planned.index, planned.hash_ids, block, planned.input_tokens)
        return self.maker.prompt(planned.index, planned.input_tokens)

    def think(self, session: int, turn: int) -> float:
        """Seconds a user waits before this turn."""
        mean = self.options.think
        return float(np.random.default_rng((self.maker.seed, 9, session, turn)).exponential(mean)) if mean else 0.0

    def offered_rate(self) -> float | None:
        """Arrivals per second as scheduled; None for a closed loop, and where all arrive at once."""
        if self.times is None or not len(self.times):
            return None
        if self.duration is not None and len(self.times) != self.count:
            return len(self.times) / self.duration
        # The last arrival ends the schedule: as many gaps as arrivals, less one where the first arrival is its begin.
        first, last = float(self.times[0]), float(self.times[-1])
        return (len(self.times) - (first == 0.0)) / last if last else None


def build(arrival: ArrivalOptions, content: ContentOptions, maker: PromptMaker, context: int | None) -> Workload:
    """Draw a workload. `context`: the server's limit on prompt and output together; longer requests are cut to it.

    Raises `LoadError` when the options give no request.
    """
    rng_times, rng_lengths, rng_turns = (np.random.default_rng((maker.seed, 8, part)) for part in range(3))
    trace = content.trace
    times: Times | None
    if arrival.process == "closed":
        times = None
    elif trace is not None:
        times = arrivals.replay(
            trace.times, speed=arrival.speed, rate=arrival.rate, duration=arrival.duration, count=arrival.count
        )
    elif arrival.process == "ramp":
        assert arrival.rate is not None
        assert arrival.duration is not None
        times = arrivals.ramp(arrival.rate, arrival.end_rate, arrival.duration, rng_times)[: arrival.count]
    else:
        assert arrival.rate is not None
        times = arrivals.renewal(
            arrival.process,
            arrival.rate,
            rng_times,
            duration=arrival.duration,
            count=arrival.count,
            burstiness=arrival.burstiness,
        )
    if times is not None and not len(times):
        raise LoadError("no request arrives in this time; make --duration or --rate larger")
    n = len(times) if times is not None else (arrival.count or POOL)
    inputs, outputs = _lengths(content, n, rng_lengths)
    clipping = Clipping()
    if context is not None:
        inputs, outputs, clipping = clip(inputs, outputs, context)
    return Workload(
        times,
        inputs,
        outputs,
        content.turns.draw(rng_turns, n),
        content,
        maker,
        users=arrival.users if times is None else 0,
        count=arrival.count,
        duration=arrival.duration,
        clipping=clipping,
    )


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
    """Cut requests of more than `context` tokens: the prompt first, down to one token, then the output."""
    new_outputs = np.minimum(outputs, context - 1)
    new_inputs = np.minimum(inputs, context - new_outputs)
    cut = (new_inputs < inputs) | (new_outputs < outputs)
    lost = int((inputs - new_inputs).sum() + (outputs - new_outputs).sum())
    clipping = Clipping(context, int(cut.sum()), len(inputs), lost, int(inputs.sum() + outputs.sum()))
    return new_inputs, new_outputs, clipping
