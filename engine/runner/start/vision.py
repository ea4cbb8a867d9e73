"""`served_vision`: whether an engine takes images; `load_image_rows`: its tower and the pool of embeddings."""

from __future__ import annotations

from typing import Any

from weft.engine.config import EngineConfig
from weft.engine.model.spec import ModelSpec
from weft.engine.model.vision import vision_of
from weft.engine.model.vision.family import Vision
from weft.engine.progress import Phases, notice
from weft.engine.runner.device.image_rows import ImagePool, ImageRows
from weft.engine.runner.options.resolve import ResolvedConfig

LARGEST_IMAGE = 16384
"""Embeddings of the largest image that the pool has room for by default."""


def served_vision(
    raw: dict[str, Any], spec: ModelSpec, config: EngineConfig, resolved: ResolvedConfig
) -> Vision | None:
    """Return the vision part that this engine serves, or None; prints why a model with one serves text only. raw: the
    `config.json`. Raises `ModelError`."""
    vision = vision_of(raw) if spec.native else None
    if vision is not None and (why := _lacks(vision, spec, config, resolved)):
        notice(f"{spec.architecture} serves text only here: images {why}")
        return None
    return vision


def image_pool(
    raw: dict[str, Any], spec: ModelSpec, config: EngineConfig, resolved: ResolvedConfig
) -> ImagePool | None:
    """Return the pool of embeddings, or None if this engine serves text only. Raises `ModelError`."""
    vision = vision_of(raw) if spec.native else None
    if vision is None or _lacks(vision, spec, config, resolved):
        return None
    rows = num_rows(config, resolved)
    return ImagePool(vision, rows, spec.hidden_size, resolved.compute_dtype, resolved.device)


def _lacks(vision: Vision, spec: ModelSpec, config: EngineConfig, resolved: ResolvedConfig) -> str:
    """Return why this engine cannot serve images, or ""."""
    cuda = resolved.device.type == "cuda"
    need = vision.bidirectional + resolved.max_num_seqs  # An image in one chunk next to all decodes.
    lacking = {
        "that see all of themselves need weft's own attention kernels on a GPU": (
            cuda and vision.bidirectional > 0 and resolved.attention != "triton"
        ),
        f"do not fit an iteration: --max-num-batched-tokens must be {need} or more on a GPU": (
            cuda and vision.bidirectional > 0 and resolved.max_num_batched_tokens < need
        ),
        "of this family run on a CPU only so far": cuda and vision.cpu_only,
        "with FP8 experts run on a CPU only so far": (
            cuda and spec.quantization is not None and spec.experts is not None
        ),
        "that see all of themselves need 16-bit pages on a GPU: leave out --kv-cache-dtype": (
            cuda and vision.bidirectional > 0 and resolved.kv.dtype.itemsize == 1
        ),
        "run with --tensor-parallel-size on a CPU only so far": cuda and config.tensor_parallel_size > 1,
        "with further embeddings (deepstack) after the last layer do not run on a GPU": (
            cuda and vision.deepstack >= spec.num_layers
        ),
        "that see all of themselves do not support --batch-invariant yet": (
            vision.bidirectional > 0 and config.batch_invariant
        ),
    }
    return next((text for text, applies in lacking.items() if applies), "")


def num_rows(config: EngineConfig, resolved: ResolvedConfig) -> int:
    """Return the rows of the pool of embeddings."""
    if config.encoder_cache_tokens is not None:
        return config.encoder_cache_tokens
    return max(2 * resolved.max_num_batched_tokens, min(resolved.max_model_len, LARGEST_IMAGE))


def load_image_rows(
    vision: Vision, spec: ModelSpec, config: EngineConfig, resolved: ResolvedConfig, phases: Phases
) -> ImageRows:
    """Load the tower, and make the pool. Raises `ModelError`."""
    from weft.engine.model.vision.tower import load_tower

    phases("loading the vision tower", 0, 1)
    tower = load_tower(
        vision, config.model_path, resolved.compute_dtype, resolved.device,
        config.seed if config.load_format == "dummy" else None,
    )  # fmt: skip
    phases("loading the vision tower", 1, 1)
    return ImageRows(
        tower, num_rows(config, resolved), spec.hidden_size, resolved.compute_dtype, resolved.cpu_threads // 2
    )
