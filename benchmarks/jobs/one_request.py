"""Times the decode steps of one request and splits them into kernels, gaps and host time.

    python benchmarks/jobs/one_request.py OUT --model-preset llama-3-8b

The engine runs in this process. `OUT/one.txt` gets tokens/s of several runs, the step's graphs replayed without an
engine, a trace of decode steps by kernel and by gap, and the host's CUDA calls. `one.json` has the same figures and
`step.json` one step as a list of kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams
from weft.tools.bench.trace import FIRST_KERNEL, Event, kinds_of, read_events


class Notes:
    """Prints lines and writes them and the figures at once."""

    def __init__(self, out: Path) -> None:
        self._out, self.figures = out, dict[str, Any]()

    def say(self, line: str) -> None:
        print(line, flush=True)
        with (self._out / "one.txt").open("a") as lines:
            lines.write(line + "\n")

    def keep(self, **figures: Any) -> None:
        self.figures |= figures
        (self._out / "one.json").write_text(json.dumps(self.figures, indent=1))


class Steps:
    """Runs single requests in an engine, in sequence."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rng, self._handle = engine, np.random.default_rng(0), 0

    def begin(self, prompt: int, output: int) -> None:
        self._handle += 1
        ids = self._rng.integers(5, self._engine.spec.vocab_size, prompt).astype(np.int32)
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        self._engine.add(AddRequest(handle=self._handle, prompt_token_ids=ids.tobytes(), params=params))

    def step(self) -> Any:
        """The statistics of the next finished iteration, or None."""
        while self._engine.has_work:
            if (outputs := self._engine.step()) is not None:
                return outputs.stats.iteration
        return None

    def run(self, prompt: int, output: int) -> list[tuple[float, Any]]:
        """The commit time and statistics of each iteration; the first computes the prompt."""
        self.begin(prompt, output)
        seen = []
        while (stats := self.step()) is not None:
            seen.append((time.perf_counter(), stats))
        return seen


def speed(steps: Steps, prompt: int, output: int, runs: int, notes: Notes) -> float:
    """The median step time in milliseconds; writes tokens/s of the runs to the notes."""
    whole, alone = [], []
    device, idle, host = list[float](), list[float](), list[float]()
    for _ in range(runs + 1):  # the first run warms up
        begun = time.perf_counter()
        seen = steps.run(prompt, output)
        decodes = [s for s in seen if s[1].tokens == 1]
        whole.append(output / (seen[-1][0] - begun))
        alone.append((len(decodes) - 1) / (decodes[-1][0] - decodes[0][0]))
        device += [1e3 * s.seconds for _, s in decodes[1:]]
        idle += [1e6 * s.idle_seconds for _, s in decodes[1:]]
        host += [1e3 * s.schedule_seconds for _, s in decodes[1:]]
    step = 1e3 / statistics.median(alone[1:])
    notes.say(
        f"{prompt}/{output}, median of {runs}: {statistics.median(whole[1:]):.1f} output tokens/s with the prefill, "
        f"{statistics.median(alone[1:]):.1f} without ({min(alone[1:]):.1f} to {max(alone[1:]):.1f}), {step:.3f} ms a "
        f"step; by events on the device {statistics.median(device):.3f} ms and {statistics.median(idle):.1f} us before "
        f"it, schedule, launch and commit on the host {statistics.median(host):.3f} ms"
    )
    notes.keep(with_prefill=whole[1:], without_prefill=alone[1:], step_ms=step, device_ms=statistics.median(device),
               idle_before_us=statistics.median(idle), host_ms=statistics.median(host))  # fmt: skip
    return step


def replays(engine: Engine, step_ms: float, notes: Notes) -> None:
    """Replays the graphs of one token on the last inputs, which shows the step time without a host."""
    runner: Any = engine.runner
    graphs = runner._graphs[id(runner._pipelines._decoding[0])]

    def timed(which: list[Any], count: int = 200) -> float:
        with torch.cuda.stream(runner.stream):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for graph in which:
                graph.replay()
            begin.record()
            for _ in range(count):
                for graph in which:
                    graph.replay()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / count

    model, both = timed([graphs.model]), timed([graphs.model, graphs.sample])
    notes.say(
        f"replayed back to back: model {model:.3f} ms, with sampling {both:.3f}; the engine's step takes "
        f"{1e3 * (step_ms - both):.0f} us more"
    )
    notes.keep(replayed_model_ms=model, replayed_ms=both)


