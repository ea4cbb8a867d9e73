"""Flags of `weft advise`. Imports nothing heavy: `weft --help` reads this."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from weft import output_file

EPILOG = (
    "Exit status: 0 a bound was found; 1 none keeps the objectives; 2 bad input. --slo takes itl and ttft here. "
    "--max-num-seqs is the largest bound that is tried."
)


def add_advise_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("advice")
    add = group.add_argument
    add(
        "--workload", metavar="P:D", default="161:338",
        help="prompt and output tokens of a request, or lognormal:IN_MEAN:IN_SD:OUT_MEAN:OUT_SD:REQUESTS [161:338]",
    )  # fmt: skip
    add("--lengths", metavar="FILE", type=Path, help="JSON list of [input, output] pairs, instead")
    add(
        "--epsilon", metavar="X", type=float, default=0.1,
        help="throughput at least, of that of so many requests each as quick as one alone [0.1]",
    )  # fmt: skip
    add(
        "--objective", choices=["throughput", "energy"], default="throughput",
        help="the most tokens a second, or the fewest joules a token [throughput]",
    )  # fmt: skip
    add("--out", metavar="FILE", type=output_file, help="the configuration to write, for weft serve --config")
    add("--html", metavar="FILE", type=output_file, help="one self-contained page")
    add("--png", metavar="FILE", type=output_file, help="the curves as a picture")
    add(
        "--points", metavar="FILE", type=partial(output_file, via_rename=True),
        help="keep what was measured here; where the file exists, go on from it",
    )  # fmt: skip
    add("--curves", metavar="FILE", type=Path, help="measure nothing: advise on the points of this file")
    add(
        "--measure-replicas", metavar="N", type=int, default=1,
        help="also run up to N engines side by side at the bound that was found, if they fit [1]",
    )  # fmt: skip
    add(
        "--budget-seconds", metavar="S", type=float, default=480.0,
        help="time for the measurements once the engine is up; Ctrl-C ends them with what there is [480]",
    )  # fmt: skip
    add("--point-seconds", metavar="S", type=float, default=3.0, help="how long one bound is measured [3]")
    add(
        "--rate-seconds", metavar="S", type=float, default=20.0,
        help="how long requests come in each run that tries a rate; 0: play arrivals out on the curve instead [20]",
    )  # fmt: skip
    parser.epilog = EPILOG
