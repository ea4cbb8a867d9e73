"""Hybrid batches in the ways of `weft bench attention`, and with both halves on every SM at the same time.

    python tests/gpu/jobs/pod_together.py --seconds 120 --hold 0.5

A line a batch: microseconds of a layer of whole and of cut tiles in turn, one launch by the rule, decodes as tiles of
the prefill kernel, both together (`pod_together`, in two splits of the registers), and whole's over the rule's and the
best of together's. Then some of them sustained, with watts and joules.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from weft.kernels.hybrid_batches import Hybrid, balanced
from weft.kernels.hybrid_calls import HybridCalls
from weft.kernels.measure import Meter
from weft.kernels.pod_hopper import PodWork
from weft.kernels.pod_together import launch_together

REGISTERS = {"together": (176, 136, 24), "together 40": (168, 136, 40)}
WAYS = ("whole", "cut", "pod rule", "batched", *REGISTERS)


class Together(HybridCalls):
    def _make_ways(self) -> dict[str, Callable[[int], None]]:
        decodes, cut = self.list_of("decode"), self.list_of("cut")

        def together(layer: int, *, registers: tuple[int, int, int]) -> None:
            work = PodWork(*decodes, *cut, self._decoders)
            launch_together(
                self.q, self.pool, layer, self.table, work, decodes=self._space, prefills=self._prefills,
                num_sms=self.sms, out=self.out, registers=registers,
            )  # fmt: skip

        more = {name: partial(together, registers=registers) for name, registers in REGISTERS.items()}
        return super()._make_ways() | more


def measured(calls: Together, batch: Hybrid, rounds: int = 5) -> dict[str, float]:
    calls.load(batch)
    expected = max(20.0, batch.prefill_us + batch.decode_us)
    names = [name for name in WAYS if name not in calls.left_out]
    about = {name: calls.burst(name, expected) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            times[name].append(calls.burst(name, about[name]))
    return {name: sorted(taken)[rounds // 2] for name, taken in times.items()}


def wrong(calls: Together, batch: Hybrid) -> float:
    """How far what together leaves is from the two halves', relative by norm."""
    rows = batch.decodes + batch.chunk
    calls._graph("cut")[0].replay()
    want = calls.out[:rows].double()
    calls.out[:rows].fill_(float("nan"))
    calls._graph("together")[0].replay()
    return float((calls.out[:rows].double() - want).norm() / want.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--hold", type=float, default=0.5)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    found: list[tuple[Hybrid, dict[str, float]]] = []
    meter = Meter()
    for model in ("llama-3-8b", "yi-6b"):
        calls = Together(model)
        calls.capture()
        for name, why in calls.left_out.items():
            print(f"{model}: without {name}: {why}", flush=True)
        batches = [
            Hybrid(model, chunk, context, decodes, context)
            for context, chunk, decodes in product((4096, 16384), (128, 256, 512, 1024, 2048), (8, 32, 64))
        ]
        for batch in filter(balanced, batches):
            if time.monotonic() > end:
                break
            us = measured(calls, batch)
            found.append((batch, us))
            best = min((us[name] for name in REGISTERS if name in us), default=float("nan"))
            print(
                f"{batch.key}: " + ", ".join(f"{name} {value:.0f}" for name, value in us.items())
                + f" | whole's over the rule's {us['whole'] / us['pod rule']:.3f}, over together's "
                f"{us['whole'] / best:.3f}, rule's over together's {us['pod rule'] / best:.3f}; "
                f"off by {wrong(calls, batch):.1e}", flush=True,
            )  # fmt: skip
        for batch in [b for b, _ in found if b.model == model][::4]:
            if time.monotonic() > end + given.hold * 40:
                break
            calls.load(batch)
            rows = {
                name: calls.sustained(name, meter, given.hold, max(20.0, batch.prefill_us + batch.decode_us))
                for name in WAYS if name not in calls.left_out
            }  # fmt: skip
            print(
                f"sustained {batch.key}: "
                + ", ".join(f"{name} {r.ms * 1e3:.0f} us {r.watts:.0f} W {r.joules:.4f} J" for name, r in rows.items()),
                flush=True,
            )
        del calls
        torch.cuda.empty_cache()
    meter.close()
    for small in (True, False):
        gains = [
            (us["whole"] / us["pod rule"], us["whole"] / min(us[n] for n in REGISTERS if n in us))
            for batch, us in found
            if (batch.chunk <= 256) == small and any(n in us for n in REGISTERS)
        ]
        if gains:
            rule, both = (sum(g) / len(gains) for g in zip(*gains, strict=True))
            print(f"chunks of {'128 and 256' if small else '512 and more'}: whole's over the rule's {rule:.3f}, over "
                  f"together's {both:.3f}; {len(gains)} batches")  # fmt: skip


if __name__ == "__main__":
    main()
