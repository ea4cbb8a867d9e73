"""`weft plan model`: the cost of a model on an accelerator, by the cost model alone (NanoFlow Table 2)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from weft.autosearch import cost_model as costmodel
from weft.autosearch.accelerators import ACCELERATORS, accelerator
from weft.autosearch.options import OneLineParser, add_workload_flag
from weft.autosearch.workload import workload_pair
from weft.engine.config import PRESETS, EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.model.hub import find_model
from weft.engine.model.operations import Resource
from weft.engine.model.spec import ModelSpec
from weft.engine.progress import for_stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Print the time, energy and bottleneck of every operation of an iteration, and the optimal throughput."""
    from rich import box
    from rich.table import Table

    parser = OneLineParser(prog="weft plan model", description=main.__doc__)
    names = ", ".join(a.name for a in ACCELERATORS)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="MODEL", help="'demo', a model directory, ORG/NAME or a preset's name")
    model.add_argument("--model-preset", metavar="NAME", help="built-in model shape, instead of --model")
    add_workload_flag(parser)
    parser.add_argument("--gpu", metavar="NAME", default="h200", help=f"one of {names} [h200]")
    parser.add_argument("--gpus", metavar="N", type=int, default=1, help="number of GPUs that share the model [1]")
    parser.add_argument("--tokens", metavar="N", type=int, default=2048, help="most tokens of the dense batch [2048]")
    arguments = parser.parse_args(argv)
    try:
        if arguments.gpus < 1 or arguments.tokens < 1:
            raise ConfigError("--gpus and --tokens must be at least 1")
        if arguments.gpus > 1024 or arguments.tokens > 2**20:
            raise ConfigError(f"--gpus must be at most 1024, and --tokens at most {2**20}")
        device, spec = accelerator(arguments.gpu), _spec(arguments.model, arguments.model_preset)
        prompt, output = workload_pair(arguments.workload)
        gpus, usage = arguments.gpus, costmodel.Usage(arguments.tokens, prompt, output)
        memory = gpus * (device.built_gb or device.mem_gb)
        most = costmodel.most_tokens(spec, usage, memory)
        if most < 1:
            raise ConfigError(
                f"{memory:g} GB are too little for the weights and one request of {prompt + output} tokens: use more "
                "--gpus or a larger --gpu"
            )
    except WeftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    tokens = min(arguments.tokens, most)
    usage = usage._replace(dense_batch=tokens)
    costs = costmodel.operation_costs(spec, usage, gpus)
    title = f"one iteration of {tokens} tokens, {gpus} x {device.name}, all layers"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ["operation", "GFLOP", "GB", "net GB", "compute ms", "memory ms", "net ms", "power ms", "bound"]:
        text = name in ("operation", "bound")
        table.add_column(name, justify="left" if text else "right", no_wrap=text, overflow="fold")
    powers = [cost.power_seconds(device, gpus) for cost in costs]
    powers.append(sum(p for p in powers if p) if any(powers) else None)
    for cost, power in zip([*costs, costmodel.total(costs)], powers, strict=True):
        seconds = cost.seconds(device, gpus)
        table.add_row(
            cost.name, f"{cost.gflop:.1f}", f"{cost.mem_gb:.1f}", f"{cost.net_gb:.1f}",
            *(f"{seconds[r] * 1e3:.2f}" for r in (Resource.COMPUTE, Resource.MEMORY, Resource.NETWORK)),
            "-" if power is None else f"{power * 1e3:.2f}", cost.bound(device, gpus).value,
        )  # fmt: skip
    console = for_stdout()
    console.print(table)
    if tokens < arguments.tokens:
        held = "keys, values and states" if spec.recurrent else "keys and values"
        console.print(
            f"{arguments.tokens} tokens do not fit: next to the weights, the {memory:g} GB hold the {held} of "
            f"{usage.decodes:.0f} decodes of {usage.context:g} tokens, so the dense batch is {tokens}", highlight=False,
        )  # fmt: skip
    ratio = costmodel.t_ratio(tokens, spec.active_parameters, device, gpus)
    kind = costmodel.classify(tokens, spec.active_parameters, device, gpus).value
    best = costmodel.optimal_throughput(device.gflops * 1e9, spec.active_parameters)
    console.print(f"T_R {ratio:.2f}: bound by {kind} (Equation 4)", highlight=False)
    console.print(f"optimal throughput {best:,.0f} tokens/s/GPU at the rated FLOP/s (Equation 5)", highlight=False)
    return 0


def _spec(model: str | None, preset: str | None) -> ModelSpec:
    """Read the model of `--model`, which may be a preset's name too, or of `--model-preset`. Raises `WeftError`."""
    if preset is None and model and not Path(model).exists() and (PRESETS / model / "config.json").exists():
        preset = model
    return read_spec(PRESETS / EngineConfig.known_preset(preset) if preset else find_model(str(model), weights=False))
