"""Writes the current digest of the kernels into the shipped plans: `python -m weft.tools.kernels.restamp`.

Use it after a change that leaves the machine code of every kernel unchanged, such as a renamed function. First compare
the PTX of both versions; if any kernel differs, run `weft search` instead.
"""

from __future__ import annotations

import json
from pathlib import Path

import weft.engine.plans
from weft.engine.config import EngineConfig
from weft.engine.model.implementation import choose_spec
from weft.engine.plans.kernel_sources import kernels_digest


def main() -> None:
    for file in sorted(Path(weft.engine.plans.__file__).parent.glob("*.json")):
        text = file.read_text(encoding="utf-8")
        target = json.loads(text)["target"]
        preset = file.stem.removesuffix("-h200").removesuffix("-fp8")
        spec, _ = choose_spec(EngineConfig.model_validate({"model_preset": preset, "load_format": "dummy"}))
        new = kernels_digest(spec, fp8="fp8" in target["dtype"] or "kv8" in target["dtype"])
        file.write_text(text.replace(target["kernels"], new), encoding="utf-8")
        print(f"{file.name}: {target['kernels']} -> {new}")


if __name__ == "__main__":
    main()
