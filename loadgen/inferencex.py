"""Converts a run to a row of the public InferenceX results, to compare figures.

Field names and units follow that project (github.com/SemiAnalysisAI/InferenceX, utils/process_result.py and
aggregate_power.py, as of November 2026): times in seconds, `intvty` in tokens per second and user, power schema 2.
Energy comes from the server's counters instead of power samples; `power_source` records that.
"""

from __future__ import annotations

import math
from typing import Any

from weft.loadgen.run import Run
from weft.loadgen.statistics import Values, percentile

POWER_SCHEMA = 2
PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MEASURES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}


def row(run: Run, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the row. `fields`: isl, osl, and operator-supplied values (hw, tp, image …), which take precedence."""
    build = run.view.build if run.view is not None else {}
    gpus = int(fields.get("tp", 1))
    through = run.throughput()
    prompt, output = through["prompt_tokens_per_second"], through["output_tokens_per_second"]
    out: dict[str, Any] = {
        "hw": None,
        "conc": run.users,
        "image": None,
        "model": run.model,
        "infmax_model_prefix": run.model,
        "framework": "weft" if build else None,
        "framework_version": build.get("version"),
        "precision": PRECISION.get(build.get("dtype", ""), build.get("dtype")),
        "spec_decoding": "none",
        "disagg": False,
        "is_multinode": False,
        "tp": gpus,
        "pp": 1,
        "ep": 1,
        "dp_attention": False,
        **fields,
        "tput_per_gpu": (output + prompt) / gpus,
        "output_tput_per_gpu": output / gpus,
        "input_tput_per_gpu": prompt / gpus,
    }
    for measure, name in MEASURES.items():
        for statistic, value in _statistics(run.measures.values(measure)).items():
            out[f"{statistic}_{name}"] = value
            if name == "tpot":
                out[f"{statistic}_intvty"] = 1 / value if value and math.isfinite(value) else None
    return {**out, **_power(run, gpus)}


def _statistics(values: Values) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(("mean", "median", "std", "p90", "p95", "p99", "p99.9"))
    found = {"mean": float(values.mean()), "median": percentile(values, 50), "std": float(values.std())}
    return {**found, **{f"p{q:g}": percentile(values, q) for q in (90, 95, 99, 99.9)}}


def _power(run: Run, gpus: int) -> dict[str, Any]:
    energy, prompt = run.energy(), run.tokens()["prompt_received"]
    if energy is None:
        return {"power_metric_schema_version": POWER_SCHEMA, "power_valid": 0}
    return {
        "power_metric_schema_version": POWER_SCHEMA,
        "power_valid": 1,
        "power_source": "energy counter of the server",
        "avg_power_w": energy["watts"] / gpus,
        "avg_total_gpu_power_w": energy["watts"],
        "total_gpu_energy_j": energy["joules"],
        "joules_per_successful_query": energy["joules_per_request"],
        "joules_per_input_token": energy["joules"] / prompt if prompt else None,
        "joules_per_output_token": energy["joules_per_output_token"],
        "joules_per_total_token": energy["joules_per_token"],
    }
