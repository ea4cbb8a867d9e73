"""Flags of `weft load`. Imports nothing heavy: `weft --help` reads this."""

from __future__ import annotations

import argparse

from weft import output_file

EPILOG = (
    "Exit status: 0 measured, and every objective met; 1 an objective missed, or nothing answered; "
    "2 bad input, or no server to measure."
)


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "mode", metavar="sweep", nargs="?", default="run",
        help="search the highest rate within the objectives (--slo); without it, one run",
    )  # fmt: skip
    _server_flags(parser.add_argument_group("server"))
    add_arrival_flags(parser.add_argument_group("arrivals"))
    add_content_flags(parser.add_argument_group("prompts and lengths"))
    _judging_flags(parser.add_argument_group("judging"))
    _sweep_flags(parser.add_argument_group("sweep"))
    _report_flags(parser.add_argument_group("reports"))


def _server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--server", metavar="[NAME=]URL", action="append",
        help="repeat it to compare servers, one after the other [http://127.0.0.1:8000]")  # fmt: skip
    add("--model", help="[the first that /v1/models names]")
    add("--endpoint", choices=["completions", "chat"], help="[completions; chat for conversations]")
    add("--api-key", metavar="KEY", help="[$OPENAI_API_KEY]")
    add("--header", metavar="NAME:VALUE", action="append", default=[], help="a further HTTP header")
    add("--extra", metavar="JSON", help="further fields of every body, such as '{\"temperature\": 0}'")
    add("--timeout", metavar="TIME", default="600s", help="of one request, to the end of its answer [600s]")
    add("--max-context", metavar="N", help="cut requests to this many tokens [what the server tells]")


def add_arrival_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--arrival", choices=["poisson", "gamma", "constant", "ramp", "closed"], help="[poisson, or what flags imply]")
    add("--rate", metavar="R", help="requests (or conversations) per second [1]")
    add("--burstiness", metavar="B", help="gamma arrivals of this shape: 1 is Poisson, less comes in bursts [1]")
    add("--rate-end", metavar="R", help="ramp: Poisson arrivals whose rate rises from --rate to this")
    add("--users", metavar="N", help="closed loop: so many users, each waiting for its answer before it asks again")
    add(
        "--think",
        metavar="TIME",
        help="mean time a user takes between an answer and the next request; exponential [0s]",
    )
    add("--turns", metavar="SPEC", help="conversations of so many requests; a length SPEC as --input [1]")
    add(
        "--context", metavar="N", help="tokens that the first request of a conversation has beside, as agents' have [0]"
    )
    add("--trace", metavar="FILE", help="replay: Azure CSV, Mooncake JSONL, or weft's own JSONL (see --record)")
    add(
        "--speed",
        metavar="X",
        help="replay a trace so many times as fast [1]; --rate stretches it to a mean rate instead",
    )
    add(
        "--duration", metavar="TIME", help="arrivals for so long; then what was sent is waited for [60s, or --requests]"
    )
    add("--requests", metavar="N", help="at most so many requests")
    add("--seed", metavar="N", default="0", help="the same seed makes the same requests at the same times [0]")


def add_content_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--preset", choices=["splitwise", "lmsys", "sharegpt"],
        help="log-normal lengths with the means and deviations of the NanoFlow paper's Table 4")  # fmt: skip
    add("--input", metavar="SPEC", help="prompt tokens: N, uniform:LOW:HIGH or lognormal:MEAN:SD [256]")
    add("--output", metavar="SPEC", help="output tokens, likewise [128]")
    add(
        "--lengths", metavar="FILE", help="JSON list of [input, output] pairs, or a CSV of two columns; drawn at random"
    )
    add(
        "--prompts-file",
        metavar="FILE",
        help="prompts as they are: a text file (one a line), or JSONL with prompt or messages",
    )
    add("--prompts", choices=["ids", "words"],
        help="random token ids, or random words whose tokens the server counts first [ids; chat: words]")  # fmt: skip
    add("--token-ids", metavar="LOW:HIGH", default="300:2000", help="range that token ids are drawn from [300:2000]")
    add("--shared-prefix", metavar="F", default="0", help="fraction of every prompt that it shares with others [0]")
    add("--prefix-groups", metavar="N", default="1", help="so many different shared beginnings [1]")
    add(
        "--eos", action="store_true", help="let answers end early; else ignore_eos and min_tokens ask for exact lengths"
    )


def _judging_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--slo", metavar="SPEC", action="append", default=[],
        help="MEASURE:STATISTIC:LIMIT such as ttft:p99:500ms; measures ttft, itl, tpot, e2e, normalized; "
        "statistics mean, p50 …, max; or nanoflow (normalized:mean:200ms); repeat it")  # fmt: skip
    add(
        "--max-failures",
        metavar="F",
        default="0.01",
        help="a mean is missed when more than this share of requests failed [0.01]",
    )
    add("--warmup", metavar="TIME", default="0s", help="requests due in this time are sent but not judged [0s]")
    add(
        "--drain",
        metavar="TIME",
        help="requests still running so long after the last arrival failed [never; sweep: --duration]",
    )
    add("--processes", metavar="N", default="1", help="processes that send; one drives about a thousand streams [1]")


def _sweep_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--growth", metavar="X", default="2", help="factor between rates until one misses; the first is --rate [2]")
    add("--precision", metavar="F", default="0.05", help="search until met and missed rates are this close [0.05]")
    add("--max-runs", metavar="N", default="20", help="for each server [20]")


def _report_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--html", metavar="FILE", type=output_file, help="one self-contained page with plots")
    add("--json", metavar="FILE", type=output_file, help="all figures")
    add("--format", choices=["weft", "inferencex"], default="weft",
        help="of --json; inferencex: rows with the fields of the public InferenceX results, which are of a fixed "
        "concurrency (--users) and fixed lengths [weft]")  # fmt: skip
    add("--row", metavar="FIELD=VALUE", action="append", default=[],
        help="--format inferencex: what the server does not tell, such as hw=h200, precision=fp8, tp=2; repeat it",
    )  # fmt: skip
    add("--csv", metavar="FILE", type=output_file, help="one row a request")
    add(
        "--record",
        metavar="FILE",
        type=output_file,
        help="JSON lines, one a request, with every token gap; can be replayed with --trace",
    )
    add("--quiet", action="store_true", help="no progress; only the result")
