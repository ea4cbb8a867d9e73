"""Compares all ways to run attention of hybrid batches, a chunk with decodes: `weft bench attention`.

The ways: decodes and whole tiles in sequence; decodes and tiles cut along their keys; one launch for both, with both on
every SM (`pod_together`) or with some programs beginning with decodes (`pod_hopper`); two streams with shares of the
SMs; everything as tiles of the prefill kernel; flash-attn and torch's attention if available. Measured in bursts (the
card is below its power limit, as in an online server) and sustained, with joules. `--sweep paper` runs the batches of
the POD-Attention paper.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton

from weft.kernels.attention import break_evens
from weft.kernels.common.gpu import is_hopper
from weft.kernels.common.source_digest import source_digest
from weft.kernels.tuning.measure import Meter
from weft.tools.kernels.foreign_attention import LEFT_OUT
from weft.tools.kernels.hybrid_batches import HEAD_DIM, HEADS, KV_HEADS, Hybrid, Planned, paper
from weft.tools.kernels.hybrid_calls import PAGE, HybridCalls, compile_in_subprocess
from weft.tools.kernels.hybrid_report import write
from weft.tools.kernels.hybrid_sweep import Calls, OtherRows, Row, Rows, Sweep

COMPILE_SECONDS = 120
Keep = Callable[[list[Row], Callable[[str], None]], bool]
_DEFAULT_FOLDER = Path()
"""`--keep` without a folder."""


def about() -> Row:
    """Describe the measurement; only rows with the same description may be appended to a file."""
    code = source_digest(*break_evens.SOURCES)
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "kernels": code,
    }  # fmt: skip


def run(
    batches: list[Planned], calls: Mapping[str, Calls], folder: Path, made_with: Row, *, seconds: float, hold: float,
    meter: Meter | None, clock: Callable[[], float] = time.monotonic, keep: Keep | None = None,
) -> int:  # fmt: skip
    """Measure the rows missing in the folder, then report on all of them. Returns the exit status.

    keep: writes tables of the rows (`break_evens.keep`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        rows = Rows(folder / "rows.jsonl", made_with)
    except OtherRows as error:
        print(error)
        return 2

    def say(line: str) -> None:
        print(line, flush=True)

    sweep = Sweep(batches, rows, calls, seconds=seconds, share=0.3 if hold else 0.0, hold=hold, clock=clock, say=say)
    try:
        sweep.run(meter)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
    left_out = dict(LEFT_OUT)
    for model in calls.values():
        left_out |= model.left_out
    kept = keep is None or keep(rows.rows, say)
    write(rows.rows, left_out, folder, say)
    return 0 if kept else 1


def _keep(folder: Path, rows: list[Row], say: Callable[[str], None]) -> bool:
    def made(model: str) -> break_evens.TableKey:
        return break_evens.TableKey.here(HEADS, KV_HEADS[model], HEAD_DIM, PAGE)

    return break_evens.keep(rows, folder, made, say)


def main(argv: list[str], parser_class: type[argparse.ArgumentParser], cache: Callable[[], Path]) -> int:
    """cache: returns the folder with start-up measurements; it may raise."""

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = parser_class(prog="weft bench attention", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["llama-3-8b", "yi-6b"], help=f"models to measure: {', '.join(KV_HEADS)}"
    )
    parser.add_argument("--sweep", choices=("paper",), help="use the paper's batches instead of the options below")
    parser.add_argument("--chunks", type=numbers, default=numbers("128,256,512,1024,2048"), help="tokens")
    parser.add_argument("--contexts", type=numbers, default=numbers("4096,8192,12288,16384,20480"), help="tokens")
    parser.add_argument("--decodes", type=numbers, default=numbers("8,16,32,64"), help="decoding requests")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="length of every sustained measurement; 0: bursts only"
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=600, help="limit on all measurements, without compiling"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for rows (a restart resumes them), tables, summary and pictures"
    )
    parser.add_argument(
        "--keep", type=Path, nargs="?", const=_DEFAULT_FOLDER, metavar="FOLDER",
        help="write break-evens for `weft serve --pod auto` into this folder [the one it reads]",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or not is_hopper():
        parser.error("needs a Hopper GPU")
    names = list(dict.fromkeys(name for text in options.models for name in text.split(",")))
    if unknown := set(names) - set(KV_HEADS):
        parser.error(f"--models: unknown {', '.join(sorted(unknown))}; choose from {', '.join(KV_HEADS)}")
    grid = product(names, options.chunks, options.contexts, options.decodes)
    batches = paper(names) if options.sweep else [Planned("sweep", Hybrid(*at, length=at[2])) for at in grid]
    keep = cache() if options.keep is _DEFAULT_FOLDER else options.keep
    folder = options.out or Path(tempfile.mkdtemp(prefix="weft-attention-"))
    begun = time.monotonic()
    compile_in_subprocess(names, os.cpu_count() or 1, COMPILE_SECONDS)
    calls: dict[str, Calls] = {}
    for name in names:
        made = HybridCalls(name)
        made.capture()
        calls[name] = made
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {len(batches)} batches; ready after "
          f"{time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip
    meter = Meter() if options.seconds else None
    try:
        return run(
            batches, calls, folder, about(), seconds=options.budget_seconds, hold=options.seconds, meter=meter,
            keep=None if keep is None else partial(_keep, keep),
        )  # fmt: skip
    finally:
        if meter is not None:
            meter.close()
