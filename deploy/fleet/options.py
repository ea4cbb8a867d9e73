"""Defines the flags of `weft fleet`. Imports nothing heavy, because `weft --help` loads it."""

from __future__ import annotations

import argparse

from weft import output_file
from weft.loadgen.options import add_arrival_flags, add_content_flags

EPILOG = (
    "LIST is comma-separated numbers; every combination is simulated. Exit status: 0 if a fleet meets any given "
    "objectives at every rate; 1 if not; 2 for bad input."
)


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    fleet = parser.add_argument_group("fleet").add_argument
    fleet("--profile", metavar="NAME|FILE", default="llama-3-8b-h200",
        help="iteration profile: a shipped one, or a file from weft bench iterations [llama-3-8b-h200]")  # fmt: skip
    fleet("--engines", metavar="LIST",
        help="number of engines, one per GPU [with --slo: the fewest that meet it; else 1]")  # fmt: skip
    fleet("--max-engines", metavar="N", default="64", help="maximum engines in that search [64]")
    fleet("--rates", metavar="LIST", help="rates to simulate, instead of --rate")
    fleet("--cores", metavar="N", help="cores shared by CPU engines [as recorded; else each engine has its own]")
    fleet("--fail", metavar="ENGINE:AT:FOR", action="append", default=[],
        help="end this engine AT a time and restart it after FOR, such as 0:30s:20s; repeatable")  # fmt: skip
    fleet("--keys", metavar="LIST",
        help="shares of API keys in the requests, or users: with 9,1 the second key has one of ten [1]")  # fmt: skip
    engine = parser.add_argument_group("each engine").add_argument
    engine("--max-num-seqs", metavar="LIST",
        help="sequence limits; auto or auto:N adapts to the itl objectives of --slo [the profile's]")  # fmt: skip
    engine("--max-num-batched-tokens", metavar="LIST", help="tokens per iteration [the profile's]")
    engine("--itl-slo", metavar="LIMIT", help="as in weft serve: 50ms, p99:50ms [off]")
    engine("--num-pages", metavar="N", help="KV pages [the profile's]")
    engine("--max-model-len", metavar="N", help="context length [the profile's]")
    engine("--no-prefix-caching", action="store_true", help="disable the prefix cache")
    engine("--max-queued-requests", metavar="N", help="daemon limit, as in weft serve")
    engine("--max-queued-tokens", metavar="N", help="daemon limit, as in weft serve")
    add_arrival_flags(parser.add_argument_group("arrivals"))
    add_content_flags(parser.add_argument_group("lengths and prefixes"))
    evaluation = parser.add_argument_group("evaluation").add_argument
    evaluation("--slo", metavar="SPEC", action="append", default=[],
        help="objective as in weft load: ttft:p99:500ms, tpot:mean:30ms, nanoflow …; repeatable")  # fmt: skip
    evaluation("--max-failures", metavar="F", default="0.01",
        help="miss mean objectives if more than this share of requests failed [0.01]")  # fmt: skip
    evaluation("--warmup", metavar="TIME", default="0s", help="exclude requests due in this time from results [0s]")
    report = parser.add_argument_group("reports").add_argument
    report("--json", metavar="FILE", type=output_file, help="write all results")
    report("--png", metavar="FILE", type=output_file, help="plot goodput over rates and engines")
    report("--quiet", action="store_true", help="print only the result, no progress")
