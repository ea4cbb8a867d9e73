"""Flags of `weft bench iterations`. Imports nothing heavy: `weft --help` reads this."""

from __future__ import annotations

import argparse

from weft import output_file


def add_iterations_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recording").add_argument
    group("--out", metavar="FILE", type=output_file, required=True, help="the profile, for weft fleet --profile")
    group("--seconds", metavar="S", type=float, default=60.0, help="approximate time for recording [60]")
    group("--processor-time", action="store_true",
        help="measure processor time, which other work does not disturb (CPU engines with one thread)")  # fmt: skip
    group("--server", metavar="URL",
        help="also measure the overhead around the engine, at an idle daemon with this model")  # fmt: skip
