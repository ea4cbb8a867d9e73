"""Converts flags of `weft fleet` to checked settings; every error names the flag to change."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from weft.deploy.fleet.engine import EngineOptions
from weft.deploy.fleet.front import FrontOptions, Keys
from weft.deploy.fleet.profile import IterationProfile, load_profile
from weft.deploy.fleet.simulation import Failure, Fleet
from weft.engine import config as serving
from weft.engine.errors import ConfigError
from weft.loadgen import slo
from weft.loadgen.errors import LoadError
from weft.loadgen.lengths import LONGEST
from weft.loadgen.prompts import PromptMaker
from weft.loadgen.settings import fraction, optional, read_arrival, read_content, read_maker
from weft.loadgen.slo import Objective
from weft.loadgen.units import number, seconds, whole
from weft.loadgen.workload import ArrivalOptions, ContentOptions, Workload, build

MAX_ENGINES, MAX_PAGES, MAX_SEQS = 4096, 2**22, 65_536
MAX_POINTS = 1000
MAX_KEYS, MAX_SHARE = 256, 10_000


@dataclass(frozen=True)
class Settings:
    """Settings. `engines`: empty to find the fewest. `rates`: None if the arrivals determine the rate."""

    profile: IterationProfile
    engines: tuple[int, ...]
    max_engines: int
    rates: tuple[float | None, ...]
    configurations: tuple[EngineOptions, ...]
    front: FrontOptions
    cores: float | None
    failures: tuple[Failure, ...]
    arrival: ArrivalOptions
    content: ContentOptions
    maker: PromptMaker
    objectives: tuple[Objective, ...]
    max_failures: float
    warmup: float
    json: Path | None
    png: Path | None
    quiet: bool

    def fleet(self, engines: int, configuration: EngineOptions) -> Fleet:
        front = replace(self.front, engines=engines)
        return Fleet(self.profile, configuration, front, self.cores, self.failures)

    def workload(self, rate: float | None) -> Workload:
        """Build the workload. Raises `LoadError`."""
        arrival = self.arrival if rate is None else replace(self.arrival, rate=rate)
        return build(arrival, self.content, self.maker, self.configurations[0].max_model_len)


def read(a: argparse.Namespace) -> Settings:
    """Convert parsed flags. Raises `LoadError` and `ConfigError`."""
    profile = load_profile(a.profile)
    content = read_content(a)
    if content.prompts or any(row.content is not None for row in (content.trace.rows if content.trace else ())):
        raise LoadError("a simulation has no tokenizer; use lengths instead of --prompts-file or traces with texts")
    if a.prompts == "words":
        raise LoadError("--prompts words: a simulation generates token ids; omit it")
    arrival = read_arrival(a, traced=content.trace is not None)
    rates: tuple[float | None, ...] = (None,)
    if a.rates is not None:
        if arrival.process in ("closed", "ramp") or a.rate is not None or a.speed is not None:
            raise LoadError("--rates does not work with --rate, --speed, closed or ramp arrivals")
        rates = tuple(number(part, "--rates", exclusive=True) for part in a.rates.split(","))
    objectives = tuple(objective for text in a.slo for objective in slo.parse(text))
    keeps = tuple(serving.Objective.parse(str(o)) for o in objectives if o.measure == "itl")
    engines = optional(a.engines, "--engines", _list, () if objectives else (1,), most=MAX_ENGINES)
    if not engines and arrival.process == "closed":
        raise LoadError(
            "a closed loop has no minimum number of engines, because it slows down with them; set --engines"
        )
    failures = tuple(_failure(text) for text in a.fail)
    if failures and (not engines or max(f.engine for f in failures) >= min(engines)):
        raise LoadError("--fail: set --engines, and name an existing engine, starting at 0")
    down_until: dict[int, float] = {}
    for failure in sorted(failures, key=lambda f: f.at):
        if failure.at <= down_until.get(failure.engine, -1.0):
            raise LoadError(f"--fail: engine {failure.engine} is still down at {failure.at:g}s")
        down_until[failure.engine] = failure.at + failure.away
    shares = optional(a.keys, "--keys", _list, (1,), most=MAX_SHARE)
    if len(shares) > MAX_KEYS:
        raise LoadError(f"--keys names {len(shares)} keys; the most is {MAX_KEYS}")
    front = FrontOptions(1, not a.eos, keys=Keys.of(shares, arrival.users if arrival.process == "closed" else 0))
    queued = optional(a.max_queued_requests, "--max-queued-requests", whole, front.max_queued_requests, low=0)
    queued_tokens = optional(a.max_queued_tokens, "--max-queued-tokens", whole, front.max_queued_tokens)
    configurations = tuple(_configurations(a, profile, keeps))
    if (points := len(rates) * len(configurations) * max(1, len(engines))) > MAX_POINTS:
        raise LoadError(f"the lists have {points} combinations to simulate; the most is {MAX_POINTS}")
    recorded_cores = None if profile.side_by_side is None else profile.side_by_side.cores
    return Settings(
        profile,
        engines,
        whole(a.max_engines, "--max-engines", most=MAX_ENGINES),
        rates,
        configurations,
        replace(front, max_queued_requests=queued, max_queued_tokens=queued_tokens),
        optional(a.cores, "--cores", number, recorded_cores, exclusive=True),
        failures,
        arrival,
        content,
        read_maker(a, "ids"),
        objectives,
        fraction(a.max_failures, "--max-failures"),
        seconds(a.warmup, "--warmup"),
        a.json,
        a.png,
        a.quiet,
    )


def _list(text: str, option: str, *, most: int) -> tuple[int, ...]:
    return tuple(whole(part, option, most=most) for part in text.split(","))


def _configurations(
    a: argparse.Namespace, profile: IterationProfile, keeps: tuple[serving.Objective, ...]
) -> Iterator[EngineOptions]:
    """Yield configurations. `keeps`: objectives of an adaptive sequence limit."""
    limits = profile.limits
    pages = optional(a.num_pages, "--num-pages", whole, limits.num_pages, low=2, most=MAX_PAGES)
    longest = optional(a.max_model_len, "--max-model-len", whole, limits.max_model_len, low=2, most=LONGEST)
    reserved = 3 * limits.state_pages  # as `StateLayout.reserved`
    if pages < 2 + reserved:
        raise LoadError(f"--num-pages {pages}: recurrent states need at least {2 + reserved}")
    longest = min(longest, (pages - 1 - reserved) * limits.page_size)
    seqs = [_seqs(part, limits.max_num_seqs) for part in (a.max_num_seqs or str(limits.max_num_seqs)).split(",")]
    if any(adapts for _, adapts in seqs) and not keeps:
        raise LoadError("--max-num-seqs auto needs an objective on inter-token latency, such as --slo itl:p99:50ms")
    budgets = _list(
        a.max_num_batched_tokens or str(limits.max_num_batched_tokens), "--max-num-batched-tokens", most=LONGEST
    )
    try:
        objective = None if a.itl_slo is None else serving.itl_objective(a.itl_slo)
    except ConfigError as error:
        raise LoadError(f"--itl-slo: {error}") from None
    shortest = min(serving.kept_percentiles(keeps), key=lambda o: o.limit, default=None)
    for (most, adapts), budget in product(seqs, budgets):
        yield EngineOptions(
            limits.page_size, pages, most, budget, longest, prefix_caching=not a.no_prefix_caching,
            itl_slo=objective or (shortest if adapts else None), keeps=keeps if adapts else (),
            state_pages=limits.state_pages, chunk_step=limits.chunk_step,
        )  # fmt: skip


def _seqs(text: str, most: int) -> tuple[int, bool]:
    """Parse a sequence limit, and whether it adapts up to that number."""
    word, _, limit = text.partition(":")
    if word != "auto":
        return whole(text, "--max-num-seqs", most=MAX_SEQS), False
    return whole(limit, "--max-num-seqs auto", most=MAX_SEQS) if limit else most, True


def _failure(text: str) -> Failure:
    parts = text.split(":")
    if len(parts) != 3 or not parts[0].isdecimal():
        raise LoadError(f"--fail: {text!r} is not ENGINE:AT:FOR, such as 0:30s:20s")
    return Failure(int(parts[0]), seconds(parts[1], "--fail"), seconds(parts[2], "--fail"))
