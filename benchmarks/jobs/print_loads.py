"""Prints one line per report of `weft load --json`: `print_loads.py FILE …`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def summary(path: Path) -> str:
    run = json.loads(path.read_text())["runs"][0]
    latency, tokens, energy = run["latency"], run["tokens"], run["energy"]
    seconds = run["throughput"]
    parts = [
        path.stem,
        f"{run['requests']} requests, {dict(run['outcomes'])}",
        f"offered {run['offered_rate'] or run['users']}, answered {seconds['requests_per_second']:.2f}/s",
        f"{seconds['output_tokens_per_second']:,.0f} out + {seconds['prompt_tokens_per_second']:,.0f} in tokens/s",
        *(f"{name} p99 {1e3 * latency[name]['p99']:.1f} ms" for name in ("itl", "ttft")),
        f"cached {tokens['prompt_cached'] / max(1, tokens['prompt_received']):.2%} of prompts",
    ]
    if energy is not None:
        parts.append(f"{energy['watts']:.0f} W, {energy['joules_per_output_token']:.4f} J an output token")
    if not run["generator"]["kept_up"]:
        parts.append("THE GENERATOR DID NOT KEEP UP")
    return ", ".join(parts)


for name in sys.argv[1:]:
    print(summary(Path(name)), flush=True)
