"""Whether `--search` can find a plan for this engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.progress import notice

RUNS_ON_GPUS = False
"""Whether a search while serving has run on a GPU and was right."""


def searches(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, pages: torch.dtype, backend: str, *, cuda: bool,
    planned: bool,
) -> bool:  # fmt: skip
    """Return whether the engine searches for a plan. planned: it has one already. Raises `ConfigError` for options that
    exclude a search."""
    if config.search == "off":
        return False
    if why := next((why for wrong, why in _conflicts(config, spec, dtype, pages, backend, cuda=cuda) if wrong), None):
        raise ConfigError(f"--search {config.search}: {why}")
    if planned:
        notice("search: this model has a plan for this GPU already; nothing is searched for")
    return not planned


def _conflicts(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, pages: torch.dtype, backend: str, *, cuda: bool
) -> Iterator[tuple[bool, str]]:
    yield not cuda or not spec.native, "plans need a GPU and weft's own layers: leave it out"
    yield spec.shard_of.ranks > 1, "it needs --tensor-parallel-size 1: use weft search for several GPUs"
    share = config.share
    several = max(share.sharers, share.awake) > 1
    yield several, "several engines share this GPU, and one would measure the others: use weft search"
    yield config.plan == "serial", "--plan serial excludes a plan: leave out one of the two"
    drafting = config.drafting
    yield drafting is not None and drafting.by_model, "a model that drafts excludes pipelines: leave it out"
    yield config.batch_invariant, "--batch-invariant uses a plan only if you name it: leave out one of the two"
    yield config.enforce_eager, "pipelines run in CUDA graphs: leave out --enforce-eager"
    yield backend != "triton", "pipelines need the triton attention back end"
    yield spec.experts is not None, "models with experts cannot be measured yet: leave it out"
    yield spec.quantization is not None, "it does not measure FP8 weights yet: use weft search"
    yield dtype != torch.bfloat16 or pages != dtype, "it measures bfloat16 weights and pages only: leave it out"
    yield not RUNS_ON_GPUS, "it has not been tested on a GPU yet: use weft search"
