"""Flags of `weft bench`. Imports nothing heavy: `weft --help` reads this."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft import output_file


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > 1000:
        raise argparse.ArgumentTypeError(f"must be 0 to 1000, not {text!r}")
    return int(text)


def _some(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"must be 1 to 100000, not {text!r}")
    return int(text)


def add_offline_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--workload",
        metavar="SPEC",
        default="lognormal:161:100:120:90:128",
        help="IN:OUT:REQUESTS, or lognormal:IN_MEAN:IN_SD:OUT_MEAN:OUT_SD:REQUESTS [lognormal:161:100:120:90:128]",
    )
    group.add_argument("--lengths", metavar="FILE", type=Path, help="JSON list of [input, output] pairs, instead")
    group.add_argument(
        "--then", metavar="SPEC", action="append", default=[],
        help="a further workload to run afterwards on the same engine; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--baseline", choices=["transformers", "llama.cpp"],
        help="also run the same requests with it, and print the ratio; llama.cpp needs a GGUF file and its library "
        "(llama-cpp-python or node-llama-cpp)",
    )  # fmt: skip
    group.add_argument(
        "--baseline-batch", metavar="N", type=int, default=64, help="most requests at once in the baseline [64]"
    )
    group.add_argument(
        "--trace", metavar="FILE", type=output_file, help="write a Chrome trace of the traced iterations to this file"
    )
    group.add_argument(
        "--trace-iterations",
        metavar="N",
        type=_count,
        default=6,
        help="iterations in mid-run to trace on a GPU; 0: none [6]",
    )
    group.add_argument("--json", metavar="FILE", type=output_file, help="also write the figures to this file")


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--kind", metavar="KIND", action="append",
        help="kind of prompts, of tools/bench/real_prompts.py; may be repeated [all]",
    )  # fmt: skip
    group.add_argument("--by-kind", action="store_true", help="measure each kind separately instead of a mixture")
    group.add_argument("--temperature", metavar="T", type=float, action="append", help="may be repeated [0, 0.7]")
    group.add_argument("--running", metavar="N", type=_some, action="append", help="may be repeated [1, 4, 16]")
    group.add_argument(
        "--requests", metavar="N", type=_some, help="prompts per pass [each kind once, or twice --running]"
    )
    group.add_argument("--output", metavar="N", type=_some, default=128, help="maximum output tokens [128]")
    group.add_argument("--rounds", metavar="N", type=_some, default=3, help="passes of each engine [3]")
    group.add_argument("--json", metavar="FILE", type=output_file, help="also write the figures to this file")


def add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument("--running", metavar="N", type=int, default=1024, help="requests running at once [1024]")
    group.add_argument("--iterations", metavar="N", type=int, default=300, help="iterations to time [300]")
    group.add_argument("--page-size", metavar="N", type=int, default=64, help="tokens per page [64]")
    group.add_argument("--json", metavar="FILE", type=output_file, help="also write the figures to this file")


def add_multiround_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument("--conversations", metavar="N", type=int, help="[three times as many as fit in the KV pool]")
    group.add_argument("--rounds", metavar="N", type=int, default=8, help="rounds of each conversation [8]")
    group.add_argument("--turn-tokens", metavar="N", type=int, default=200, help="new prompt tokens per round [200]")
    group.add_argument("--output-tokens", metavar="N", type=int, default=50, help="output tokens per round [50]")
    group.add_argument(
        "--restore-tokens", metavar="N", type=int, default=6144,
        help="also time the first token after a history of N tokens, restored and computed; 0: skip [6144]",
    )  # fmt: skip
    group.add_argument("--no-baseline", action="store_true", help="skip the run without tiers")
    group.add_argument("--json", metavar="FILE", type=output_file, help="also write the figures to this file")


def add_agent_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--context-tokens", metavar="N", type=int, default=2000, help="tokens of the first prompt [2000]"
    )
    group.add_argument("--turns", metavar="N", type=int, default=40, help="turns of the conversation [40]")
    group.add_argument("--turn-tokens", metavar="N", type=int, default=200, help="new prompt tokens per turn [200]")
    group.add_argument("--output-tokens", metavar="N", type=int, default=32, help="output tokens per turn [32]")
    group.add_argument(
        "--restores", metavar="N", type=int, default=3, help="further turns with the prefix in each lower tier [3]"
    )
    group.add_argument("--json", metavar="FILE", type=output_file, help="also write the figures to this file")


def add_gguf_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kinds", metavar="TYPE", nargs="*", help="storage types such as Q4_K [the common ones]")
    parser.add_argument(
        "--threads", metavar="N", type=int, action="append", default=[],
        help="threads to convert with; may be repeated [1, 2 and one per core]",
    )  # fmt: skip
