"""Defines `Run`, the results of one run against one server, and their summary."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from weft.loadgen.driver import Job
from weft.loadgen.images import Images
from weft.loadgen.measures import STALLS, Measures
from weft.loadgen.preflight import Ready, settled
from weft.loadgen.processes import OnProgress, run_async, run_jobs
from weft.loadgen.server_view import ServerView, difference
from weft.loadgen.slo import Attainment, Objective, judge
from weft.loadgen.statistics import Distribution, Values, percentile
from weft.loadgen.workload import Clipping, Workload

MAX_LAG = 0.005  # Maximum p99 lateness, in seconds, of a generator that kept up.


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`warmup`: seconds at the start, with requests that are sent but excluded. `max_failures`: see `slo.judge`."""

    objectives: tuple[Objective, ...] = ()
    processes: int = 1
    warmup: float = 0.0
    drain: float | None = None
    max_failures: float = 0.01


@dataclass(frozen=True)
class Run:
    """Results of a run. `lags`: delay of the generators' event loops for every 5 ms of the run, in seconds."""

    name: str
    url: str
    model: str
    began: str
    rate: float | None
    users: int
    duration: float  # Seconds during which requests arrived.
    span: float  # Seconds from the first arrival to the last answer.
    everything: Measures
    measures: Measures  # Measures without the warm-up.
    lags: Values
    cpu_share: float  # Share of one core used by the busiest process.
    options: RunOptions
    clipping: Clipping
    view: ServerView | None = None
    notes: tuple[str, ...] = ()
    conversations: bool = False
    interrupted: bool = False
    images: Images | None = None  # Those of every request.

    @property
    def load(self) -> str:
        """Describe the offered load in words."""
        images = f" with {self.images} each" if self.images else ""
        if self.rate is None:
            who = f"{self.users} users" if self.users else f"{len(self.everything.records)} requests at once"
            return who + images
        return f"{self.rate:.3g} {'conversations' if self.conversations else 'requests'}/s{images}"

    @cached_property
    def attainment(self) -> Attainment:
        judged_span = max(self.span - self.options.warmup, 1e-9)
        return judge(self.options.objectives, self.measures, judged_span, self.options.max_failures)

    @property
    def distributions(self) -> dict[str, Distribution]:
        return self.measures.distributions

    @cached_property
    def lateness_p99(self) -> float:
        return percentile(self.everything.lateness, 99)

    @cached_property
    def lag_p99(self) -> float:
        return percentile(self.lags, 99)

    @property
    def _worst_lateness(self) -> float:
        return float(np.nanmax([self.lateness_p99, self.lag_p99, 0.0]))

    @property
    def kept_up(self) -> bool:
        """Whether the generator's lateness is small enough to trust the results."""
        return self._worst_lateness <= MAX_LAG

    @property
    def lateness_matters(self) -> bool:
        """Whether that lateness exceeds a tenth of the smallest objective."""
        return self._worst_lateness > min((o.limit for o in self.options.objectives), default=np.inf) / 10

    def throughput(self) -> dict[str, float]:
        """Return answered requests, output and prompt tokens per second over the run, including the drain."""
        requests, span = self.everything, max(self.span, 1e-9)
        prompts = sum(r.prompt_tokens if r.prompt_tokens >= 0 else r.input_tokens for r in requests.records if r.ok)
        return {
            "requests_per_second": int(requests.ok.sum()) / span,
            "output_tokens_per_second": float(requests.tokens.sum()) / span,
            "prompt_tokens_per_second": prompts / span,
        }

    def tokens(self) -> dict[str, int]:
        """Return tokens requested and received by answered requests; the server counts prompt tokens."""
        answered = [r for r in self.everything.records if r.ok]
        return {
            "prompt_asked": sum(r.input_tokens for r in answered),
            "prompt_received": sum(max(r.prompt_tokens, 0) for r in answered),
            "output_asked": sum(r.output_tokens for r in answered),
            "output_received": sum(r.received_tokens for r in answered),
            "prompt_cached": sum(max(r.cached_tokens, 0) for r in answered),
            "events": sum(len(r.times) for r in answered),
        }

    def energy(self) -> dict[str, float] | None:
        """Return the energy of the server's devices between the two snapshots, including idle time, and the same per
        answered request and per token; None: not counted."""
        view = self.view
        if view is None or view.joules is None or view.seconds <= 0:
            return None
        answered, tokens = int(self.everything.ok.sum()), self.tokens()
        output, prompt = tokens["output_received"], tokens["prompt_received"]
        out = {"joules": view.joules, "watts": view.joules / view.seconds}
        for name, n in (("request", answered), ("output_token", output), ("token", output + prompt)):
            out[f"joules_per_{name}"] = view.joules / n if n else float("nan")
        return out

    def stalls(self) -> str:
        """Describe how many requests stalled; "" if none was answered."""
        if not self.measures.ok.any():
            return ""
        parts = [f"{self.measures.stalled(limit):.1%} over {limit * 1e3:g} ms" for limit in STALLS]
        return f"requests with a stall: {', '.join(parts)}"

    def warnings(self) -> list[str]:
        """Return warnings about the validity of the results."""
        out = []
        if not self.kept_up:
            out.append(
                f"The generator could not keep up: its p99 lateness was {self.lateness_p99 * 1e3:.1f} ms when "
                f"sending and {self.lag_p99 * 1e3:.1f} ms when receiving (allowed: {MAX_LAG * 1e3:g} ms). "
                "Latencies are overstated by as much. Use --processes or a separate machine."
            )
        if self.clipping.requests:
            c = self.clipping
            out.append(
                f"{c.requests} of {c.of} requests were longer than the server's context of {c.context} tokens and were "
                f"cut ({c.tokens / c.of_tokens:.1%} of all requested tokens)."
            )
        tokens = self.tokens()
        if tokens["output_received"] < 0.99 * tokens["output_asked"]:
            out.append(
                f"Answers had {tokens['output_received']} of {tokens['output_asked']} requested tokens: "
                "the server ended them early, so the load was lighter than planned."
            )
        if self.interrupted:
            out.append("The run was interrupted.")
        return out + list(self.notes)

    def summary(self) -> dict[str, Any]:
        """Return the summary for JSON, with times in seconds."""
        measures = self.measures
        out: dict[str, Any] = {
            "server": self.name,
            "url": self.url,
            "model": self.model,
            "began": self.began,
            "offered_rate": self.rate,
            "users": self.users or None,
            "conversations": self.conversations,
            "images_per_request": self.images.count if self.images else 0,
            "duration": self.duration,
            "span": self.span,
            "requests": len(measures.records),
            "outcomes": measures.outcomes(),
            "errors": dict(Counter(record.error for record in measures.records if record.error).most_common(10)),
            "latency": {name: asdict(distribution) for name, distribution in self.distributions.items()},
            "stalled_requests": {f"over_{limit * 1e3:g}ms": measures.stalled(limit) for limit in STALLS},
            "throughput": self.throughput(),
            "tokens": self.tokens(),
            "generator": {
                "kept_up": self.kept_up,
                "send_lateness_p99": self.lateness_p99,
                "loop_lag_p99": self.lag_p99,
                "loop_lag_max": float(self.lags.max()) if len(self.lags) else 0.0,
                "cpu_share": self.cpu_share,
                "processes": self.options.processes,
            },
            "warnings": self.warnings(),
        }
        if self.options.objectives:
            a = self.attainment
            out["slo"] = {
                "met": a.met,
                "attainment": a.share,
                "attainment_interval": a.interval,
                "good_requests": a.good,
                "goodput": a.goodput,
                "objectives": [
                    {"objective": str(v.objective), "value": v.value, "met": v.met, "attainment": v.attainment}
                    for v in a.verdicts
                ],
            }
        if self.view is not None:
            out["energy"] = self.energy()
            out["server_view"] = {"means": self.view.means, "counts": self.view.counts, "totals": self.view.totals}
        return out


