"""Defines the flags of `weft load`. Imports nothing heavy, because `weft --help` loads it."""

from __future__ import annotations

import argparse

from weft import output_file

EPILOG = (
    "Exit status: 0 if every objective is met; 1 if an objective is missed or nothing was answered; "
    "2 for bad input or if no server responds."
)


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "mode", metavar="sweep", nargs="?", default="run",
        help="find the highest rate that meets the objectives (--slo); default: a single run",
    )  # fmt: skip
    add = parser.add_argument_group("server").add_argument
    add("--server", metavar="[NAME=]URL", action="append",
        help="server to test; repeat to compare servers in sequence [http://127.0.0.1:8000]")  # fmt: skip
    add("--model", help="model name [the first in /v1/models]")
    add("--endpoint", choices=["completions", "chat"], help="API to use [completions; chat for conversations]")
    add("--api-key", metavar="KEY", help="API key [$OPENAI_API_KEY]")
    add("--header", metavar="NAME:VALUE", action="append", default=[], help="add an HTTP header")
    add("--extra", metavar="JSON", help="add fields to every body, such as '{\"temperature\": 0}'")
    add("--timeout", metavar="TIME", default="600s", help="time limit of a request, to the end of its answer [600s]")
    add("--max-context", metavar="N", help="cut requests to this many tokens [the server's limit]")
    add_arrival_flags(parser.add_argument_group("arrivals"))
    contents = parser.add_argument_group("prompts and lengths")
    add_content_flags(contents)
    contents.add_argument("--images", metavar="N[xWIDTHxHEIGHT]",
        help="send this many generated PNG images with each request; chat only [0; 512x512]")  # fmt: skip
    add = parser.add_argument_group("evaluation").add_argument
    add("--slo", metavar="SPEC", action="append", default=[],
        help="objective MEASURE:STATISTIC:LIMIT, such as ttft:p99:500ms; measures ttft, itl, stall, tpot, e2e, "
        "normalized; statistics mean, p50 …, max; or nanoflow (normalized:mean:200ms); repeatable")  # fmt: skip
    add("--max-failures", metavar="F", default="0.01",
        help="miss mean objectives if more than this share of requests failed [0.01]")  # fmt: skip
    add("--warmup", metavar="TIME", default="0s",
        help="send requests due in this time, but exclude them from results [0s]")  # fmt: skip
    add("--drain", metavar="TIME",
        help="fail requests still running this long after the last arrival [never; sweep: --duration]")  # fmt: skip
    add("--processes", metavar="N", default="1", help="sending processes; one drives about a thousand streams [1]")
    add = parser.add_argument_group("sweep").add_argument
    add("--growth", metavar="X", default="2", help="growth factor of the rate until a miss, starting at --rate [2]")
    add("--precision", metavar="F", default="0.05", help="stop when met and missed rates are this close [0.05]")
    add("--max-runs", metavar="N", default="20", help="maximum runs per server [20]")
    add = parser.add_argument_group("reports").add_argument
    add("--html", metavar="FILE", type=output_file, help="write a self-contained page with plots")
    add("--json", metavar="FILE", type=output_file, help="write all results")
    add("--format", choices=["weft", "inferencex"], default="weft",
        help="format of --json; inferencex: rows with the fields of the public InferenceX results, for a fixed "
        "concurrency (--users) and fixed lengths [weft]")  # fmt: skip
    add("--row", metavar="FIELD=VALUE", action="append", default=[],
        help="--format inferencex: set fields the server does not report, such as hw=h200, tp=2; "
        "repeatable")  # fmt: skip
    add("--csv", metavar="FILE", type=output_file, help="write one row per request")
    add("--record", metavar="FILE", type=output_file,
        help="write JSON lines, one per request, with every token gap; --trace can replay it")  # fmt: skip
    add("--quiet", action="store_true", help="print only the result, no progress")


def add_arrival_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--arrival", choices=["poisson", "gamma", "constant", "ramp", "closed"],
        help="arrival process [poisson, or implied by other flags]")  # fmt: skip
    add("--rate", metavar="R", help="requests (or conversations) per second [1]")
    add("--burstiness", metavar="B", help="shape of gamma arrivals: 1 is Poisson, less is burstier [1]")
    add("--rate-end", metavar="R", help="ramp: Poisson arrivals with a rate that rises from --rate to this")
    add("--users", metavar="N", help="closed loop: number of users, each waiting for an answer before the next request")
    add("--think", metavar="TIME", help="mean think time between an answer and the next request; exponential [0s]")
    add("--turns", metavar="SPEC", help="requests per conversation; a SPEC as in --input [1]")
    add("--context", metavar="N", help="extra tokens in a conversation's first request, as agents send [0]")
    add("--trace", metavar="FILE", help="replay a trace: Azure CSV, Mooncake JSONL, or weft JSONL (see --record)")
    add("--speed", metavar="X", help="speed up a trace by this factor [1]; or use --rate to set its mean rate")
    add("--duration", metavar="TIME",
        help="time during which requests arrive; then wait for answers [60s, or --requests]")  # fmt: skip
    add("--requests", metavar="N", help="maximum number of requests")
    add("--seed", metavar="N", default="0", help="random seed; equal seeds give equal requests at equal times [0]")


def add_content_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--preset", choices=["splitwise", "lmsys", "sharegpt", "arxiv"],
        help="log-normal lengths with means and deviations of the NanoFlow paper's Table 4, or of summaries of papers "
        "(arxiv)")  # fmt: skip
    add("--input", metavar="SPEC", help="prompt tokens: N, uniform:LOW:HIGH or lognormal:MEAN:SD [256]")
    add("--output", metavar="SPEC", help="output tokens, in the same format [128]")
    add("--lengths", metavar="FILE", help="draw lengths from a JSON list of [input, output] pairs, or a two-column CSV")
    add("--prompts-file", metavar="FILE",
        help="send these prompts: a text file (one per line), or JSONL with prompt or messages")  # fmt: skip
    add("--prompts", choices=["ids", "words"],
        help="random token ids, or words calibrated with the server's token counts [ids; chat: words]")  # fmt: skip
    add("--token-ids", metavar="LOW:HIGH", default="300:2000", help="range of random token ids [300:2000]")
    add("--shared-prefix", metavar="F", default="0", help="fraction of each prompt shared with others [0]")
    add("--prefix-groups", metavar="N", default="1", help="number of distinct shared prefixes [1]")
    add("--eos", action="store_true",
        help="let answers end early; by default, ignore_eos and min_tokens force exact lengths")  # fmt: skip
