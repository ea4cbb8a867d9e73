"""Compares the simulator with a real daemon of three engines on this CPU: the same requests at the same times.

    python tests/fleet/compare_real.py               # the demo model: needs an idle machine
    python tests/fleet/compare_real.py --paced       # engines that sleep for a profile's time: any machine

It records a profile, measures the overhead around the engines, runs `weft load` and `weft fleet` with the same flags
several times, and prints the results of both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "server"))

from live import running  # noqa: E402

from weft.deploy.fleet.profile import IterationProfile, Limits  # noqa: E402
from weft.engine.config import EngineConfig  # noqa: E402
from weft.engine.engine import Engine  # noqa: E402
from weft.tools.fleet.overhead import Observations, Overhead, derive, measure, together, watch  # noqa: E402
from weft.tools.fleet.record import WARM_UP, Recorder, fitted, levels, limits_of  # noqa: E402

ENGINES = 3
BOUND = 0.10
BUSY = 1.0
"""load average that means other work is running"""
LIMITS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--num-pages", "400", "--page-size", "16")
REAL_LOAD = ("--input", "uniform:32:192", "--output", "uniform:16:96", "--duration", "20")
RATES = (2.0,)
"""requests a second, of rounds run in sequence"""
ROUNDS = 8
LEVEL_SECONDS = 0.8
WATCH_SECONDS = 1.5
PACED_LOAD = ("--input", "uniform:32:192", "--output", "uniform:8:32", "--rate", "3", "--duration", "25")
CONVERSATIONS = ("--input", "uniform:32:96", "--output", "uniform:8:24", "--turns", "uniform:2:4", "--think", "2s",
                 "--rate", "1", "--duration", "20")  # fmt: skip
TALKS = ("--input", "uniform:40:120", "--output", "uniform:10:30", "--turns", "uniform:3:6", "--think", "2s",
         "--rate", "2.5", "--duration", "30")  # fmt: skip
PACED = IterationProfile(
    model="made up, 100 ms and more an iteration",
    device="asleep",
    made="tests/fleet/compare_real.py",
    limits=Limits(page_size=16, num_pages=400, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=2048),
    knots=(1.0, 256.0),
    dense_ms=(100.0, 200.0),
    context_ms=0.01,
    pair_ms=0.0,
    chunk_ms=1.0,
    decode_ms=1.0,
)


class Figure(NamedTuple):
    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def weft(*arguments: str, ok: Sequence[int] = (0,)) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "weft.server", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode in ok, done.stdout + done.stderr
    return done.stdout


def loaded(url: str, load: Sequence[str], out: Path) -> Path:
    """The results of `weft load`."""
    weft("load", "--server", url, *load, "--quiet", "--json", str(out))
    return out


def simulated(profile: Path, load: Sequence[str], out: Path) -> Path:
    """The results of `weft fleet` for the same flags."""
    weft("fleet", "--profile", str(profile), "--engines", str(ENGINES), *load, "--quiet", "--json", str(out))
    return out


def compared(real: Path, simulated: Path) -> list[Figure]:
    """One run of each."""
    a, b = json.loads(real.read_text())["runs"][0], json.loads(simulated.read_text())["points"][0]
    assert a["outcomes"] == b["outcomes"], (a["outcomes"], b["outcomes"])
    figures = [
        Figure(f"{name} {what}, ms", 1e3 * a["latency"][name][what], 1e3 * b["latency"][name][what])
        for name, what in (("ttft", "mean"), ("ttft", "p50"), ("tpot", "mean"), ("tpot", "p50"), ("e2e", "mean"))
    ]
    key = "output_tokens_per_second"
    return [*figures, Figure("output tokens/s", a["throughput"][key], b["throughput"][key])]


BOUNDED = ("ttft mean, ms", "tpot mean, ms", "output tokens/s")


def show(title: str, figures: Sequence[Figure]) -> None:
    print(title)
    for figure in figures:
        print(
            f"  {figure.name:18} real {figure.measured:9.2f}   simulated {figure.simulated:9.2f}   {figure.error:+.1%}"
        )
    sys.stdout.flush()


def paced_env(profile: Path) -> dict[str, str]:
    """Environment of a daemon whose engines sleep for the profile's time."""
    path = os.pathsep.join([str(HERE / "paced"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "WEFT_TEST_PACE": str(profile)}


def paced(folder: Path, rounds: int) -> list[list[Figure]]:
    """Comparison with engines that sleep."""
    profile = folder / "paced.json"
    PACED.save(profile)
    found = []
    options = ("--device", "cpu", "--data-parallel-size", str(ENGINES), *LIMITS)
    with running(folder, *options, env=paced_env(profile)) as daemon:
        measure(daemon.url, PACED).put_into(PACED).save(profile)
        for i in range(rounds):
            for title, load in (("requests", PACED_LOAD), ("conversations", CONVERSATIONS)):
                flags = (*load, "--seed", str(i))
                real = loaded(daemon.url, flags, folder / "real.json")
                found.append(compared(real, simulated(profile, flags, folder / "simulated.json")))
                show(f"{title}, paced, round {i + 1}", found[-1])
    return found


def real(folder: Path, rounds: int, rates: Sequence[float] = RATES) -> list[list[Figure]]:
    """Comparison with the demo model.

    Every round records iterations for a while, watches the overhead around the engines, and sends the load. Then all
    rounds are simulated with one profile of all recordings, so that a machine that changes its speed affects both.
    """
    recording = Recording()
    seen: list[Observations] = []
    options = ("--device", "cpu", "--data-parallel-size", str(ENGINES), "--cpu-threads", "1", *LIMITS)
    loads = [(*REAL_LOAD, "--rate", f"{rates[i % len(rates)]:g}", "--seed", str(i)) for i in range(rounds)]
    with running(folder, *options) as daemon:
        for i, load in enumerate(loads):
            recording.go_on()
            seen.append(watch(daemon.url, recording.limits, shared=True, seconds=WATCH_SECONDS))
            loaded(daemon.url, load, folder / f"real-{i}.json")
            print(f"round {i + 1}: load average {os.getloadavg()[0]:.1f}", flush=True)
    (folder / "seen.json").write_bytes(msgspec.json.encode(seen))
    known = recording.profile()
    around, profile = derive(together(seen), known), folder / "profile.json"
    around.put_into(known).save(profile)
    print(describe(around))
    found = []
    for i, load in enumerate(loads):
        simulation = simulated(profile, load, folder / f"simulated-{i}.json")
        found.append(compared(folder / f"real-{i}.json", simulation))
        show(f"demo model, round {i + 1}, {rates[i % len(rates)]:g} requests/s", found[-1])
    return found


class Recording:
    """Records iterations as `weft bench iterations` does, in several parts."""

    def __init__(self) -> None:
        names = [name.removeprefix("--").replace("-", "_") for name in LIMITS[::2]]
        limits = dict(zip(names, map(int, LIMITS[1::2]), strict=True))
        config = EngineConfig(model="demo", device="cpu", cpu_threads=1, prefix_caching=False, **limits)
        self._engine = Engine(config)
        self._recorder = Recorder(self._engine, processor_time=True, seed=0)
        self.limits = limits_of(self._engine)

    def go_on(self) -> None:
        for requests in levels(self._engine):
            self._recorder.level(requests, LEVEL_SECONDS)

    def profile(self) -> IterationProfile:
        made = fitted(self._recorder.rows[WARM_UP:], self.limits, model="demo", threads=1)
        assert made.error is not None
        print(f"{made.error.iterations} iterations recorded; the fit is off by {made.error.median:.1%} in the median")
        return made


def pooled(found: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The results of all rounds together."""
    return [
        Figure(same[0].name, sum(f.measured for f in same) / len(same), sum(f.simulated for f in same) / len(same))
        for same in zip(*found, strict=True)
    ]


def table(found: Sequence[Sequence[Figure]]) -> str:
    """The results of all rounds, in the format of docs/simulator.md."""
    lines = ["| figure | real | simulated | error | single rounds |", "|---|---|---|---|---|"]
    for figure, same in zip(pooled(found), zip(*found, strict=True), strict=True):
        errors = [f.error for f in same]
        lines.append(
            f"| {figure.name} | {figure.measured:.1f} | {figure.simulated:.1f} | {100 * figure.error:+.1f} % "
            f"| {100 * min(errors):+.1f} to {100 * max(errors):+.1f} % |"
        )
    return "\n".join(lines)


def describe(around: Overhead) -> str:
    contention = around.side_by_side
    assert contention is not None
    slower = "; ".join(
        f"{name} {', '.join(f'{x:.2f}' for x in curve)}"
        for name, curve in (("decodes", contention.decodes), ("prompts", contention.prompts))
    )
    return (
        f"around the engine: {around.request_ms:.1f} ms before, {around.answer_ms:.1f} ms after, "
        f"{around.gap_ms:.1f} ms between iterations; {np.mean(around.silent):.2f} tokens before the first with text\n"
        f"times as long, by the number of engines that compute on {contention.cores} cores: {slower}"
    )


class Routed(NamedTuple):
    """Prompt tokens that a daemon's engines found cached and computed."""

    hit_share: float
    computed: list[float]

    @property
    def imbalance(self) -> float:
        return max(self.computed) * len(self.computed) / sum(self.computed)


def routed(folder: Path, engines: int, pages: int, slots: int) -> Routed:
    """Conversations against a daemon whose engines sleep: prompt tokens found cached, and tokens computed by each
    engine."""
    from prometheus_client.parser import text_string_to_metric_families

    profile = folder / "quick.json"
    msgspec.structs.replace(PACED, dense_ms=(20.0, 40.0), context_ms=0.0, chunk_ms=0.0, decode_ms=0.1).save(profile)
    options = ("--data-parallel-size", str(engines), "--num-pages", str(pages), "--max-num-seqs", str(slots))
    with running(folder, "--device", "cpu", *options, "--page-size", "16", env=paced_env(profile)) as daemon:
        weft("load", "--server", daemon.url, *TALKS, "--quiet")
        with urllib.request.urlopen(f"{daemon.url}/metrics") as response:
            text = response.read().decode()
    counts: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("weft_") and sample.name.endswith("_total"):
                counts.setdefault(sample.name, {})[sample.labels.get("engine", "")] = sample.value
    by_engine = {
        name: [counts[f"weft_engine_{name}_total"][str(e)] for e in range(engines)]
        for name in ("prompt_tokens", "generation_tokens", "prefix_hit_tokens")
    }
    prompt, answers, hits = by_engine.values()
    computed = [p + a - h for p, a, h in zip(prompt, answers, hits, strict=True)]
    return Routed(sum(hits) / sum(prompt), computed)


def routing(folder: Path) -> tuple[Routed, Routed]:
    """One engine, compared with three that have a third of its pages and slots each."""
    one, three = routed(folder, 1, 3000, 48), routed(folder, ENGINES, 1000, 16)
    share = three.hit_share / one.hit_share
    print(f"prompt tokens found by one engine: {one.hit_share:.1%}; by three: {three.hit_share:.1%}, {share:.3f} of it")
    print(f"the busiest of three computed {three.imbalance:.2f} times the mean")
    return one, three


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paced", action="store_true", help="engines that sleep what a profile says")
    parser.add_argument("--routing", action="store_true", help="prefix hits and loads of three engines beside one's")
    parser.add_argument("--rounds", type=int, help=f"[{ROUNDS}; with --paced 1]")
    parser.add_argument("--rate", type=float, nargs="+", default=RATES, help="of the demo model's rounds, in turns [2]")
    parser.add_argument("--keep", type=Path, help="an empty folder for profiles and figures")
    a = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory() as name:
        folder = a.keep or Path(name)
        folder.mkdir(exist_ok=True)
        if a.routing:
            one, three = routing(folder)
            return 0 if three.hit_share >= 0.9 * one.hit_share and three.imbalance <= 1.3 else 1
        if a.paced:
            found = paced(folder, a.rounds or 1)
        else:
            rounds = real(folder, a.rounds or ROUNDS, a.rate)
            print(table(rounds))
            found = [pooled(rounds)]
    worst = max(abs(f.error) for figures in found for f in figures if f.name in BOUNDED)
    print(f"worst of {', '.join(BOUNDED)}: {worst:.1%} (bound {BOUND:.0%}); load average now {os.getloadavg()[0]:.1f}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    raise SystemExit(main())
