"""Before a GPU runner starts: measured configurations of the model's matrix products, searched for once if unknown."""

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

TUNING = "tuning matrix products"


def product_shapes(spec: ModelSpec) -> list[Shape]:
    """The products of layers of each kind, by the names of their kernels' epilogues; those of experts are one."""
    found: list[Shape] = []
    bits = 16 if spec.quantization is None else 8
    kinds = {spec.layer(i).experts: i for i in range(spec.num_layers)}
    for op in (op for layer in kinds.values() for op in spec.layer_operations(layer)):
        if op.kernel == "experts_gate_up" and spec.experts is not None:
            if bits == 8:  # whose tiles have one rule so far
                continue
            found.append(Shape("experts", op.out, op.inner, spec.experts.count, spec.experts.top))
        elif op.role is Role.PRODUCT and op.kernel != "router":  # which has one way to be computed
            found.append(Shape(op.kernel, op.out, op.inner, bits=bits))
    return list(dict.fromkeys(found))


def tuning_launches(spec: ModelSpec, max_tokens: int, cache_dir: Path) -> None:
    """On the meta device: every product that `prepare_products` would time."""
    from weft.kernels.matmul import gemm_launch
    from weft.kernels.tuning import calls

    here, device = gpu(), gpu_device()
    assert here is not None
    of = tuned.machine(device)
    space = gemm_launch.workspace(device)
    known = tuned.read_cache(cache_dir, of), tuned.shipped(of.capability, of.sms)
    for shape, tokens in tile_search.missing(product_shapes(spec), max_tokens, *known):
        weight = calls.weights(shape, 1, str(device))[0]
        by_rule = calls.rule(shape, tokens, here.sms)
        for config in tile_search.tries(shape, by_rule, tokens, is_hopper()):
            # what cannot be launched is not timed either
            with contextlib.suppress(ValueError, TypeError, AssertionError):
                calls.product(shape, tokens, weight, space, here.sms, config, spec.head_dim, spec.num_kv_heads)()


def prepare_products(
    spec: ModelSpec, device: torch.device, max_tokens: int, cache_dir: Path, seconds: float,
    progress: Progress | None = None,
) -> None:  # fmt: skip
    """Load what was found at earlier starts, and search for what nobody knows, so many seconds at most.

    max_tokens: of an iteration.
    """
    from weft.kernels.tuning.quick_timer import QuickTimer

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(TUNING, done, total)

    with torch.cuda.device(device), torch.inference_mode():
        timer = QuickTimer(spec.head_dim, spec.num_kv_heads)
        found = tile_search.find(
            product_shapes(spec),
            max_tokens,
            tuned.machine(device),
            cache_dir,
            timer,
            timer.rule,
            budget_s=seconds,
            progress=report,
        )
        del timer
        torch.cuda.empty_cache()
    tuned.use(found)
