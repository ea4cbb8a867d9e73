"""Flags of `weft fleet`. Imports nothing heavy: `weft --help` reads this."""

from __future__ import annotations

import argparse

from weft import output_file
from weft.loadgen.options import add_arrival_flags, add_content_flags

EPILOG = (
    "Lists are of numbers with commas between them: every combination is simulated. Exit status: 0 simulated, and an "
    "objective, if there is one, was met by a fleet at every rate; 1 it was not; 2 bad input."
)


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    fleet = parser.add_argument_group("fleet").add_argument
    fleet("--profile", metavar="NAME|FILE", default="llama-3-8b-h200",
        help="of iterations: a file of weft bench iterations, or a shipped one [llama-3-8b-h200]")  # fmt: skip
    fleet("--engines", metavar="LIST",
        help="how many, each on a GPU of its own [with --slo: the fewest that keep it; else 1]")  # fmt: skip
    fleet("--max-engines", metavar="N", default="64", help="where the search for the fewest ends [64]")
    fleet("--rates", metavar="LIST", help="try each, instead of --rate")
    fleet("--cores", metavar="N", help="engines of a CPU share so many cores [as recorded, else each has its own]")
    fleet("--fail", metavar="ENGINE:AT:FOR", action="append", default=[],
        help="that engine ends at this time and is away for so long, such as 0:30s:20s; repeat it")  # fmt: skip
    engine = parser.add_argument_group("each engine").add_argument
    engine("--max-num-seqs", metavar="LIST",
        help="numbers; auto, auto:N: as many as keep the itl objectives of --slo [the profile's]")  # fmt: skip
    engine("--max-num-batched-tokens", metavar="LIST", help="[the profile's]")
    engine("--itl-slo", metavar="LIMIT", help="as weft serve has it: 50ms, p99:50ms [off]")
    engine("--num-pages", metavar="N", help="[the profile's]")
    engine("--max-model-len", metavar="N", help="[the profile's]")
    engine("--no-prefix-caching", action="store_true", help="find no prefix again")
    engine("--max-queued-requests", metavar="N", help="of the daemon, as weft serve has it")
    engine("--max-queued-tokens", metavar="N", help="likewise")
    add_arrival_flags(parser.add_argument_group("arrivals"))
    add_content_flags(parser.add_argument_group("lengths and prefixes"))
    judging = parser.add_argument_group("judging").add_argument
    judging("--slo", metavar="SPEC", action="append", default=[],
        help="as weft load has it: ttft:p99:500ms, tpot:mean:30ms, nanoflow …; repeat it")  # fmt: skip
    judging("--max-failures", metavar="F", default="0.01",
        help="a mean is missed when more than this share of requests failed [0.01]")  # fmt: skip
    judging("--warmup", metavar="TIME", default="0s", help="requests of this time are not judged [0s]")
    report = parser.add_argument_group("reports").add_argument
    report("--json", metavar="FILE", type=output_file, help="all figures")
    report("--png", metavar="FILE", type=output_file, help="goodput over rates and engines, as a picture")
    report("--quiet", action="store_true", help="no progress; only the result")
