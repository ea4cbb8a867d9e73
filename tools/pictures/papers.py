"""Draw the pictures of docs/papers.md and write its tables, from formulas and the shipped profile.

    make benchmarks

Nothing is measured here. A picture says which data it shows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from weft.autosearch import cost_model
from weft.autosearch.accelerators import ACCELERATORS, Accelerator, accelerator
from weft.autosearch.cost_model import Cost, Usage
from weft.autosearch.machine import Machine
from weft.autosearch.profile import SHIPPED, load_profile, work_of
from weft.autosearch.workload import workload_load
from weft.engine.config import PRESETS
from weft.engine.model.directory import read_spec
from weft.engine.model.operations import Resource
from weft.engine.model.spec import ModelSpec
from weft.loadgen import lengths
from weft.tools.pictures.drawing import Axis, Series, chart, heat_map

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/papers.md"
PICTURES = ROOT / "deploy/pictures"
PROFILE = "llama-3-8b-h200.json"
DENSE_BATCH = 2048
GRID = range(128, DENSE_BATCH + 1, 128)
"""Dense batches of the roofline: the profile's token counts."""
MODELS = (("llama-3-8b", 1), ("mixtral-8x7b", 8), ("llama-2-70b", 8), ("llama-3-70b", 8), ("qwen2-72b", 8))
"""Models of NanoFlow's Figure 3, and their A100s."""
LENGTHS = ((512, 512), (1024, 512), (512, 1024))
SHARE_TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
BLUE, GREEN = (90, 150, 220), (110, 190, 120)


class Measured(NamedTuple):
    """An operation of one layer: its cost by the formulas, and its time alone on all SMs by the profile."""

    name: str
    tokens: int
    cost: Cost
    ms: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.cost.gflop / self.cost.mem_gb

    @property
    def tflops(self) -> float:
        return self.cost.gflop / self.ms

    @property
    def gbs(self) -> float:
        return self.cost.mem_gb / self.ms * 1e3


def spec_of(preset: str) -> ModelSpec:
    return read_spec(PRESETS / preset)


def dense_batch(spec: ModelSpec, prompt: float, output: float, device: Accelerator, gpus: int) -> int:
    """Return the largest dense batch that fits."""
    return cost_model.most_tokens(spec, Usage(1, prompt, output), gpus * (device.built_gb or device.mem_gb))


def figure_2() -> str:
    """NanoFlow Figure 2: network time over compute time, models by accelerators."""
    rows = []
    for preset, _ in MODELS:
        total = cost_model.total(cost_model.operation_costs(spec_of(preset), Usage(DENSE_BATCH, 1024, 512), 8))
        seconds = [total.seconds(device, 8) for device in ACCELERATORS]
        rows.append([s[Resource.NETWORK] / s[Resource.COMPUTE] for s in seconds])
    source = (
        f"By formulas: weft plan model, 8 devices, {DENSE_BATCH:,} tokens, 1,024 in and 512 out. Memory is not checked."
    )
    names = [preset for preset, _ in MODELS]
    devices = [device.name.replace("-40gb", " 40G") for device in ACCELERATORS]
    return heat_map("Network time / compute time (NanoFlow, Figure 2)", source, names, devices, rows, BLUE)


def figure_3() -> str:
    """NanoFlow Figure 3: T_R, models by workloads, on A100s."""
    device = accelerator("a100")
    means = {name: tuple(part.a for part in lengths.PRESETS[name]) for name in ("splitwise", "lmsys", "sharegpt")}
    workloads = means | {f"{p}:{d}": (p, d) for p, d in LENGTHS}
    rows = []
    for preset, gpus in MODELS:
        spec, line = spec_of(preset), []
        for prompt, output in workloads.values():
            tokens = dense_batch(spec, prompt, output, device, gpus)
            line.append(cost_model.t_ratio(tokens, spec.active_parameters, device, gpus))
        rows.append(line)
    source = "By formulas: weft plan model, A100 80 GB, the largest dense batch that fits."
    names = [f"{preset}, {gpus} x A100" for preset, gpus in MODELS]
    return heat_map("T_R, memory time / compute time (NanoFlow, Figure 3)", source, names, list(workloads), rows, GREEN)


def profiled() -> Machine:
    return Machine(load_profile(SHIPPED / PROFILE), spec_of("llama-3-8b"))


def _source(machine: Machine) -> str:
    return f"Measured: autosearch/profiles/{PROFILE} ({machine.profile.made})"


def figure_5(machine: Machine) -> str:
    """NanoFlow Figure 5: what both operations of a pair keep of their speed, by falling speed of the first."""

    def kept(name: str, work: float, ms: float) -> float:
        return machine.curves.ms(name, work, machine.num_sms) / ms

    pairs = sorted(
        ((kept(p.compute, p.compute_work, p.compute_ms), kept(p.guest, p.guest_work, p.guest_ms)))
        for p in machine.profile.pairs
    )[::-1]
    series = [
        Series("GEMM, prompt attention", [(i, own) for i, (own, _) in enumerate(pairs, 1)]),
        Series("decode attention", [(i, guest) for i, (_, guest) in enumerate(pairs, 1)]),
    ]
    counts = Axis("pairs of operations, sorted", 0, len(pairs) + 1, range(0, len(pairs) + 1, 10))
    source = f"{_source(machine)}, {len(pairs)} pairs."
    return chart(
        "Speed that two operations keep next to each other (NanoFlow, Figure 5)", source, counts,
        Axis("share of the speed alone on all SMs", 0.0, 1.0, SHARE_TICKS), series,
    )  # fmt: skip


