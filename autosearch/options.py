"""Options of `weft search` and its related commands. Imports nothing heavy, because `weft --help` loads this."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import NoReturn

from weft import output_file


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line with exit status 2, for commands without the server package."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


def add_workload_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", metavar="P:D", default="1024:512", help="mean prompt and output tokens [1024:512]"
    )


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="MODEL", help="'demo', a model directory or ORG/NAME")
    model.add_argument("--model-preset", metavar="NAME", help="built-in model shape, instead of --model")
    add(
        "--tensor-parallel-size", metavar="N", type=int, default=1,
        help="number of GPUs that share the model; with fewer here and no profile, use formulas [1]",
    )  # fmt: skip
    add(
        "--gpu", metavar="NAME",
        help="search on formulas for this accelerator (see weft plan model), not on a profile "
        "[h200, for several GPUs without a recorded profile]",
    )  # fmt: skip
    add_workload_flag(parser)
    add("--lengths", metavar="FILE", type=Path, help="JSON list of [input, output] pairs, instead of --workload")
    add(
        "--quantization", choices=("fp8",),
        help="search for the model as served with this option; not needed for FP8 checkpoints",
    )  # fmt: skip
    add(
        "--out", metavar="FILE", type=partial(output_file, via_rename=True), required=True,
        help="plan file to write; intermediate results are in FILE.partial"
    )  # fmt: skip
    add("--tokens", metavar="N", type=int, default=2048, help="size of the dense batch [2048]")
    add("--max-num-seqs", metavar="N", type=int, default=1024, help="limit on running requests [1024]")
    add("--profile", metavar="FILE", type=Path, help="recorded profile [this GPU's, else a shipped one]")
    add(
        "--full-profile", action="store_true",
        help="first record a new profile in addition to the budget: every 128 tokens and 8 SMs, hundreds of points",
    )  # fmt: skip
    add("--predict-only", action="store_true", help="measure nothing, even if there is a GPU")
    add(
        "--budget-seconds", metavar="S", type=float, default=540,
        help="time limit of the search, which skips steps as necessary; Ctrl-C or SIGTERM ends it early with the best "
        "result so far [540]",
    )  # fmt: skip
    add(
        "--measure-seconds", metavar="S", type=float, default=1.0,
        help="seconds per measurement of a pipeline; the second half counts, at its sustained clock [1]",
    )  # fmt: skip
    add(
        "--tuning-seconds", metavar="S", type=float, default=60.0,
        help="time limit for tuning new matrix shapes, as at an engine start [60]",
    )  # fmt: skip
    add(
        "--stages", metavar="FILE", type=partial(output_file, via_rename=True),
        help="save solver results here; if the file exists, continue from it (without OR-Tools)",
    )  # fmt: skip
    add("--start", metavar="FILE", type=Path, help="plan file whose pipelines compete with the solver's")
    add("--fresh", action="store_true", help="discard the results of an interrupted search with the same options")
    add("--svg", metavar="FILE", type=output_file, help="draw the pipeline to this file")
