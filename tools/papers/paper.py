"""`weft bench batching`: Table IV and Figures 2-4 and 8-11 of "Mind the Memory Gap" (arXiv 2503.08311) on this engine.

A separate process measures each model and writes its points to a file, from which the next run continues. Tables and
pictures show the files that exist.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import msgspec
from pydantic import ValidationError

from weft import install_hint
from weft.autosearch.advisor import curve as curves
from weft.autosearch.advisor.curve import Curve
from weft.autosearch.options import OneLineParser
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, WeftError, invalid_option
from weft.tools.papers.paper_table import markdown, table_iv

MODELS = ("opt-1.3b", "opt-2.7b", "llama-2-7b", "llama-2-13b")


def config_of(name: str, device: str, max_num_seqs: int | None) -> EngineConfig:
    """The configuration of a preset, 'demo' or a directory. Raises `ConfigError`."""
    if name == "demo" or Path(name).is_dir():
        model = {"model": name}
    else:
        model = {"model_preset": EngineConfig.known_preset(name), "load_format": "dummy"}
    try:
        return EngineConfig.model_validate(
            {**model, "device": device, "prefix_caching": False, "max_num_seqs": max_num_seqs}
        )
    except ValidationError as error:
        raise ConfigError(": ".join(filter(None, invalid_option(error, EngineConfig)))) from None


def points_file(out: Path, name: str) -> Path:
    return out / f"{Path(name).name}.json"


def main(argv: Sequence[str]) -> int:
    """Reproduce the table and figures on batching of "Mind the Memory Gap", with dummy weights."""
    parser = OneLineParser("weft bench batching", main.__doc__)
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, required=True, help="folder for points, table and pictures")
    add(
        "--models",
        metavar="NAME",
        nargs="+",
        default=list(MODELS),
        help=f"presets, or directories [{' '.join(MODELS)}]",
    )
    add("--workload", metavar="P:D", default="161:338", help="prompt and output tokens of a request [161:338]")
    add("--budget-seconds", metavar="S", type=float, default=1500.0, help="time for everything [1500]")
    add("--point-seconds", metavar="S", type=float, default=3.0, help="how long one bound is measured [3]")
    add("--max-num-seqs", metavar="N", type=int, help="largest bound [GPU 1024, CPU 256]")
    add("--replicas", metavar="N", type=int, default=4, help="most engines side by side; 0: none [4]")
    add("--no-lengths", action="store_true", help="skip the runs of Figure 9 with longer prompts and outputs")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="[auto]")
    arguments = parser.parse_args(argv)
    if find_spec("matplotlib") is None:
        print(f"{parser.prog}: pictures need matplotlib: {install_hint('loadgen')}", file=sys.stderr)
        return 2
    try:
        for name in arguments.models:
            config_of(name, arguments.device, arguments.max_num_seqs)
        arguments.out.mkdir(parents=True, exist_ok=True)
        if not os.access(arguments.out, os.W_OK | os.X_OK):  # checked before half an hour of measurements
            raise ConfigError(f"cannot write in {arguments.out}: this user may not")
        failed = _measure_all(arguments)
        found = [curves.load(p) for m in arguments.models if (p := points_file(arguments.out, m)).exists()]
        if not found:
            raise ConfigError("no model was measured")
        write(found, arguments.out)
    except WeftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        print(f"{parser.prog}: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 1 if failed else 0


def _measure_all(arguments: argparse.Namespace) -> bool:
    """Measure each model in a process. Returns whether one failed.

    Time that a model does not use goes to the others. After Ctrl-C the running model saves its points and the rest are
    skipped.
    """
    models: list[str] = arguments.models
    end, failed = time.monotonic() + arguments.budget_seconds, False
    for i, name in enumerate(models):
        seconds = (end - time.monotonic()) / (len(models) - i)
        if seconds <= 1:
            print(f"weft bench batching: no time was left for {name}", file=sys.stderr)
            failed = True
            continue
        order = {key: str(v) if isinstance(v, Path) else v for key, v in vars(arguments).items()}
        order |= {
            "name": name,
            "budget_seconds": seconds,
            "config": config_of(name, arguments.device, arguments.max_num_seqs).model_dump_json(),
            "file": str(points_file(arguments.out, name)),
            "lengthen": i == 0 and not arguments.no_lengths,
        }
        line = [sys.executable, "-P", "-m", "weft.tools.papers.paper_run", json.dumps(order)]
        code, stopped = _run(line)
        failed = code != 0 or failed
        if stopped:
            break
    return failed


def _run(line: list[str]) -> tuple[int, bool]:
    """Run a command that gets Ctrl-C and SIGTERM only from here. Returns its status and whether it got one."""
    stopped = False
    child: subprocess.Popen[bytes] | None = None

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if child is not None:
            child.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(line, process_group=0)  # a terminal's Ctrl-C would arrive twice, which ends it at once
        if stopped:
            child.send_signal(signal.SIGINT)
        return child.wait(), stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write(found: Sequence[Curve], out: Path) -> None:
    """Write the table and the pictures. Raises `OSError`."""
    from weft.autosearch.advisor import plots  # matplotlib may be missing
    from weft.tools.papers import paper_figures

    rows = [row for curve in found for row in table_iv(curve)]
    (out / "table_4.md").write_text(markdown(rows), encoding="utf-8")
    (out / "table_4.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    longer = out / "figure_9.json"
    activity = msgspec.json.decode(longer.read_bytes()) if longer.exists() else []
    for name, drawn in paper_figures.figures(found, activity).items():
        (out / f"{name}.png").write_bytes(plots.png(drawn))
    print(markdown(rows))
