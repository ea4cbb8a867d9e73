"""Models and options that weft's GPU kernels do not support. For attention see `kernels.attention.backends`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.model.parts import Placement
from weft.engine.model.spec import ModelSpec

if TYPE_CHECKING:
    from weft.kernels.attention.backend import AttentionShape
    from weft.kernels.common.gpu import Gpu

log = logging.getLogger("weft.engine")
EXPERT_ACTIVATIONS = ("silu", "swiglu_oai")
"""Activations that the kernels of experts support (`kernels.experts.experts_triton`)."""
HEADS = (64, 128)  # Head sizes for which an FP8 GEMM writes q and the KV pages in its epilogue.


def check_kernels(spec: ModelSpec) -> None:
    """Raise `ConfigError` for a model that the kernels do not support."""
    if missing := next((part for part, used in _unsupported_parts(spec).items() if used), None):
        raise ConfigError(f"{spec.architecture}: the GPU kernels do not support {missing} yet; use --device cpu")
    e = spec.experts
    sizes = [spec.hidden_size, spec.intermediate_size]
    if e is not None:
        sizes += [e.intermediate_size, e.shared_size]
    if any(size % 8 for size in sizes):
        raise ConfigError("a GPU needs hidden and intermediate sizes that are multiples of 8; use --device cpu")


def _only_experts(spec: ModelSpec) -> bool:
    """Return whether no MLP is dense."""
    return spec.experts is not None and not spec.experts.shared_size and all(layer.experts for layer in spec.layers)


def _unsupported_parts(spec: ModelSpec) -> dict[str, bool]:
    """Return features that only the reference implementations support, and whether the model uses them."""
    e = spec.experts
    return {
        "recurrent states": spec.recurrence is not None,
        "latent attention": spec.latent is not None,
        "gates of attention's output": spec.output_gate,
        f"experts with norms placed {spec.placement.value}": e is not None and spec.placement is not Placement.PRE,
        "experts with LayerNorm": e is not None and spec.norm.centred,
        "norm over all heads on several ranks": spec.qk_norm == "projection" and spec.shard_of.ranks > 1,
        f"activation {spec.activation} of experts": e is not None and spec.activation not in EXPERT_ACTIVATIONS,
        "activation swiglu_oai outside experts": spec.activation == "swiglu_oai" and not _only_experts(spec),
    }


def unfused_fp8(spec: ModelSpec) -> bool:
    """Return whether a quantised model needs separate passes that quantise (`cuda_fp8_unfused`)."""
    placed = not spec.placement.before or spec.placement.after or spec.placement.parallel
    heads = spec.qk_norm == "projection" or spec.head_dim not in HEADS
    return spec.norm.centred or spec.norm.bias or placed or not spec.gated or heads


def unsupported_fp8(spec: ModelSpec) -> str | None:
    """Return which feature the model needs that FP8 GEMMs on a GPU do not support, or None."""
    e = spec.experts
    widths = [spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim, spec.qkv_size]
    if e is not None:
        widths += [e.intermediate_size, e.shared_size]
    cases = (
        (spec.shard_of.ranks > 1, "several ranks"),
        (
            e is not None and unfused_fp8(spec),
            "experts together with heads of other sizes than 64 and 128, or other norms",
        ),
        (any(width % 16 for width in widths), "widths that are not multiples of 16"),
    )
    return next((name for is_lacking, name in cases if is_lacking), None)


def check_fp8(spec: ModelSpec, here: Gpu) -> None:
    """Raise `ConfigError` if a quantised model's GEMMs cannot run in FP8 on this GPU."""
    assert spec.quantization is not None
    what = "--quantization fp8" if spec.quantization.at_load else f"an FP8 checkpoint ({spec.quantization.method})"
    if here.capability < (8, 9):
        raise ConfigError(f"{what}: {here.name} does not multiply FP8; use a checkpoint in 16 bits, or --device cpu")
    if reason := unsupported_fp8(spec):
        raise ConfigError(
            f"{what}: the GPU's FP8 GEMMs do not support {reason} yet; use a checkpoint in 16 bits, or --device cpu"
        )
    if spec.quantization.activations == "static":
        log.warning("the checkpoint's static activation scales are not used: a GPU computes its own, equally fine ones")


def check_pod(config: EngineConfig, spec: ModelSpec, backend: str, shape: AttentionShape) -> None:
    """Raise `ConfigError` if --pod asks for one attention launch where that is not possible."""
    able = shape.device.type != "cpu" and backend == "triton" and spec.native and not config.batch_invariant
    if able:
        from weft.kernels.attention.triton_backend import cuts_prefill  # needs Triton, which is optional on a CPU

        able = cuts_prefill(shape)
    if not able:
        raise ConfigError(
            f"--pod {config.pod} needs a Hopper GPU, the triton attention back end, 16-bit KV, heads of size 64 or "
            "128, no windows and no --batch-invariant: leave it out"
        )


def check_adapters(config: EngineConfig, spec: ModelSpec, backend: str) -> None:
    """Check that a GPU computes adapters of this model. Raises `ConfigError`."""
    why = ""
    if not spec.native:
        why = f"{spec.architecture} runs on transformers' code"
    elif spec.quantization is not None:
        why = "the model's matrices are in FP8"
    elif spec.shard_of.ranks > 1:
        why = "several ranks have the model"
    elif spec.experts is not None:
        why = f"{spec.architecture} has experts"
    elif spec.latent is not None:
        why = f"{spec.architecture} has latent attention"
    elif spec.placement.parallel:
        why = f"attention and MLP of {spec.architecture} are parallel"
    elif config.batch_invariant:
        why = "bits would depend on neighbours, so --batch-invariant excludes it"
    elif config.drafting is not None:
        why = "they exclude speculation"
    elif backend != "triton":
        why = "they need --attention-backend triton"
    if why:
        raise ConfigError(f"LoRA adapters do not run here on a GPU: {why}; use --device cpu, or merge the adapter")
