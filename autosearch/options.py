"""Flags of `weft search`, and what autosearch's commands share. Imports nothing heavy: `weft --help` reads this."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import NoReturn

from weft import output_file


class OneLineParser(argparse.ArgumentParser):
    """For commands that run without the server package: an error is one line and exit status 2."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="MODEL", help="'demo', a model directory or ORG/NAME")
    model.add_argument("--model-preset", metavar="NAME", help="a shape that weft knows, instead")
    parser.add_argument(
        "--tensor-parallel-size", metavar="N", type=int, default=1,
        help="GPUs that share the model, all measured on; modelled where there are fewer and no profile [1]",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", metavar="NAME",
        help="search on a model of this accelerator (see weft plan model), not on a profile "
        "[h200, for several GPUs without a recorded profile]",
    )  # fmt: skip
    parser.add_argument(
        "--workload", metavar="P:D", default="1024:512", help="mean prompt and output tokens [1024:512]"
    )
    parser.add_argument("--lengths", metavar="FILE", type=Path, help="JSON list of [input, output] pairs, instead")
    parser.add_argument(
        "--quantization", choices=("fp8",),
        help="search for the model as an engine with this option serves it; checkpoints in FP8 need it not",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", type=partial(output_file, via_rename=True), required=True,
        help="the plan file to write; it grows in FILE.partial"
    )  # fmt: skip
    parser.add_argument("--tokens", metavar="N", type=int, default=2048, help="the dense batch [2048]")
    parser.add_argument("--max-num-seqs", metavar="N", type=int, default=1024, help="requests running at once [1024]")
    parser.add_argument(
        "--profile", metavar="FILE", type=Path, help="a recorded profile [this GPU's, else a shipped one]"
    )
    parser.add_argument(
        "--full-profile", action="store_true",
        help="first record a new profile, whatever its time: every 128 tokens and 8 SMs, hundreds of measurements",
    )  # fmt: skip
    parser.add_argument("--predict-only", action="store_true", help="measure nothing, even where there is a GPU")
    parser.add_argument(
        "--budget-seconds",
        metavar="S",
        type=float,
        default=540,
        help="time for the whole search, which leaves out what there is no time for; Ctrl-C or SIGTERM ends it early "
        "with the best so far [540]",
    )
    parser.add_argument(
        "--measure-seconds", metavar="S", type=float, default=1.0,
        help="how long a pipeline runs for one measurement; its second half counts, at the clock then left [1]",
    )  # fmt: skip
    parser.add_argument(
        "--tuning-seconds", metavar="S", type=float, default=60.0,
        help="time that tuning matrix shapes never seen before may take, as at a start [60]",
    )  # fmt: skip
    parser.add_argument(
        "--stages", metavar="FILE", type=partial(output_file, via_rename=True),
        help="keep what the solver found here; where the file exists, go on from it (no solver needed)",
    )  # fmt: skip
    parser.add_argument(
        "--start", metavar="FILE", type=Path, help="a plan file whose pipelines compete with those of the solver"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget what an interrupted search of the same had measured and solved"
    )
    parser.add_argument("--svg", metavar="FILE", type=output_file, help="draw the pipeline here")
