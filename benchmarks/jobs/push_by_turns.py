"""Measures throughput of two ranks in turns with and without GEMMs that push partial sums.

    python benchmarks/jobs/push_by_turns.py PRESET WORKLOAD on|off ...

$OUT gets the figures of each turn and sums.json, which the first start measured. The script replaces the cached
all-reduce choice in each turn and restores it at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.engine.config import PRESETS

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "weft"
OUT = Path(os.environ["OUT"])
FROM_TOKENS = 128
"""Smallest token count for which pushing was faster in bursts."""
FIGURES = ("total_tokens_per_second", "watts", "sm_megahertz", "tokens_per_joule", "sustained_tflops_of_cublas")


def bench(preset: str, workload: str, *more: str) -> None:
    command = [sys.executable, "-P", "-m", "weft.server", "bench", "offline", "--model-preset", preset]
    command += ["--load-format", "dummy", "--tensor-parallel-size", "2", "--trace-iterations", "0"]
    subprocess.run([*command, "--workload", workload, *more], check=True, stdout=subprocess.DEVNULL)


def measured_sums(preset: str) -> Path | None:
    shape = json.loads((PRESETS / preset / "config.json").read_text())
    name = f"sums-*-2x{shape['hidden_size']}-*-{shape['intermediate_size'] // 2}-*.json"
    return max(CACHE.glob(name), key=lambda file: file.stat().st_mtime, default=None)


def variants(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`on` is the measured choice, or two steps if that never pushes; `off` never pushes."""
    chosen: dict[str, list[int]] = found["steps"]
    on = chosen
    if not any(sent for _, sent in chosen.values()):
        on = {tokens: [sums, 2 if int(tokens) >= FROM_TOKENS else 0] for tokens, (sums, _) in chosen.items()}
        print(f"the start chose no GEMM that pushes: 'on' uses two steps from {FROM_TOKENS} tokens on")
    off = {tokens: [sums, 0] for tokens, (sums, _) in chosen.items()}
    return {"on": {**found, "steps": on}, "off": {**found, "steps": off}}


def run(preset: str, workload: str, turns: Iterable[str]) -> None:
    if measured_sums(preset) is None:
        bench(preset, "128:8:2")
    if (file := measured_sums(preset)) is None:
        raise SystemExit(f"{preset} wrote no measured sums to {CACHE}")
    before = file.read_text()
    (OUT / "sums.json").write_text(before)
    found = json.loads(before)
    for tokens, of in found["microseconds"].items():
        print(f"{tokens} tokens: us by steps of the sum and of the push {of}; chosen {found['steps'][tokens]}")
    sums = variants(found)
    try:
        for number, turn in enumerate(turns, 1):
            file.write_text(json.dumps(sums[turn]))
            out = OUT / f"{number}-{turn}.json"
            bench(preset, workload, "--json", str(out))
            figures = json.loads(out.read_text())
            print(f"{turn}:", ", ".join(f"{name} {figures.get(name, 0):,.2f}" for name in FIGURES), flush=True)
    finally:
        file.write_text(before)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
