"""`weft bench batching`: Table IV and Figures 2-4 and 8-11 of "Mind the Memory Gap" (arXiv 2503.08311) on this engine.

Each model is measured by a process of its own, into a file of points that the next run goes on from; tables and
pictures are made of the files that there are.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from pydantic import ValidationError

from weft import install_hint
from weft.autosearch.advisor import curve as curves
from weft.autosearch.advisor.curve import Curve, Point
from weft.autosearch.advisor.replicas import advise_replicas
from weft.autosearch.advisor.solve import Solution, solve
from weft.autosearch.options import OneLineParser
from weft.engine.config import EngineConfig, Objective
from weft.engine.errors import ConfigError, WeftError

MODELS = ("opt-1.3b", "opt-2.7b", "llama-2-7b", "llama-2-13b")
EPSILON = 0.1
REFERENCE = 32
"""the bound whose mean latency the objectives are made of (paper, §VI-A)"""
FACTORS = {"strict": 2.0, "relaxed": 4.0}
SWEEP_SHARE = 0.6
"""of a model's time; the rest is for replicas"""
LENGTHS = (100, 200, 400, 800)
"""of Figure 9: prompts, then outputs; the other has the first of them"""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of Table IV."""

    model: str
    config: str
    """MAX, or the objective's name and how many replicas"""
    bound: int
    batch: float
    tokens_per_s: float
    itl_ms: float
    kv_share: float | None
    """of one engine's pool that has all the memory"""
    idle_share: float
    dram_share: float | None = None
    warps_share: float | None = None
    joules_per_token: float | None = None
    of_max: float = 1.0
    """throughput, of that of MAX"""
    advice: str = ""


def config_of(name: str, device: str, max_num_seqs: int | None) -> EngineConfig:
    """Of a preset, 'demo' or a directory. Raises `ConfigError`."""
    if name == "demo" or Path(name).is_dir():
        model = {"model": name}
    else:
        model = {"model_preset": EngineConfig.known_preset(name), "load_format": "dummy"}
    try:
        return EngineConfig.model_validate(
            {**model, "device": device, "prefix_caching": False, "max_num_seqs": max_num_seqs}
        )
    except ValidationError as error:
        raise ConfigError(str(error.errors()[0]["msg"])) from None


def points_file(out: Path, name: str) -> Path:
    return out / f"{Path(name).name}.json"


def objectives(curve: Curve) -> dict[str, list[Objective]]:
    """The paper's two, of the mean time between tokens; none where its reference was not measured."""
    reference = curve.known(REFERENCE)
    if reference is None or reference.itl.mean is None:
        return {}
    return {name: [Objective("itl", None, factor * reference.itl.mean)] for name, factor in FACTORS.items()}


def table_iv(curve: Curve) -> list[Row]:
    """MAX; then for each objective the bound that is found, its replicas, and what the advisor says about them."""
    solved = {name: solve(curve, slo, EPSILON) for name, slo in objectives(curve).items()}
    most = solve(curve, [], 0.0, tie=0.0).most
    rows = [_row(curve, "MAX", most.point, most.throughput, "")]
    for name, solution in solved.items():
        if solution.best is None:
            continue
        advice = advise_replicas(curve, solution.best)
        said = f"replicas: {advice.replicas} ({advice.reason})"
        rows.append(_row(curve, name, solution.best.point, most.throughput, said))
        for r in curve.replicas:
            if r.bound == solution.best.point.bound and r.replicas > 1:
                throughput = curve.throughput(r)
                rows.append(
                    Row(
                        model=curve.model, config=f"{name}, {r.replicas} replicas", bound=r.bound, batch=r.batch,
                        tokens_per_s=throughput, itl_ms=1e3 * r.itl.at(None), kv_share=None, idle_share=r.idle_share,
                        of_max=throughput / most.throughput,
                    )
                )  # fmt: skip
    return rows


