"""`tune_gemms`: loads tuned configurations of a model's GEMMs before a GPU runner starts, and searches for new ones."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.progress import Progress
from weft.kernels.common.gpu import gpu, gpu_device, is_hopper
from weft.kernels.matmul import tuned
from weft.kernels.matmul.tuned import Shape
from weft.kernels.tuning import tile_search

TUNING = "tuning GEMMs"


def gemm_shapes(spec: ModelSpec) -> list[Shape]:
    """Return the GEMM shapes of all kinds of layers, by kernel name. Both GEMMs of experts count as one."""
    found: list[Shape] = []
    bits = 16 if spec.quantization is None else 8
    kinds = {spec.layer(i).experts: i for i in range(spec.num_layers)}
    for op in (op for layer in kinds.values() for op in spec.layer_operations(layer)):
        if op.kernel == "experts_gate_up" and spec.experts is not None:
            if bits == 8:  # FP8 experts have fixed tiles
                continue
            found.append(Shape("experts", op.out, op.inner, spec.experts.count, spec.experts.top))
        elif op.role is Role.PROJECTION and op.kernel != "router":  # the router has a single configuration
            found.append(Shape(op.kernel, op.out, op.inner, bits=bits))
    return list(dict.fromkeys(found))


def launch_tuning_candidates(spec: ModelSpec, max_tokens: int, cache_dir: Path) -> None:
    """Launch every GEMM that `tune_gemms` would time, on the meta device."""
    from weft.kernels.matmul import gemm_launch
    from weft.kernels.tuning import calls

    here, device = gpu(), gpu_device()
    assert here is not None
    of = tuned.machine(device)
    space = gemm_launch.workspace(device)
    known = tuned.read_cache(cache_dir, of), tuned.shipped(of.capability, of.sms)
    for shape, tokens in tile_search.missing(gemm_shapes(spec), max_tokens, *known):
        weight = calls.weights(shape, 1, str(device))[0]
        by_rule = calls.rule(shape, tokens, here.sms)
        for config in tile_search.configs_to_try(shape, by_rule, tokens, is_hopper()):
            # A configuration that cannot be launched is not timed either.
            with contextlib.suppress(ValueError, TypeError, AssertionError):
                calls.gemm_call(shape, tokens, weight, space, here.sms, config, spec.head_dim, spec.num_kv_heads)()


def tune_gemms(
    spec: ModelSpec, device: torch.device, max_tokens: int, cache_dir: Path, seconds: float,
    progress: Progress | None = None,
) -> None:  # fmt: skip
    """Load configurations of earlier starts and search for missing ones, for at most `seconds`.

    max_tokens: token limit of an iteration."""
    from weft.kernels.tuning.quick_timer import QuickTimer

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(TUNING, done, total)

    with torch.cuda.device(device), torch.inference_mode():
        timer = QuickTimer(spec.head_dim, spec.num_kv_heads)
        found = tile_search.find(
            gemm_shapes(spec), max_tokens, tuned.machine(device), cache_dir, timer, timer.rule, budget_s=seconds,
            progress=report,
        )  # fmt: skip
        del timer
        torch.cuda.empty_cache()
    tuned.use(found)
