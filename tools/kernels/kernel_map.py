"""Writes the tables of docs/kernels.md, which kernel runs when: `python -m weft.tools.kernels.kernel_map`.

Every case builds a model on the meta device, launches each operation of a layer for each token bucket and records the
kernel. No GPU and no weights are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.engine.config import EngineConfig
from weft.engine.model.implementation import choose_spec
from weft.engine.runner.options.resolve import resolve, served_as
from weft.engine.runner.start.kernel_set import MetaExecutor, meta_executor
from weft.kernels.common.compilation import collect
from weft.kernels.common.gpu import KNOWN, Gpu, compiling_for

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- tables: make kernelmap -->", "<!-- end of tables -->"
MAX_TOKENS = 4096


class Case(NamedTuple):
    title: str
    preset: str
    gpu: str
    options: dict[str, Any]


DENSE, EXPERTS = "llama-3-8b", "qwen3-30b-a3b"
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
CASES = (
    Case("bf16 on an H200", DENSE, "h200", {}),
    Case("bf16 on an H200 with `--batch-invariant`", DENSE, "h200", {"batch_invariant": True}),
    Case("bf16 on an H200 with `--pod auto`", DENSE, "h200", {"pod": "auto"}),
    Case("FP8 weights and FP8 KV on an H200", DENSE, "h200", FP8),
    Case("FP8 weights and FP8 KV on an H200 with `--batch-invariant`", DENSE, "h200", {**FP8, "batch_invariant": True}),
    Case("bf16 on an A100, as on other GPUs", DENSE, "a100", {}),
    Case("bf16 experts on an H200 (Qwen3-30B-A3B)", EXPERTS, "h200", {}),
    Case("FP8 experts on an H200 (Qwen3-30B-A3B)", EXPERTS, "h200", FP8),
    Case("bf16 on two H200s, as rank 0", DENSE, "h200", {"tensor_parallel_size": 2}),
)


def _next(launches: Iterator[Any], gpu: Gpu) -> Any:
    """Return the next launch, or None. The generator itself launches kernels between ranks."""
    got: list[Any] = []
    collect(lambda: got.append(next(launches, None)), gpu)
    return got[0]


def operations(meta: MetaExecutor, tokens: int, gpu: Gpu) -> Iterator[tuple[str, Any]]:
    """Yield the name of each operation of a serial plan's iteration, and its launch."""
    executor, pipelines, kv, _ = meta
    pipeline = next(p for p in pipelines.serial if p.tokens == tokens)
    rows = min(tokens, 256)
    launches = executor.touches(pipeline, kv, rows)
    while launch := _next(launches, gpu):
        name = str(getattr(launch, "func", launch).__name__)
        if name == "launch_one" and len(launch.args) == 2:
            name = pipeline.operations[launch.args[1]][1].name
        if name == "launch_one":  # repeats an operation of the last layer on fewer rows
            continue
        yield (
            {"_embed": "embedding", "_head": "final norm, logits", "gather": "rows of the last layer"}.get(name, name),
            launch,
        )
    yield "sampling", partial(executor.sample, rows)


def buckets(meta: MetaExecutor) -> list[int]:
    return sorted({p.tokens for p in meta.pipelines.serial})


def kernels_of(case: Case) -> dict[str, list[tuple[int, str]]]:
    """Return by operation: (largest token count of the bucket, files of the kernels)."""
    gpu: Gpu = KNOWN[case.gpu]
    config = EngineConfig.model_validate(
        {
            "device": "cuda", "model_preset": case.preset, "load_format": "dummy", "tuning_seconds": 0.0,
            "plan": "serial", "max_num_batched_tokens": MAX_TOKENS, "kv_cache_gib": 4.0, "cache_dir": "/nonexistent",
            **case.options,
        }
    )  # fmt: skip
    found: dict[str, dict[int, set[str]]] = {}
    with compiling_for(gpu), torch.inference_mode():
        spec = served_as(choose_spec(config)[0], config).shard(0, config.tensor_parallel_size)
        meta = meta_executor(spec, resolve(config, spec), gpu)
        for tokens in buckets(meta):
            for name, launch in operations(meta, tokens, gpu):
                files = found.setdefault(name, {}).setdefault(tokens, set())
                for kernel in collect(launch, gpu):
                    module = kernel.function.fn.__module__.removeprefix("weft.kernels.").replace(".", "/")
                    files.add(f"`{module}.py`")
    return {
        name: [(tokens, ", ".join(sorted(files))) for tokens, files in rows.items() if files]
        for name, rows in found.items()
    }


def table(case: Case) -> list[str]:
    """Return the Markdown lines of a case: one row per operation and range of tokens with the same kernels."""
    lines = [f"### {case.title}", "", "| operation | tokens in the iteration | kernel |", "|---|---|---|"]
    for name, rows in kernels_of(case).items():
        first, previous = 1, ""
        spans: list[tuple[int, int, str]] = []
        for tokens, files in rows:
            if files == previous:
                spans[-1] = (spans[-1][0], tokens, files)
            else:
                spans.append((first, tokens, files))
            first, previous = tokens + 1, files
        for begin, end, files in spans:
            lines.append(f"| {name} | {'any' if (begin, end) == (1, MAX_TOKENS) else f'{begin} to {end}'} | {files} |")
    return [*lines, ""]


def page(text: str) -> str:
    """Return the page with regenerated tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(line for case in CASES for line in table(case))
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
