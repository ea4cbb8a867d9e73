"""Options of `weft bench server`. Imports nothing heavy: `weft --help` reads this."""

from __future__ import annotations

import argparse

from weft import output_file


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=640, metavar="N", help="streams open at once [640]")
    parser.add_argument("--rate", type=float, default=20.0, metavar="X", help="tokens per second and stream [20]")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="X", help="time measured [10]")
    parser.add_argument("--api-workers", type=int, default=1, metavar="N", help="API processes [1]")
    parser.add_argument(
        "--endpoint",
        choices=("completions", "chat", "responses", "messages"),
        default="completions",
        help="endpoint of the requests [completions]",
    )
    parser.add_argument(
        "--fields", default="{}", metavar="JSON", help='further fields of the requests, such as {"logprobs": 5} [none]'
    )
    parser.add_argument(
        "--tokenize", type=int, default=0, metavar="N", help="meanwhile send prompts of N tokens, one after another"
    )
    parser.add_argument(
        "--scrapes", type=float, default=0, metavar="X",
        help="measure again with X scrapes of /metrics per second; use --streams 1 --rate 1 to isolate their cost",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=output_file, help="also write the figures to this file")
