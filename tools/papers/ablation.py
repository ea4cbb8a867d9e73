"""`weft bench ranks`: a model's iteration on several GPUs, with sums over ranks computed in different ways."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from weft import output_file, unwritable
from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.open_bench import compile_first
from weft.autosearch.options import OneLineParser
from weft.autosearch.profile import kv_capacity
from weft.autosearch.ranks_bench import RanksBench
from weft.autosearch.refine import serial_for
from weft.autosearch.workload import workload_load
from weft.engine.config import MAX_BATCHED_TOKENS, PRESETS, EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.model.hub import find_model
from weft.engine.model.operations import Resource
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import TOKEN_STEP, Lane, NanoOperation, Period
from weft.engine.progress import for_stdout
from weft.engine.ranks.links import MAX_RANKS
from weft.tools.papers.ways import WAYS

ATTENTION_SMS, SUM_SMS = 32, 16
"""SMs for attention and for sums in the pipeline of two nano-batches; GEMMs get the others."""
PROFILED_SECONDS = 0.02
"""Seconds of one measurement when a trace is recorded."""
MODEL_SECONDS = 60.0
"""Default time limit for tuning GEMMs of new shapes."""


class Row(NamedTuple):
    """One way at one size of an iteration."""

    way: str
    tokens: int
    timing: Timing
    """Medians per layer; watts and megahertz are means per GPU."""


def nano_batches(spec: ModelSpec, tokens: int, sms: int) -> Period:
    """A pipeline of two nano-batches: attention and sums of each overlap the GEMMs of the other.

    A GEMM that overlaps neither gets all SMs. Raises `ConfigError`.
    """
    if tokens < 2 * TOKEN_STEP:
        raise ConfigError(f"{tokens} tokens are too few for two nano-batches: {2 * TOKEN_STEP} or more")
    half = tokens // 2 // TOKEN_STEP * TOKEN_STEP
    in_order = list(spec.layer_operations())

    def placed(at: int, partner: int) -> tuple[int, Lane]:
        """partner: the operation of the other nano-batch that may overlap operation `at`."""
        op, other = in_order[at], in_order[partner % len(in_order)]
        if op.resource is Resource.MEMORY:
            return ATTENTION_SMS, "memory"
        if op.resource is Resource.NETWORK:
            return SUM_SMS, "network"
        if op.role.attends or other.role.attends:
            return sms - ATTENTION_SMS, "compute"
        return sms - (SUM_SMS if other.resource is Resource.NETWORK else 0), "compute"

    operations = []
    for at, op in enumerate(in_order):
        # The second half runs one operation later than the first, whose next operation may start before it ends.
        operations.append(NanoOperation(op.name, half, tokens, *placed(at, at - 1)))
        operations.append(NanoOperation(op.name, 0, half, *placed(at, at + 1), next_layer=True))
    return Period(tokens, tuple(operations))


class Ablation:
    """Measures ways of one model on one bench."""

    def __init__(
        self, bench: RanksBench, spec: ModelSpec, folder: Path, report: Callable[[str], None] = lambda _: None
    ) -> None:  # fmt: skip
        """spec: rank 0's shard of the model. folder: an empty folder in which ranks find each other. report: gets each
        measurement, so that a hang does not lose earlier ones.
        """
        self._bench, self._spec, self._folder, self._report = bench, spec, folder, report
        self.left_out: dict[tuple[str, int], str] = {}
        """Why a way cannot be measured, by name and tokens; 0: at any number of tokens."""

    def run(self, ways: Sequence[str], load: Load, rounds: int) -> list[Row]:
        """Measure the ways in rotation, so that drifting clocks affect all of them alike."""
        found: dict[str, list[Timing]] = {}
        for _ in range(rounds):
            for name in ways:
                if self.goes(name, load) and (timing := self.measure(name, load)) is not None:
                    found.setdefault(name, []).append(timing)
                    watts = self._spec.shard_of.ranks * timing.watts
                    figures = f"{1e3 * timing.ms:,.1f} us a layer, {watts:.0f} W, {timing.mhz:.0f} MHz"
                    self._report(f"{load.tokens} tokens, {WAYS[name].label}: {figures}")
        rows = []
        for name, timings in found.items():
            medians = Timing(*(statistics.median(v) for v in zip(*timings, strict=True)))
            rows.append(Row(name, load.tokens, medians))
        return rows

    def goes(self, name: str, load: Load) -> bool:
        """Whether the way can be measured, as far as is known."""
        return not {(name, 0), (name, load.tokens)} & self.left_out.keys()

    def measure(self, name: str, load: Load) -> Timing | None:
        """Returns None if the way cannot be measured here; `left_out` has the reason."""
        tokens = 0
        try:
            self._bench.sums(f"{name}:{self._folder}")
            tokens = load.tokens
            period = serial_for(self._spec, load, self._bench.num_sms)
            if WAYS[name].overlapped:
                period = nano_batches(self._spec, period.tokens, self._bench.num_sms)
                period.check(self._spec, self._bench.num_sms)
            return self._bench.period(period, load)
        except ConfigError as error:
            self.left_out[name, tokens] = str(error)
            return None


def figures(row: Row, spec: ModelSpec, without: float | None) -> dict[str, Any]:
    """A row for the table and the JSON file. without: milliseconds of a layer without sums."""
    ranks, ms = spec.shard_of.ranks, row.timing.ms
    seconds = ms * spec.num_layers / 1e3
    watts = ranks * row.timing.watts
    return {
        "way": WAYS[row.way].label,
        "tokens": row.tokens,
        "layer_us": 1e3 * ms,
        "sums_us": None if without is None else 1e3 * (ms - without),
        "tokens_per_second": row.tokens / seconds,
        "tokens_per_second_per_gpu": row.tokens / seconds / ranks,
        "watts_of_all": watts or None,
        "sm_megahertz": row.timing.mhz or None,
        "tokens_per_joule": row.tokens / seconds / watts if watts else None,
    }


def _table(rows: Sequence[dict[str, Any]], title: str) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    heads = ("sums by", "tokens", "us/layer", "sums", "tok/s", "per GPU", "W", "MHz", "tok/J")
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right", no_wrap=True)
    digits = (None, None, 1, 1, 0, 0, 0, 0, 2)
    for row in rows:
        cells = zip(row.values(), digits, strict=True)
        table.add_row(*("-" if v is None else str(v) if d is None else f"{v:,.{d}f}" for v, d in cells))
    for_stdout().print(table)


def _flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="MODEL", help="'demo', a model directory or ORG/NAME; weights are not read")
    model.add_argument("--model-preset", metavar="NAME", help="a built-in model shape instead")
    parser.add_argument("--tensor-parallel-size", metavar="N", type=int, default=2, help="ranks, each with a GPU [2]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the command [cuda]")
    parser.add_argument(
        "--tokens", metavar="N", type=int, nargs="+", default=[2048], help="tokens of an iteration; one or more [2048]"
    )
    parser.add_argument(
        "--workload", metavar="P:D", default="1024:512", help="mean prompt and output tokens [1024:512]"
    )
    parser.add_argument("--ways", metavar="NAMES", default=",".join(WAYS), help=f"some of {','.join(WAYS)} [all]")
    parser.add_argument(
        "--seconds", metavar="S", type=float, default=4.0, help="length of one measurement; its second half counts [4]"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=3, help="measurements of each way, in rotation [3]")
    parser.add_argument(
        "--tuning-seconds", metavar="S", type=float, default=MODEL_SECONDS, help="time for tuning GEMMs [60]"
    )
    parser.add_argument("--trace", metavar="FILE", type=output_file, help="finally trace rank 0: last way, most tokens")
    parser.add_argument("--json", metavar="FILE", type=output_file, help="also write the figures to this file")


def _report(text: str) -> None:
    print(f"weft bench ranks: {text}", file=sys.stderr, flush=True)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Raises `ConfigError`, `ModelError`, `RankLost` or `OutOfMemory`."""
    ranks, ways = arguments.tensor_parallel_size, arguments.ways.split(",")
    if unknown := [name for name in ways if name not in WAYS]:
        raise ConfigError(f"--ways: there is no {', '.join(unknown)}; there are {', '.join(WAYS)}")
    if not 2 <= ranks <= MAX_RANKS:
        raise ConfigError(f"--tensor-parallel-size must be 2 to {MAX_RANKS}; one rank adds up nothing")
    if arguments.rounds < 1 or not 0 < arguments.seconds < math.inf or not 0 <= arguments.tuning_seconds < math.inf:
        raise ConfigError("--rounds and --seconds must be more than 0, --tuning-seconds 0 or more")
    if not 1 <= min(arguments.tokens) <= max(arguments.tokens) <= MAX_BATCHED_TOKENS:
        raise ConfigError(f"--tokens must be 1 to {MAX_BATCHED_TOKENS}")
    name = str(arguments.model_preset or arguments.model)
    model = PRESETS / EngineConfig.known_preset(name) if arguments.model_preset else find_model(name, weights=False)
    spec = read_spec(model).shard(0, ranks)
    loads = [workload_load(arguments.workload, tokens) for tokens in arguments.tokens]
    most = -(-max(arguments.tokens) // TOKEN_STEP) * TOKEN_STEP
    if arguments.device == "cuda":
        import torch

        if (here := torch.cuda.device_count()) < ranks:
            lower = "lower it, or " if here > 1 else ""
            why = f"--tensor-parallel-size {ranks} needs one GPU per rank, and this machine has {here}"
            raise ConfigError(f"{why}; {lower}use --device cpu")
        compile_first(spec, model, most, arguments.tuning_seconds, _report)
    rank: Any = import_module(f"weft.tools.papers.rank_{'gpu' if arguments.device == 'cuda' else 'cpu'}")
    with tempfile.TemporaryDirectory() as folder:
        bench = RanksBench(
            model, ranks, max_tokens=most, max_context=max(max(load.prompt, 2 * load.context) for load in loads),
            seconds=arguments.seconds, tuning_seconds=arguments.tuning_seconds, device=arguments.device,
            progress=_report, open_own=rank.open_rank, module=rank.__name__,
        )  # fmt: skip
        with closing(bench):
            ablation, kept = Ablation(bench, spec, Path(folder), _report), []
            loads = [load.within(kv_capacity(bench.memory, spec)) for load in loads]  # capacity of the whole model
            for load in loads:
                rows = ablation.run(ways, load, arguments.rounds)
                without = next((row.timing.ms for row in rows if row.way == "none"), None)
                found = [figures(row, spec, without) for row in rows]
                _table(found, f"{name}, {ranks} ranks, {load.tokens} tokens, {load.decodes} of them decodes")
                kept += found
                if arguments.json is not None:
                    written = {"model": name, "ranks": ranks, "load": [load._asdict() for load in loads], "rows": kept}
                    try:
                        arguments.json.write_text(json.dumps(written, indent=1) + "\n")
                    except OSError as error:
                        raise WeftError(unwritable(arguments.json, error)) from None
            for (way, _), why in ablation.left_out.items():
                print(f"left out: {WAYS[way].label}: {why}")
            largest = max(loads, key=lambda load: load.tokens)
            if arguments.trace is not None and (gone := [way for way in ways if ablation.goes(way, largest)]):
                _trace(ablation, bench, gone[-1], largest, arguments)
    return 0


def _trace(ablation: Ablation, bench: RanksBench, way: str, load: Load, arguments: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    bench.seconds = PROFILED_SECONDS
    own = ProfilerActivity.CPU if arguments.device == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[own]) as recorded:
        ablation.measure(way, load)
    recorded.export_chrome_trace(str(arguments.trace))
    print(f"{arguments.trace}: {WAYS[way].label}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare ways to compute sums over ranks: time, watts, clocks and tokens per joule of an iteration."""
    parser = OneLineParser("weft bench ranks", main.__doc__)
    _flags(parser)
    try:
        return run(parser.parse_args(argv))
    except WeftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