def trace(steps: Steps, prompt: int, count: int, activities: list[ProfilerActivity]) -> dict[str, Any]:
    """Records a Chrome trace of `count` decode steps."""
    steps.begin(prompt, count + 60)
    for _ in range(30):
        steps.step()
    with profile(activities=activities) as recorded:
        for _ in range(count):
            steps.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    while steps.step() is not None:
        pass
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        return {"events": read_events(file), "rows": json.loads(file.read_text())["traceEvents"]}


def gaps(events: list[Event], out: Path, notes: Notes) -> None:
    """Writes the time of each kind of kernel, and of the gap before it, per step."""
    starts = [e.begin for e in events if e.is_kernel and FIRST_KERNEL in e.name.lower()]
    if len(starts) < 4:
        notes.say(f"no whole steps in the trace: {len(events)} events, {len(starts)} step starts")
        return
    begin, end = starts[1], starts[-1]
    count = len(starts) - 2
    kinds = kinds_of(events)
    mine = [(e, k) for e, k in zip(events, kinds, strict=True) if begin <= e.begin < end]
    busy, gap, number = defaultdict[str, float](float), defaultdict[str, float](float), defaultdict[str, int](int)
    reached, before = begin, "sampling"
    rows = []
    for event, kind in mine:
        first = max(event.begin, reached)  # a dependent launch starts early and waits; count that for the kernel before
        pair = f"{before} -> {kind}"
        gap[pair] += max(0.0, event.begin - reached)
        number[pair] += 1
        busy[kind] += max(0.0, event.end - first)
        if event.begin < starts[2]:
            rows.append([round(event.begin - begin, 2), round(event.end - event.begin, 2), kind, event.name[:80]])
        reached, before = max(reached, event.end), kind
    step = (end - begin) / count
    kernels = sum(busy.values()) / count
    notes.say(
        f"traced: {count} steps of {step:.1f} us, {kernels:.1f} of kernels and copies, {step - kernels:.1f} of gaps; "
        f"{len(mine) / count:.0f} launches a step"
    )
    for kind, us in sorted(busy.items(), key=lambda item: -item[1]):
        notes.say(f"  {kind:24} {us / count:8.1f} us")
    notes.say("gaps, us a step (count, us each):")
    for pair, us in sorted(gap.items(), key=lambda item: -item[1])[:20]:
        notes.say(f"  {pair:40} {us / count:7.1f} ({number[pair] / count:.0f}, {us / number[pair]:.2f})")
    notes.keep(traced_step_us=step, kernels_us={k: v / count for k, v in busy.items()},
               gaps_us={k: v / count for k, v in gap.items()})  # fmt: skip
    (out / "step.json").write_text("[" + ",\n".join(map(json.dumps, rows)) + "]\n")


def host_calls(rows: list[dict[str, Any]], count: int, notes: Notes) -> None:
    """Writes the host's time in CUDA calls and torch operations by name."""
    spent, number = defaultdict[str, float](float), defaultdict[str, int](int)
    for row in rows:
        if row.get("ph") == "X" and row.get("cat") in ("cuda_runtime", "cuda_driver", "cpu_op"):
            spent[f"{row['cat']}: {row['name']}"] += float(row["dur"])
            number[f"{row['cat']}: {row['name']}"] += 1
    notes.say("the host, us a step under the profiler, nested operations included (count):")
    for name, us in sorted(spent.items(), key=lambda item: -item[1])[:25]:
        notes.say(f"  {name:50} {us / count:7.1f} ({number[name] / count:.1f})")
    notes.keep(host_us={name: us / count for name, us in spent.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model-preset")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="number of traced steps")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    notes = Notes(given.out)
    dummy = {"model_preset": given.model_preset, "load_format": "dummy"} if given.model_preset else {}
    begun = time.monotonic()
    engine = Engine(EngineConfig(device=given.device, plan="serial", prefix_caching=False, **dummy).for_measuring())
    notes.say(f"{given.model_preset or 'demo'}: engine after {time.monotonic() - begun:.1f} s")
    steps = Steps(engine)
    with torch.inference_mode():
        step_ms = speed(steps, given.prompt, given.output, given.runs, notes)
        if on_gpu := engine.resolved.device.type == "cuda":
            replays(engine, step_ms, notes)
            gaps(trace(steps, given.prompt, given.steps, [ProfilerActivity.CUDA])["events"], given.out, notes)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        host_calls(trace(steps, given.prompt, given.steps, kinds)["rows"], given.steps, notes)
    engine.close()


if __name__ == "__main__":
    main()
