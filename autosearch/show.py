"""`weft plan show FILE`: prints a plan and draws its pipelines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from weft.autosearch import gantt
from weft.autosearch.options import OneLineParser
from weft.engine.errors import ConfigError, WeftError
from weft.engine.plans.plan import load_plan
from weft.engine.progress import for_stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan file and draw its pipelines."""
    parser = OneLineParser(prog="weft plan show", description=main.__doc__)
    parser.add_argument("file", metavar="FILE", type=Path, help="a plan of `weft search`")
    parser.add_argument(
        "--svg", metavar="FILE", type=Path, help="draw it here as well; several pipelines: FILE-2.svg …"
    )
    arguments = parser.parse_args(argv)
    try:
        plan = load_plan(arguments.file)
        console = for_stdout()
        t = plan.target
        console.print(f"{arguments.file}: {gantt.summary(plan)}", highlight=False, soft_wrap=True)
        console.print(f"for {t.gpu} ({t.sms} SMs), {t.model}, {t.dtype}, kernels {t.kernels}", highlight=False)
        console.print(f"workload {plan.workload}" + (f"; made {plan.made}" if plan.made else ""), highlight=False)
        for i, period in enumerate(plan.periods):
            gantt.draw(period, console, f"pipeline {i + 1} of {len(plan.periods)}")
            if arguments.svg is not None:
                name = arguments.svg if not i else arguments.svg.with_stem(f"{arguments.svg.stem}-{i + 1}")
                try:
                    name.write_text(gantt.svg(period, f"{t.gpu}, {plan.workload}"))
                except OSError as error:
                    raise ConfigError(f"cannot write --svg {name}: {error.strerror}") from None
        if arguments.svg is not None and not plan.periods:
            console.print(f"{arguments.svg}: not written, for there is no pipeline to draw", highlight=False)
    except WeftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