def measured(machine: Machine, tokens: int, name: str) -> Measured:
    """Return an operation on a dense batch of 1,024 tokens in and 512 out."""
    spec, usage = machine.spec, Usage(tokens, 1024, 512)
    (cost,) = (c for c in cost_model.operation_costs(spec, usage) if c.name == name)
    layers = spec.num_layers
    own = Cost(name, cost.gflop / layers, cost.mem_gb / layers, 0.0)
    load = workload_load("1024:512", tokens)
    work = work_of(machine.operations[name], load)
    return Measured(name, tokens, own, machine.curves.ms(name, work, machine.num_sms, serial=True))


def roofline(machine: Machine) -> str:
    """Mind the Memory Gap, Figure 1: FLOP/s over FLOP per byte."""
    device = accelerator("h200")
    series = [
        Series(name, [((m := measured(machine, tokens, name)).intensity, m.tflops) for tokens in GRID])
        for name in ("qkv", "o", "gate_up", "down", "decode")
    ]
    peak, slope = device.gflops / 1e3, device.mem_gbs / 1e3
    x, y = Axis("FLOP per byte", 1, 2000, (1, 10, 100, 1000), True), Axis(
        "TFLOP/s", 2, 2000, (10, 100, 1000), True
    )  # fmt: skip
    limits = [
        (f"{device.mem_gbs / 1e3:g} TB/s", [(1.0, slope), (peak / slope, peak)]),
        (f"{peak:g} TFLOP/s", [(peak / slope, peak), (2000.0, peak)]),
    ]
    source = f"{_source(machine)}, {GRID[0]} to {GRID[-1]:,} tokens."
    return chart("Llama-3-8B on an H200 (Mind the Memory Gap, Figure 1)", source, x, y, series, limits)


def table_2(machine: Machine) -> str:
    """NanoFlow Table 2 for Llama-3-8B on an H200: the estimate and the measured time."""
    device, layers = accelerator("h200"), machine.spec.num_layers
    lines = [
        "| operation | GFLOP | GB | compute, ms | memory, ms | estimate, ms | measured, ms | measured / estimate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    sums = [0.0, 0.0]
    for name in machine.operations:
        m = measured(machine, DENSE_BATCH, name)
        cost, ms = Cost(name, m.cost.gflop * layers, m.cost.mem_gb * layers, 0.0), m.ms * layers
        seconds = cost.seconds(device)
        compute, memory = (1e3 * seconds[r] for r in (Resource.COMPUTE, Resource.MEMORY))
        estimate = max(compute, memory)
        sums = [sums[0] + estimate, sums[1] + ms]
        figures = f"{compute:.2f} | {memory:.2f} | {estimate:.2f} | {ms:.2f} | {ms / estimate:.2f}"
        lines.append(f"| {name} | {cost.gflop:,.0f} | {cost.mem_gb:.1f} | {figures} |")
    lines.append(f"| sum | | | | | {sums[0]:.2f} | {sums[1]:.2f} | {sums[1] / sums[0]:.2f} |")
    return "\n".join(lines)


def table_3(machine: Machine) -> str:
    """NanoFlow Table 3: share of the SMs -> share of the speed that is kept, with the spread over pairs."""
    lines = ["| operations | share of the SMs | share of the speed | spread over pairs |", "|---|---|---|---|"]
    for resource, name in ((Resource.COMPUTE, "GEMM, prompt attention"), (Resource.MEMORY, "decode attention")):
        for row in machine.interference.table(resource):
            lines.append(f"| {name} | {row.share:.2f} | {row.performance:.2f} | {row.spread:.0%} |")
    return "\n".join(lines)


def table_ii(machine: Machine) -> str:
    """Mind the Memory Gap, Table II: what operations reach, at few and at many tokens."""
    device = accelerator("h200")
    lines = [
        "| operation | tokens in the batch | FLOP per byte | TFLOP/s | of the rated | TB/s | of the rated |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("qkv", "gate_up", "decode"):
        for tokens in (GRID[0], GRID[-1]):
            m = measured(machine, tokens, name)
            compute, memory = m.tflops * 1e3 / device.gflops, m.gbs / device.mem_gbs
            lines.append(
                f"| {name} | {tokens:,} | {m.intensity:.1f} | {m.tflops:.1f} | {compute:.0%} | {m.gbs / 1e3:.2f} "
                f"| {memory:.0%} |"
            )
    return "\n".join(lines)


def with_tables(page: str, tables: dict[str, str]) -> str:
    """Replace the tables between `<!-- NAME -->` and `<!-- end -->`. Raises `ValueError` if one has no place."""
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(pattern, lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", page, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{PAGE.name} has no place for {name}")
    return page


def files() -> dict[Path, str]:
    """Return the text of every file that this command writes."""
    machine = profiled()
    pictures = {
        "nanoflow-network.svg": figure_2(), "nanoflow-memory.svg": figure_3(),
        "nanoflow-interference.svg": figure_5(machine), "roofline.svg": roofline(machine),
    }  # fmt: skip
    tables = {"table_2": table_2(machine), "table_3": table_3(machine), "table_ii": table_ii(machine)}
    out = {PICTURES / name: text for name, text in pictures.items()}
    return out | {PAGE: with_tables(PAGE.read_text(encoding="utf-8"), tables)}


if __name__ == "__main__":
    for path, written in files().items():
        path.write_text(written, encoding="utf-8")
