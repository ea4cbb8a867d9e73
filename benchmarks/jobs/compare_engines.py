"""Compares several engines with one, after `data-parallel.sh`: `compare_engines.py OUT ENGINES`.

Prints and writes OUT/engines.json: the tokens/s of the closed loops, their ratio, and the shares of prompt tokens found
in the cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def run_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())["runs"][0]
    return found


def compared(out: Path, engines: int) -> dict[str, Any]:
    found: dict[str, Any] = {"engines": engines}
    for what in ("output_tokens_per_second", "prompt_tokens_per_second"):
        one, several = (run_of(out / f"closed-{name}.json")["throughput"][what] for name in ("one", "several"))
        found[what] = {"one": one, "several": several, "ratio": several / one}
    cached = {}
    for name in ("one", "several"):
        tokens = run_of(out / f"talk-{name}.json")["tokens"]
        cached[name] = tokens["prompt_cached"] / tokens["prompt_received"]
    return {**found, "cached": {**cached, "ratio": cached["several"] / cached["one"] if cached["one"] else None}}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    figures = compared(folder, int(sys.argv[2]))
    (folder / "engines.json").write_text(json.dumps(figures, indent=1))
    for name, value in figures.items():
        print(f"{name}: {value}", flush=True)
