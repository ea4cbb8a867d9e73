"""Simulates a fleet under a load until its last answer; the result depends only on the arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from weft.deploy.fleet.clock import Clock, Processor, Sharing, Slowdown
from weft.deploy.fleet.engine import EngineOptions
from weft.deploy.fleet.front import Front, FrontOptions
from weft.deploy.fleet.profile import IterationProfile
from weft.deploy.fleet.traffic import Traffic
from weft.loadgen.measures import Measures
from weft.loadgen.slo import Attainment, Objective, judge
from weft.loadgen.statistics import Distribution
from weft.loadgen.workload import Workload


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine ends `at` seconds after the start; its replacement is ready `away` seconds later."""

    engine: int
    at: float
    away: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet. `cores`: cores shared by all engines; None: each has a separate device."""

    profile: IterationProfile
    engine: EngineOptions
    front: FrontOptions
    cores: float | None = None
    failures: tuple[Failure, ...] = ()

    @property
    def engines(self) -> int:
        return self.front.engines

    @property
    def sharing(self) -> Sharing | None:
        """Recorded slowdowns for this number of cores, or else equal shares."""
        if self.cores is None:
            return None
        equal = Slowdown(self.cores, max(1, self.profile.threads))
        known = self.profile.side_by_side
        if known is None or known.cores != self.cores:
            return Sharing(equal, equal)
        return Sharing(
            equal._replace(known=known.decodes, spread=known.decodes_spread),
            equal._replace(known=known.prompts, spread=known.prompts_spread),
        )


@dataclass(frozen=True)
class Result:
    """Results of a simulation. `judged`: measures without the warm-up."""

    fleet: Fleet
    everything: Measures
    judged: Measures
    objectives: tuple[Objective, ...]
    warmup: float
    max_failures: float
    offered_rate: float | None
    computed_tokens: tuple[int, ...]  # Computed tokens by engine.
    busy: tuple[float, ...]  # Seconds of iterations by engine.
    iterations: int
    preemptions: int
    retried: int
    prompt_tokens: int
    cached_tokens: int
    work_joules: float | None

    @cached_property
    def span(self) -> float:
        """Seconds from the start to the last answer."""
        ends = self.everything.end
        return float(ends[ends == ends].max(initial=1e-9))

    @cached_property
    def attainment(self) -> Attainment:
        return judge(self.objectives, self.judged, max(self.span - self.warmup, 1e-9), self.max_failures)

    @property
    def distributions(self) -> dict[str, Distribution]:
        return self.judged.distributions

    @property
    def joules(self) -> float | None:
        """Energy of all devices until the last answer, including idle time."""
        energy = self.fleet.profile.energy
        if self.work_joules is None or energy is None:
            return None
        return self.work_joules + energy.idle_watts * self.fleet.engines * self.span

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens found in a prefix index."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Tokens computed by the busiest engine / the mean of all."""
        total = sum(self.computed_tokens)
        return max(self.computed_tokens) * len(self.computed_tokens) / total if total else 1.0

    @cached_property
    def by_key(self) -> list[Measures]:
        """The judged requests of each API key."""
        keys = self.fleet.front.keys
        return [Measures([r for r in self.judged.records if keys.key(r.index) == key]) for key in range(keys.count)]

    def _of_key(self, key: int) -> dict[str, Any]:
        measures = self.by_key[key]
        latency = {name: asdict(distribution) for name, distribution in measures.distributions.items()}
        return {"requests": len(measures.records), "outcomes": measures.outcomes(), "latency": latency}

    def throughput(self) -> dict[str, float]:
        """Return rates per second of answered requests over the run, as in `weft load`."""
        answered = [r for r in self.everything.records if r.ok]
        return {
            "requests_per_second": len(answered) / self.span,
            "output_tokens_per_second": sum(r.received_tokens for r in answered) / self.span,
            "prompt_tokens_per_second": sum(r.prompt_tokens for r in answered) / self.span,
        }

    def summary(self) -> dict[str, Any]:
        """Return the summary for JSON, with times in seconds."""
        engine, attainment = self.fleet.engine, self.attainment
        joules, tokens = self.joules, sum(r.received_tokens for r in self.everything.records if r.ok)
        return {
            "engines": self.fleet.engines,
            "max_num_seqs": engine.max_num_seqs,
            "adapts_to": [str(objective) for objective in engine.keeps],
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "offered_rate": self.offered_rate,
            "requests": len(self.judged.records),
            "outcomes": self.judged.outcomes(),
            "span": self.span,
            "latency": {name: asdict(distribution) for name, distribution in self.distributions.items()},
            "throughput": self.throughput(),
            "slo": {
                "met": attainment.met,
                "attainment": attainment.share,
                "goodput": attainment.goodput,
                "objectives": [
                    {"objective": str(v.objective), "value": v.value, "met": v.met} for v in attainment.verdicts
                ],
            },
            **({"keys": [self._of_key(key) for key in range(len(self.by_key))]} if len(self.by_key) > 1 else {}),
            "prefix_hit_share": self.hit_share,
            "imbalance": self.imbalance,
            "busy_share": [b / self.span for b in self.busy],
            "iterations": self.iterations,
            "preemptions": self.preemptions,
            "retried": self.retried,
            "joules": joules,
            "joules_per_output_token": joules / tokens if joules is not None and tokens else None,
        }


def simulate(
    fleet: Fleet, workload: Workload, objectives: Sequence[Objective] = (), *,
    warmup: float = 0.0, max_failures: float = 0.01, on_progress: Callable[[float], None] | None = None,
) -> Result:  # fmt: skip
    """Run a simulation. `on_progress` occasionally gets the simulated time."""
    clock = Clock()
    seed = workload.maker.seed
    processor = Processor(clock, fleet.sharing, seed)
    front = Front(clock, processor, fleet.profile, fleet.engine, fleet.front, seed)
    traffic = Traffic(clock, front, workload, fleet.engine.max_model_len)
    for failure in fleet.failures:
        clock.at(failure.at, lambda number=failure.engine: front.kill(number))  # type: ignore[misc]
        clock.at(failure.at + failure.away, lambda number=failure.engine: front.restart(number))  # type: ignore[misc]
    traffic.begin()
    clock.run(on_progress)
    records = sorted(traffic.records, key=lambda r: (r.due, r.index))
    computed, busy = [0] * fleet.engines, [0.0] * fleet.engines
    for number, engine in front.all_engines:
        computed[number] += engine.device.computed_tokens
        busy[number] += engine.device.busy_seconds
    schedulers = [engine.scheduler for _, engine in front.all_engines]
    metered = fleet.profile.energy is not None
    return Result(
        fleet,
        Measures(records),
        Measures([r for r in records if r.due >= warmup]),
        tuple(objectives),
        warmup,
        max_failures,
        workload.offered_rate(),
        tuple(computed),
        tuple(busy),
        sum(engine.loop.totals.iterations for _, engine in front.all_engines),
        sum(s.preemptions for s in schedulers),
        front.retried,
        sum(r.prompt_tokens for r in records if r.ok),
        sum(max(r.cached_tokens, 0) for r in records if r.ok),
        sum(engine.device.joules for _, engine in front.all_engines) if metered else None,
    )
