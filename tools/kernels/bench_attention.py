"""Attention of hybrid batches, a chunk beside decodes, each way there is: `weft bench attention`.

The ways: decodes and whole tiles one after the other; decodes and tiles that are cut along their keys; one launch for
both, on every SM at the same time (`pod_together`) or by how many programs begin with decodes (`pod_hopper`); two
streams with shares of the SMs; everything as tiles of the prefill kernel; flash-attn and torch's own attention where
they can. In bursts (the card is below its power limit, as an online server's is) and sustained, with joules. `--sweep
paper`: the batches of the paper on POD-Attention.
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
from weft.tools.kernels.hybrid_calls import PAGE, HybridCalls, compile_apart
from weft.tools.kernels.hybrid_report import write
from weft.tools.kernels.hybrid_sweep import Calls, OtherRows, Row, Rows, Sweep

COMPILE_SECONDS = 120
Keep = Callable[[list[Row], Callable[[str], None]], bool]
_WHERE_IT_LOOKS = Path()
"""`--keep` without a folder"""


def about() -> Row:
    """What a file's rows were measured with: such rows alone may follow them."""
    code = source_digest(*break_evens.SOURCES)
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "kernels": code,
    }  # fmt: skip


def run(
    batches: list[Planned], calls: Mapping[str, Calls], folder: Path, made_with: Row, *, seconds: float, hold: float,
    meter: Meter | None, clock: Callable[[], float] = time.monotonic, keep: Keep | None = None,
) -> int:  # fmt: skip
    """Measure what the folder's rows lack, then report on all of them. Returns the exit status.

    keep: what makes tables of the rows (`break_evens.keep`).
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
    def made(model: str) -> break_evens.Made:
        return break_evens.Made.here(HEADS, KV_HEADS[model], HEAD_DIM, PAGE)

    return break_evens.keep(rows, folder, made, say)


def main(argv: list[str], parser_class: type[argparse.ArgumentParser], cache: Callable[[], Path]) -> int:
    """`cache()` is the folder in which a start looks for what was measured; it may raise."""

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = parser_class(prog="weft bench attention", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["llama-3-8b", "yi-6b"], help=f"whose heads: {', '.join(KV_HEADS)}"
    )
    parser.add_argument("--sweep", choices=("paper",), help="the paper's batches, in place of those named below")
    parser.add_argument("--chunks", type=numbers, default=numbers("128,256,512,1024,2048"), help="tokens")
    parser.add_argument("--contexts", type=numbers, default=numbers("4096,8192,12288,16384,20480"), help="tokens")
    parser.add_argument("--decodes", type=numbers, default=numbers("8,16,32,64"), help="requests that decode beside")
    parser.add_argument("--seconds", type=float, default=0.5, help="of every sustained measurement; 0: bursts alone")
    parser.add_argument("--budget-seconds", type=float, default=600, help="of all measurements, without compiling")
    parser.add_argument(
        "--out", type=Path, help="folder of rows (a restart goes on with them), tables, summary and pictures"
    )
    parser.add_argument(
        "--keep", type=Path, nargs="?", const=_WHERE_IT_LOOKS, metavar="FOLDER",
        help="write break-evens, by which `weft serve --pod auto` chooses, into this folder [where it looks]",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or not is_hopper():
        parser.error("needs a Hopper GPU")
    names = list(dict.fromkeys(name for text in options.models for name in text.split(",")))
    if unknown := set(names) - set(KV_HEADS):
        parser.error(f"--models: {', '.join(sorted(unknown))} is none of {', '.join(KV_HEADS)}")
    grid = product(names, options.chunks, options.contexts, options.decodes)
    batches = paper(names) if options.sweep else [Planned("sweep", Hybrid(*at, length=at[2])) for at in grid]
    keep = cache() if options.keep is _WHERE_IT_LOOKS else options.keep
    folder = options.out or Path(tempfile.mkdtemp(prefix="weft-attention-"))
    begun = time.monotonic()
    compile_apart(names, os.cpu_count() or 1, COMPILE_SECONDS)
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
