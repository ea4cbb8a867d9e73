"""Implements `weft fleet`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from weft import install_hint, unwritable
from weft.deploy.fleet import report, settings
from weft.deploy.fleet.engine import EngineOptions
from weft.deploy.fleet.search import Point, best, explore
from weft.deploy.fleet.settings import Settings
from weft.loadgen.errors import LoadError


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status. A `LoadError` becomes one line on stderr and status 2."""
    try:
        return _run(settings.read(arguments))
    except LoadError as error:
        print(f"weft fleet: {error}", file=sys.stderr)
        return 2


def _run(options: Settings) -> int:
    if options.png is not None and find_spec("matplotlib") is None:
        raise LoadError(f"--png needs matplotlib: {install_hint('loadgen')}")
    points: list[Point] = []
    known = len(options.rates) * len(options.configurations) * len(options.engines)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=options.quiet,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=1.0)

        def on_begin(
            engines: int, configuration: EngineOptions, rate: float | None, duration: float
        ) -> Callable[[float], None]:
            number = f"{len(points) + 1}" + (f" of {known}" if known else "")
            at = "" if rate is None else f" at {rate:g}/s"
            words = f"{number}: {engines} engines{at}, {configuration.seqs} seqs"
            bar.reset(task, total=max(duration, 1e-9), description=words)
            return lambda now: bar.update(task, completed=min(now, duration))

        for point in explore(options, on_begin):
            points.append(point)
    for file, write in ((options.json, report.write_json), (options.png, report.draw)):
        if file is not None:
            try:
                write(file, points, options)
            except OSError as error:
                raise LoadError(unwritable(file, error)) from None
    report.print_points(points, options)
    return 1 if options.objectives and any(point is None for point in best(points).values()) else 0
