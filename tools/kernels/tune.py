"""Finds the tile configuration of every GEMM of a model: `weft bench kernels --tune`."""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from weft.kernels.matmul import gemm_launch
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.matmul.tuned import Shape
from weft.kernels.tuning.calls import DEVICE, copies_for, gemm_call, weights
from weft.kernels.tuning.measure import burst
from weft.tools.kernels.calls import cublas


def candidates(tokens: int) -> list[GemmConfig]:
    """Return the configurations that `tune` tries."""
    if tokens <= 128:
        block = max(16, 1 << (tokens - 1).bit_length())
        few = [
            GemmConfig(
                block, features, depth, stages, 4 if features == 64 else 8, 8, split, True, per_sm, 1, ahead=ahead
            )
            for features, depth, stages, per_sm in (
                (64, 128, 4, 1), (64, 128, 5, 1), (64, 128, 6, 1), (64, 256, 3, 1), (64, 256, 5, 1), (128, 128, 3, 1),
                (64, 128, 5, 2), (64, 128, 3, 3), (128, 128, 5, 1), (256, 64, 4, 1), (128, 64, 4, 2),
            )
            for split in (1, 2, 4)
            for ahead in ((0, 4, 8) if per_sm == 1 else (0, 4))
        ]  # fmt: skip
        room = 220 * 1024
        return [c for c in few if c.per_sm * c.stages * c.depth * 2 * (c.tokens + c.features) < room] + (
            [GemmConfig(64, 128, 64, 5, 4, 8, s, False, 1, 1) for s in (1, 2, 4)] if tokens > 32 else []
        )
    return [
        GemmConfig(bm, bn, 64, stages, warps, group, 1, swap, 1, slices)
        for bm, bn, stages, warps, swap, slices in (
            (128, 256, 3, 8, False, 2), (128, 256, 4, 8, False, 4), (128, 128, 4, 8, False, 1),
            (128, 128, 5, 8, False, 2), (256, 128, 3, 8, False, 2), (64, 256, 4, 4, False, 4),
            (128, 128, 4, 4, False, 2), (64, 128, 6, 4, False, 2),
        )
        for group in ((8,) if tokens < 1024 else (8, 16))
    ] + [SPECIAL._replace(group=g) for g in (4, 8, 16)]  # fmt: skip


def try_config(task: tuple[Shape, int, GemmConfig, int]) -> bool:
    """Compile and run one configuration (in a worker: fills the compile cache)."""
    shape, tokens, config, head_dim = task
    try:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        gemm_call(shape, tokens, weights(shape, 1)[0], gemm_launch.workspace(DEVICE, 1 << 24), sms, config, head_dim)()
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def tune(
    models: dict[str, tuple[list[Shape], int]], buckets: list[int], path: str, jobs: int, budget_s: float
) -> dict[str, list[int]]:
    """Measure every candidate for every shape and bucket; writes the best to the table at `path`."""
    started = time.monotonic()
    tasks = [
        (shape, tokens, config, d)
        for shapes, d in models.values() for shape in shapes for tokens in buckets for config in candidates(tokens)
    ]  # fmt: skip
    # one compilation serves many tasks: only constants of the kernel matter
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        works = dict(zip(tasks, pool.map(try_config, tasks, chunksize=4), strict=True))
    print(f"compiled {len(tasks)} candidates in {time.monotonic() - started:.0f} s, {sum(works.values())} run")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    space = gemm_launch.workspace(DEVICE, 1 << 24)
    table: dict[str, list[int]] = {}
    if Path(path).exists():
        table = json.loads(Path(path).read_text())
    for shapes, d in models.values():
        for shape in shapes:
            ws = weights(shape, copies_for(shape))
            for tokens in buckets:
                base = burst([cublas(tokens, w) for w in ws], 5)
                timed = []
                for config in candidates(tokens):
                    if works[shape, tokens, config, d] and time.monotonic() - started < budget_s:
                        calls = [gemm_call(shape, tokens, w, space, sms, config, d) for w in ws]
                        timed.append((burst(calls, 5), config))
                if not timed:
                    continue
                ms, best = min(timed)
                table[f"{tokens},{shape.features},{shape.depth}"] = [int(v) for v in best]
                rate = 2 * tokens * shape.features * shape.depth / ms / 1e9
                gbs = shape.features * shape.depth * 2 / ms / 1e6
                print(
                    f"{shape.kind:9} M={tokens:5} N={shape.features:6} K={shape.depth:6} {ms * 1e3:8.1f} us "
                    f"{rate:6.1f} TFLOP/s {gbs:6.0f} GB/s cublas {base * 1e3:8.1f} us ({base / ms:.2f}) "
                    f"{list(map(int, best))}"
                    f" next {[(round(t * 1e3, 1), list(map(int, c))) for t, c in sorted(timed)[1:3]]}",
                    flush=True,
                )
            del ws
    with open(path, "w") as file:
        file.write("{\n" + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in table.items()) + "\n}\n")
    return table