def _row(curve: Curve, config: str, point: Point, most: float, advice: str) -> Row:
    throughput = curve.throughput(point)
    return Row(
        model=curve.model, config=config, bound=point.bound, batch=point.batch, tokens_per_s=throughput,
        itl_ms=1e3 * point.itl.at(None), kv_share=point.kv_pages / max(1, curve.machine.pages),
        idle_share=point.idle_share, dram_share=point.dram_share, warps_share=point.warps_share,
        joules_per_token=point.joules_per_token, of_max=throughput / most, advice=advice,
    )  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    head = "| model | | bound | ran | tokens/s | of MAX | ITL ms | KV | device waits | DRAM | warps | J/token |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        cells = [
            r.model, r.config, str(r.bound), f"{r.batch:.1f}", f"{r.tokens_per_s:,.0f}", f"{r.of_max:.2f}",
            f"{r.itl_ms:.2f}", _percent(r.kv_share), f"{r.idle_share:.1%}", _percent(r.dram_share),
            _percent(r.warps_share), "–" if r.joules_per_token is None else f"{r.joules_per_token:.3f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    said = [f"- {r.model}, {r.config}: {r.advice}" for r in rows if r.advice]
    return "\n".join([*lines, "", *said]) + "\n"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def main(argv: Sequence[str]) -> int:
    """Do the tables and figures on batching of "Mind the Memory Gap" again, with dummy weights."""
    parser = OneLineParser("weft bench batching", main.__doc__)
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, required=True, help="folder of points, table and pictures")
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
    add("--replicas", metavar="N", type=int, default=4, help="engines side by side at most [4]")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="[auto]")
    add("--one", metavar="NAME", help="measure this model alone, in this process; draw nothing")
    arguments = parser.parse_args(argv)
    from importlib.util import find_spec

    if arguments.one is None and find_spec("matplotlib") is None:
        print(f"{parser.prog}: pictures need matplotlib: {install_hint('loadgen')}", file=sys.stderr)
        return 2
    try:
        for name in arguments.models:
            config_of(name, arguments.device, arguments.max_num_seqs)
        arguments.out.mkdir(parents=True, exist_ok=True)
        if arguments.one is not None:
            from weft.autosearch.advisor.paper_run import measure_model

            measure_model(arguments, arguments.one)
            return 0
        failed = _measure_all(arguments, [*argv])
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


def _measure_all(arguments: object, argv: list[str]) -> bool:
    """Each model in a process; says whether one failed. Time that one leaves is the others'."""
    models: list[str] = arguments.models  # type: ignore[attr-defined]
    end, failed = time.monotonic() + arguments.budget_seconds, False  # type: ignore[attr-defined]
    for i, name in enumerate(models):
        seconds = (end - time.monotonic()) / (len(models) - i)
        if seconds <= 1:
            print(f"weft bench batching: no time was left for {name}", file=sys.stderr)
            failed = True
            continue
        line = [sys.executable, "-P", "-m", "weft.autosearch.advisor.paper", *argv]
        status = subprocess.run([*line, "--one", name, "--budget-seconds", str(seconds)], check=False).returncode
        failed = failed or status != 0
    return failed


def write(found: Sequence[Curve], out: Path) -> None:
    """Table and pictures. Raises `OSError`."""
    from weft.autosearch.advisor import paper_figures, plots

    rows = [row for curve in found for row in table_iv(curve)]
    (out / "table_4.md").write_text(markdown(rows), encoding="utf-8")
    (out / "table_4.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    longer = out / "figure_9.json"
    activity = msgspec.json.decode(longer.read_bytes()) if longer.exists() else []
    for name, drawn in paper_figures.figures(found, activity).items():
        (out / f"{name}.png").write_bytes(plots.png(drawn))
    print(markdown(rows))


def best(curve: Curve) -> Solution | None:
    """Under the strict objective."""
    strict = objectives(curve).get("strict")
    return solve(curve, strict, EPSILON) if strict else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
