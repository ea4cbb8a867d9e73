"""Options of `weft advise`. Imports nothing heavy, because `weft --help` loads this."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from weft import output_file

EPILOG = (
    "Exit status: 0 if a slot limit was found, 1 if none meets the objectives, 2 on bad input. --slo accepts itl and "
    "ttft here. --max-num-seqs is the largest limit to try."
)


def add_advise_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("advice")
    add = group.add_argument
    add(
        "--workload", metavar="P:D", default="161:338",
        help="prompt and output tokens of a request, or lognormal:IN_MEAN:IN_SD:OUT_MEAN:OUT_SD:REQUESTS [161:338]",
    )  # fmt: skip
    add("--lengths", metavar="FILE", type=Path, help="JSON list of [input, output] pairs, instead of --workload")
    add(
        "--epsilon", metavar="X", type=float, default=0.1,
        help="minimum efficiency: throughput relative to perfect scaling from one request [0.1]",
    )  # fmt: skip
    add(
        "--objective", choices=["throughput", "energy"], default="throughput",
        help="maximize tokens per second, or minimize joules per token [throughput]",
    )  # fmt: skip
    add("--out", metavar="FILE", type=output_file, help="configuration to write, for weft serve --config")
    add("--html", metavar="FILE", type=output_file, help="write a self-contained page")
    add("--png", metavar="FILE", type=output_file, help="write the curves as a picture")
    add(
        "--points", metavar="FILE", type=partial(output_file, via_rename=True),
        help="save measurements here; if the file exists, resume from it",
    )  # fmt: skip
    add("--curves", metavar="FILE", type=Path, help="measure nothing; advise from the points in this file")
    add(
        "--measure-replicas", metavar="N", type=int, default=1,
        help="also measure up to N concurrent engines at the best limit, if they fit [1]",
    )  # fmt: skip
    add(
        "--budget-seconds", metavar="S", type=float, default=480.0,
        help="time limit of the measurements after engine start; Ctrl-C ends them and uses the complete points [480]",
    )  # fmt: skip
    add("--point-seconds", metavar="S", type=float, default=3.0, help="seconds to measure each limit [3]")
    add(
        "--rate-seconds", metavar="S", type=float, default=20.0,
        help="seconds of arrivals in each run at a rate; 0: simulate arrivals on the curve instead [20]",
    )  # fmt: skip
    parser.epilog = EPILOG
