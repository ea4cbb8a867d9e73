"""Measures what energy metering costs, and whether its joules add up to the device's counter.

    python benchmarks/jobs/metering_cost.py OUT --model-preset llama-3-8b

Cost: a fixed number of requests decode, in turns with metering on, off, off and on, so that growing contexts and a
warming card affect both alike. With metering a thread reads the counter ten times a second, the loop charges every
iteration, and every request asks for its energy. Sum: bursts, single requests, long prompts, aborts and pauses, held
against a counter that this script reads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from weft.engine import engine as engines
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.runner.device.energy_meter import EnergyCounter, energy_counter
from weft.engine.scheduling.features import EnergyCharges
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams

Span = tuple[int, int]
"""Smallest and largest length in tokens."""


class Switched:
    """An energy counter that can be switched off."""

    def __init__(self, counter: EnergyCounter) -> None:
        self.source, self._counter, self.on = counter.source, counter, True
        self._last = counter.joules()

    def joules(self) -> float:
        if self.on:
            self._last = self._counter.joules()
        return self._last


class Pretended:
    """A fake counter for dry runs; its figures mean nothing."""

    source = "pretended"

    def joules(self) -> float:
        return 50.0 * time.monotonic()


class Metering:
    def __init__(self, config: EngineConfig, pretend: bool) -> None:
        made: list[Switched] = []

        def counter(device: Any, ranks: int = 1) -> EnergyCounter:
            made.append(Switched(Pretended() if pretend else energy_counter(device, ranks)))
            return made[-1]

        engines.energy_counter = counter  # type: ignore[attr-defined]
        self.engine = Engine(config.for_measuring())
        assert self.engine.describe().energy_source, self.engine.describe().energy_missing
        (self.counter,) = made
        self.own: EnergyCounter = Pretended() if pretend else energy_counter(self.engine.resolved.device)
        charges = self.engine.listeners.find(EnergyCharges)
        assert charges is not None
        self.charges = charges
        self._rng = np.random.default_rng(0)
        self._handles = itertools.count()
        self.joules: dict[int, float] = {}
        """Energy by request, as last reported."""
        self.open: set[int] = set()

    def add(self, prompt: int, output: int) -> int:
        handle = next(self._handles)
        ids = self._rng.integers(0, self.engine.spec.vocab_size, prompt).astype(np.int32)
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        self.engine.add(AddRequest(handle=handle, prompt_token_ids=ids.tobytes(), params=params, metered=True))
        self.open.add(handle)
        return handle

    def step(self) -> int:
        """Runs one step and returns its number of output tokens."""
        outputs = self.engine.step()
        if outputs is None:
            return 0
        self.joules.update(outputs.joules)
        handles, _, finish = outputs.columns()
        self.open -= set(handles[np.flatnonzero(finish)].tolist())
        return len(handles)

    def switch(self, on: bool) -> None:
        self.counter.on = on
        self.engine.listeners.remove(self.charges)
        if on:
            self.engine.listeners.add(self.charges)

    def cost(self, number: int, output: int, seconds: float, turn: float) -> dict[str, Any]:
        """Decodes `number` requests for `seconds` seconds, in turns with and without metering."""
        for _ in range(number):
            self.add(64, output)
        while self.engine.scheduler.num_running < number or self.step() < number:
            self.step()
        until = time.monotonic() + seconds
        blocks: list[list[float]] = []
        while time.monotonic() < until and len(self.open) == number:
            block = []
            for on in (True, False, False, True):
                self.switch(on)
                self.step()  # finish the step that began in the previous turn
                begun, iterations = time.perf_counter(), 0
                while time.perf_counter() - begun < turn and len(self.open) == number:
                    iterations += self.step() > 0
                block.append((time.perf_counter() - begun) / max(1, iterations))
            if len(self.open) == number:
                blocks.append(block)
        self.switch(True)
        for handle in list(self.open):
            self.engine.abort(handle)
        self.open.clear()
        while self.engine.has_work:
            self.step()
        times = np.array(blocks)
        ratio = (times[:, 0] + times[:, 3]) / (times[:, 1] + times[:, 2]) - 1
        spread = ratio.std(ddof=1) / np.sqrt(len(ratio)) if len(ratio) > 1 else float("nan")
        row = {
            "requests": number, "blocks": len(blocks), "turn_s": turn,
            "iteration_ms": round(1e3 * float(times.mean()), 4), "cost": round(float(ratio.mean()), 6),
            "standard_error": round(float(spread), 6), "median": round(float(np.median(ratio)), 6),
        }  # fmt: skip
        print(
            f"{number} requests: metering costs {row['cost']:.3%} +- {spread:.3%} of an iteration of "
            f"{row['iteration_ms']:.3f} ms ({len(blocks)} times on off off on)", flush=True,
        )  # fmt: skip
        return row

    def serve(self, seconds: float, rate: float, prompts: Span, outputs: Span, gone: float) -> None:
        """Serves Poisson arrivals for `seconds` seconds; a share `gone` of the requests is aborted."""
        until, due = time.monotonic() + seconds, time.monotonic()
        while (now := time.monotonic()) < until:
            while rate and due <= now:
                handle = self.add(int(self._rng.integers(*prompts)), int(self._rng.integers(*outputs)))
                due += float(self._rng.exponential(1 / rate))
                if self._rng.random() < gone:
                    self.engine.abort(handle)
                    self.open.discard(handle)
            if self.engine.has_work:
                self.step()
            else:
                self.engine.idle()
                time.sleep(0.002)

    def sum(self, seconds: float) -> dict[str, Any]:
        """A mixed run of about `seconds` seconds."""
        # Energy drawn while metering was off is charged to the next seconds of work: let that pass first.
        self.serve(4.0, 20.0, (20, 100), (16, 64), 0)
        while self.engine.has_work:
            self.step()
        self.serve(3.0, 0, (1, 2), (1, 2), 0)  # measure the idle power
        self.joules.clear()
        before, counted, begun = self.engine.stats().energy, self.own.joules(), time.monotonic()
        assert before is not None
        parts: list[tuple[float, float, Span, Span, float]] = [
            (0.15, 2.0, (20, 400), (8, 64), 0.0),
            (0.2, 25.0, (20, 1500), (8, 256), 0.05),
            (0.1, 0.0, (1, 2), (1, 2), 0.0),
            (0.15, 2.0, (2000, 6000), (16, 128), 0.1),
            (0.1, 0.0, (1, 2), (1, 2), 0.0),
            (0.2, 30.0, (64, 65), (400, 800), 0.1),
            (0.1, 0.3, (20, 100), (8, 32), 0.0),
        ]
        longest = self.engine.resolved.max_model_len
        for share, rate, prompts, outputs, gone in parts:
            low, high = (max(1, min(n, longest // 2)) for n in prompts)
            few, many = (max(1, min(n, longest // 4)) for n in outputs)
            self.serve(share * seconds, rate, (low, high + 1), (few, many + 1), gone)
        while self.engine.has_work:
            self.step()
        self.serve(3.0, 0, (1, 2), (1, 2), 0)
        after = self.engine.stats().energy
        assert after is not None
        counter, took = self.own.joules() - counted, time.monotonic() - begun
        requests = sum(self.joules.values())
        rest, charged = after.idle_joules - before.idle_joules, after.charged - before.charged
        row = {
            "seconds": round(took, 1), "requests": len(self.joules), "counter_j": round(counter, 1),
            "drawn_j": round(after.joules - before.joules, 1), "requests_j": round(requests, 1),
            "charged_j": round(charged, 1), "rest_j": round(rest, 1),
            "of_counter": round((requests + rest) / counter, 4),
            "charged_of_counter": round((charged + rest) / counter, 4),
        }  # fmt: skip
        print(
            f"{took:.0f} s, {len(self.joules)} requests: their joules {requests:,.0f} + idle {rest:,.0f} = "
            f"{row['of_counter']:.4f} of the counter's {counter:,.0f} (in the metrics, with aborted requests: "
            f"{row['charged_of_counter']:.4f})", flush=True,
        )  # fmt: skip
        return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model-preset")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[128, 1, 512], help="numbers of requests for the cost"
    )
    parser.add_argument("--output", type=int, default=6000, help="output tokens of each of 128 requests")
    parser.add_argument("--cost-seconds", type=float, default=32.0, help="seconds for each number of requests")
    parser.add_argument("--turn-seconds", type=float, default=0.4)
    parser.add_argument("--sum-seconds", type=float, default=100.0)
    parser.add_argument("--pretend", action="store_true", help="dry run with a fake counter")
    options = parser.parse_args()
    model = {"model_preset": options.model_preset, "load_format": "dummy"} if options.model_preset else {}
    config = EngineConfig.model_validate(
        {**model, "device": options.device, "max_num_seqs": max(256, *options.requests), "prefix_caching": False}
    )
    metering = Metering(config, options.pretend)
    longest = metering.engine.resolved.max_model_len - 80
    # Limit the output so that the pool holds all contexts and no request is preempted.
    room = metering.engine.scheduler.pool.capacity * config.page_size

    def keep(row: dict[str, Any]) -> None:
        with (options.out / "metering.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def cost(number: int) -> None:
        output = min(longest, options.output * max(1, 128 // number), int(0.9 * room / number) - 128)
        keep(metering.cost(number, output, options.cost_seconds, options.turn_seconds))

    cost(options.requests[0])
    keep(metering.sum(options.sum_seconds))
    for number in options.requests[1:]:
        cost(number)
    metering.engine.close()


if __name__ == "__main__":
    main()
