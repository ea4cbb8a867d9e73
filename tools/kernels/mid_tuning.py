"""Compares `mid_hopper` with the other kernels and cuBLAS: `python -m weft.tools.kernels.mid_tuning`.

Every configuration is checked against the other kernels before it is timed. A separate process does the work; if it is
silent for some seconds it is killed, its task counts as hung, and a new process continues. Configurations faster than
the choice without a table by `MARGIN` enter the table; engines use it when it is stored next to `mid_table.py`. Each is
timed with all of a bucket's tokens live and with some (`mid_table.PARTLY_LIVE`); the mean of both decides.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.kernels.common.gpu import gpu, is_hopper
from weft.kernels.matmul import mid_table
from weft.kernels.matmul.mid_config import MidConfig
from weft.kernels.matmul.tuned import Shape
from weft.kernels.tuning import calls as bench_calls
from weft.tools.kernels.mid_configs import candidates, encoded
from weft.tools.kernels.mid_trial import ERROR, MODELS, Operands, others

MARGIN = 0.99
"""Share of the time without a table; slower configurations are left out."""
NAMES = ("qkv", "o", "gate_up", "down")


class Worker:
    """The process of `work`, with a timeout."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def _begin(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "weft.tools.kernels.mid_trial"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._lines = queue.Queue()
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()
        self._next(60.0)

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                lines.put(line)
        lines.put(None)

    def _next(self, seconds: float) -> dict[str, Any] | None:
        """Return its next message, or None if it ended or is silent."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        return None if line is None else dict(json.loads(line))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def run(self, task: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """Return (its messages, "" or its task when it was killed)."""
        if self._process is None:
            self._begin()
        assert self._process is not None
        assert self._process.stdin is not None
        said: list[dict[str, Any]] = []
        doing = "to begin"
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            while (answer := self._next(self._patience_s)) is not None:
                if answer.get("end"):
                    return said, ""
                doing = answer.get("doing", doing)
                said.append(answer)
        except OSError:
            pass
        self.close()
        return said, doing


def _tasks(models: Sequence[str], tokens: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    for model in models:
        for count in tokens:
            for index in range(len(NAMES)):
                yield model, index, count


def compile_all(models: Sequence[str], tokens: Sequence[int], jobs: int) -> None:
    """Fill Triton's cache with all launches of `item`. Call it in a process that launches nothing itself."""
    from weft.kernels.common.compilation import collect
    from weft.kernels.common.compilation import compile_all as compile_found
    from weft.kernels.common.gpu import KNOWN

    def launch() -> None:
        for name, index, count in _tasks(models, tokens):
            model = MODELS[name]
            shape = model.shapes[index]
            ops = Operands(shape, count, model, 132, "meta")
            weight = torch.empty(shape.features, shape.depth, dtype=bench_calls.DTYPE, device="meta")
            found = candidates(shape.kind, count, shape.features, shape.depth, 132)
            for config in (None, *others(shape, count, 132), *found, found[0]._replace(ahead=4)):
                ops.run(weight, config)

    began = time.monotonic()
    found = collect(launch, KNOWN["h200"])
    hashes, failed = compile_found(found, jobs)
    print(f"compiled {len(hashes)} of {len(found)} kernels in {time.monotonic() - began:.0f} s, "
          f"failed {sorted({k.name for k in failed})}", flush=True)  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--out", type=Path, default=Path("mid_h200.json"), help="table to write")
    options.add_argument("--keep", type=Path, help="table whose rows are kept unless measured again")
    options.add_argument("--models", default="8b,1b,70b/2")
    options.add_argument("--tokens", default="128,256,384,512")
    options.add_argument("--hold", default="8b:256,8b:512,8b:128,8b:128@80,1b:256",
                         help="MODEL:TOKENS, or MODEL:TOKENS@LIVE, to measure sustained")  # fmt: skip
    options.add_argument("--seconds", type=float, default=1.2, help="length of each sustained measurement")
    options.add_argument("--budget", type=float, default=180.0, help="seconds for all measurements")
    options.add_argument("--patience", type=float, default=10.0, help="seconds of silence that count as a hang")
    options.add_argument("--jobs", type=int, default=16, help="processes that compile")
    options.add_argument("--compile", action="store_true", help="only compile")
    given = options.parse_args()
    models, tokens = given.models.split(","), [int(t) for t in given.tokens.split(",")]
    if unknown := set(models) - set(MODELS):
        options.error(f"--models: unknown {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    if not given.compile and not (torch.cuda.is_available() and is_hopper()):
        options.error("needs a Hopper GPU (except with --compile)")
    if given.compile:
        compile_all(models, tokens, given.jobs)
        return
    tune(given, models, tokens)


def tune(given: argparse.Namespace, models: Sequence[str], tokens: Sequence[int]) -> None:
    """Measure, print a row per GEMM, write the table."""
    end = time.monotonic() + given.budget
    worker = Worker(given.patience)
    hung: set[str] = set()
    rows: list[dict[str, Any]] = []
    table = mid_table.decoded(json.loads(given.keep.read_text())) if given.keep else {}
    holds = given.hold.split(",") if given.hold else []
    for model, index, count in _tasks(models, tokens):
        done: set[str] = set()
        for _ in range(3):
            if time.monotonic() > end - 8 * given.seconds * len(holds):
                break
            name = f"{model} {NAMES[index]} {count}"
            said, doing = worker.run({"model": model, "index": index, "tokens": count, "done": sorted(done | hung)})
            for answer in said:
                if "failed" in answer:
                    print(f"{name} {answer['failed']} failed: {answer['why']}", flush=True)
            if not doing:
                rows.append({"model": model, "kind": NAMES[index], "tokens": count, **said[-1]})
                _row(name, rows[-1], MODELS[model].shapes[index], count, table)
                given.out.write_text(encoded(table))  # an interrupted run loses nothing
                break
            print(f"{name}: {doing} HUNG or ended the process", flush=True)
            done.add(doing)
            hung.add(f"{doing}") if doing not in ("cublas", "now", "to begin") else None
    for case in holds:
        model, _, tokens_live = case.partition(":")
        tokens_of, _, live_of = tokens_live.partition("@")
        count, live = int(tokens_of), int(live_of or tokens_of)
        if time.monotonic() + 8 * given.seconds > end:
            print(f"no time left to hold {case}", flush=True)
            continue
        task = {"model": model, "tokens": count, "live": live, "seconds": given.seconds,
                "table": json.loads(encoded(table))}  # fmt: skip
        said, doing = worker.run(task)
        if doing:
            print(f"hold {case}: {doing} HUNG or ended the process", flush=True)
            continue
        rows.append({"hold": case, **said[-1]})
        held = said[-1]["layer_us"]
        print(f"sustained layer {case}: " + " | ".join(
            f"{name} {us:.1f} us {watts:.0f} W {mhz:.0f} MHz" for name, (us, watts, mhz) in held.items()
        ) + f" | of cuBLAS: {held['cublas'][0] / held['table'][0]:.3f}, now {held['cublas'][0] / held['now'][0]:.3f}",
            flush=True)  # fmt: skip
    worker.close()
    given.out.with_suffix(".rows.json").write_text(json.dumps(rows))
    here = gpu()
    print(f"{len(table)} rows in {given.out} for {here.name if here else 'no GPU'}", flush=True)


def _row(name: str, row: dict[str, Any], shape: Shape, tokens: int, table: dict[mid_table.Key, MidConfig]) -> None:
    """Print a GEMM's times; the fastest configuration enters `table` if it is fast enough."""
    full, partly, errors, configs = row["us"]["full"], row["us"]["partly"], row["errors"], row["configs"]
    mean = {label: (full[label] + partly[label]) / 2 for label in full}
    ranked = sorted((mean[label], label) for label in mean if label not in ("cublas", "now"))
    wrong = [f"{label} WRONG {e:.1e}" for label, e in errors.items() if not e <= ERROR]
    same = {label: "=" if e == 0 else "" for label, e in errors.items()}
    cells = [f"{label} {full[label]:.1f}, {partly[label]:.1f}{same.get(label, '')}" for _, label in ranked]
    good = [(t, label) for t, label in ranked if label in configs]
    best = min(ranked)[1] if ranked else "now"
    print(f"{name}, and {mid_table.PARTLY_LIVE[tokens]} live: cublas {full['cublas']:.1f} | now {full['now']:.1f}, "
          f"{partly['now']:.1f} ({full['cublas'] / full['now']:.2f}) | " + " | ".join(cells + wrong)
          + f" | best of cuBLAS {full['cublas'] / full[best]:.2f}, {partly['cublas'] / partly[best]:.2f}",
          flush=True)  # fmt: skip
    table.pop(key := (tokens, shape.features, shape.depth), None)
    if good and good[0][0] < MARGIN * mean["now"]:
        table[key] = MidConfig(*configs[good[0][1]])


if __name__ == "__main__":
    main()