def execute(ready: Ready, workload: Workload, options: RunOptions, on_progress: OnProgress | None = None) -> Run:
    """Run a workload, with snapshots of the server's counters before and after it."""
    before = run_async(partial(settled, ready.target))
    snapshot_time = time.perf_counter()
    began = time.strftime("%Y-%m-%d %H:%M:%S%z")
    jobs = [
        Job(workload, ready.target, 0.0, part, options.processes, options.drain, ready.context)
        for part in range(options.processes)
    ]
    outcomes = run_jobs(jobs, on_progress)
    after = run_async(partial(settled, ready.target))
    between = time.perf_counter() - snapshot_time
    view = difference(before, after, between) if before is not None and after is not None else None
    records = sorted((r for o in outcomes for r in o.records), key=lambda r: (r.due, r.index))
    span = max(o.ended for o in outcomes)
    duration = workload.duration
    if duration is None:
        duration = span if workload.times is None else float(workload.times[-1])
    notes = list(ready.notes)
    if cut := sum(o.conversations_cut for o in outcomes):
        notes.append(f"{cut} conversations ended early, because their next turn would have exceeded the context.")
    return Run(
        ready.target.name,
        str(ready.target.address),
        ready.target.model,
        began,
        workload.offered_rate(),
        workload.users,
        duration,
        span,
        Measures(records),
        Measures([record for record in records if record.due >= options.warmup]),
        np.concatenate([np.asarray(o.lags) for o in outcomes]),
        max(o.cpu_seconds / max(o.ended, 1e-9) for o in outcomes),
        options,
        workload.clipping,
        view,
        tuple(notes),
        workload.is_conversation,
        any(o.interrupted for o in outcomes),
        workload.maker.images,
    )
