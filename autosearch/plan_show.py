"""`weft plan show FILE`: prints a plan and draws its pipelines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from weft import output_file, unwritable
from weft.autosearch import gantt
from weft.autosearch.options import OneLineParser
from weft.engine.config import PRESETS
from weft.engine.errors import ConfigError, ModelError, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.model.hub import find_model
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Plan, load_plan, model_key
from weft.engine.progress import for_stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan file and draw its pipelines."""
    parser = OneLineParser(prog="weft plan show", description=main.__doc__)
    parser.add_argument("file", metavar="FILE", type=Path, help="plan file written by `weft search`")
    parser.add_argument(
        "--svg", metavar="FILE", type=output_file, help="also draw the pipelines to this file, FILE-2.svg …"
    )
    parser.add_argument(
        "--model", metavar="MODEL",
        help="model of the plan, to check it: 'demo', a model directory or ORG/NAME [a preset with the same shapes]",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    try:
        plan = load_plan(arguments.file)
        checked = _check(plan, arguments.file, arguments.model)
        console = for_stdout()
        t = plan.target
        console.print(f"{arguments.file}: {gantt.summary(plan)}", highlight=False, soft_wrap=True)
        console.print(f"for {t.gpu} ({t.sms} SMs), {t.model}, {t.dtype}, kernels {t.kernels}", highlight=False)
        console.print(f"workload {plan.workload}" + (f"; made {plan.made}" if plan.made else ""), highlight=False)
        if not checked:
            console.print("not checked, because no preset has these shapes: give the model with --model MODEL")
        for i, period in enumerate(plan.periods):
            gantt.draw(period, console, f"pipeline {i + 1} of {len(plan.periods)}")
            if arguments.svg is not None:
                name = arguments.svg if not i else arguments.svg.with_stem(f"{arguments.svg.stem}-{i + 1}")
                try:
                    name.write_text(gantt.svg(period, f"{t.gpu}, {plan.workload}"))
                except OSError as error:
                    raise ConfigError(unwritable(name, error)) from None
        if arguments.svg is not None and not plan.periods:
            console.print(f"{arguments.svg}: not written, because there is no pipeline to draw", highlight=False)
    except WeftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _check(plan: Plan, file: Path, name: str | None) -> bool:
    """Check the pipelines against the model, as an engine does. name: the model; None: presets with the same shapes.

    Returns False if there is no such preset. Raises `ConfigError` if the model cannot run the plan."""
    ranks = int(found[1]) if (found := re.search(r" ranks=(\d+)$", plan.target.model)) else 1
    wrong: ConfigError | None = None
    for spec in _specs(name, ranks):
        if (key := model_key(spec)) != plan.target.model:
            if name is not None:
                raise ConfigError(f"{file} is a plan for another model ({plan.target.model}), not {key}")
            continue
        try:
            bound = plan.spec_of(spec)
            for period in plan.periods:
                period.check(bound, plan.target.sms)
        except ConfigError as error:
            wrong = ConfigError(f"{file} is not a valid plan: {error}")
        else:
            return True
    if wrong is not None:
        raise wrong
    return False


def _specs(name: str | None, ranks: int) -> Iterator[ModelSpec]:
    """Yield one rank's shard of the model, or of each preset."""
    if name is not None:
        yield read_spec(find_model(name, weights=False)).shard(0, ranks)
        return
    for folder in sorted(PRESETS.iterdir()):
        with suppress(ModelError):  # it cannot be split over these ranks
            yield read_spec(folder).shard(0, ranks)
