"""The text of `weft serve --help` and `--help-all`: groups of options, and `described` for their descriptions."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple, TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)


class OptionGroup(NamedTuple):
    """Options under one title."""

    title: str
    common: tuple[str, ...] = ()
    """Fields that `--help` lists."""
    more: tuple[str, ...] = ()
    """Fields that only `--help-all` lists."""


MODEL = "model"
MEMORY = "memory and cache"
BATCHING = "batching and latency"
DEVICES = "devices and parallelism"
OBSERVABILITY = "observability"
INTERNALS = "internals and A/B switches (for measurements; do not set in production)"

ENGINE_GROUPS = (
    OptionGroup(
        MODEL,
        ("model", "revision", "dtype", "quantization"),
        (
            "model_impl", "trust_remote_code", "seed", "enable_lora", "lora_modules", "lora_dir", "max_loras",
            "max_cpu_loras", "max_lora_rank",
        ),
    ),
    OptionGroup(
        MEMORY,
        ("gpu_memory_utilization", "kv_cache_gib", "kv_cache_dtype", "host_kv_gib", "ssd_kv_path"),
        (
            "ssd_kv_gib", "tier_kv_format", "prefix_caching", "pinned_cache_share", "page_size", "cache_dir",
            "state_dtype", "state_interval", "encoder_cache_tokens",
        ),
    ),
    OptionGroup(
        BATCHING,
        ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "slo", "itl_slo"),
        ("speculation", "speculation_depth", "speculative_config", "batch_invariant"),
    ),
    OptionGroup(
        DEVICES, ("device", "tensor_parallel_size"), ("attention_backend", "plan", "enforce_eager", "cpu_threads")
    ),
    OptionGroup(OBSERVABILITY, (), ("kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic")),
    OptionGroup(
        INTERNALS,
        (),
        (
            "load_format", "model_preset", "dummy_weights", "dummy_skew", "num_pages", "idle_spill_seconds",
            "itl_slo_patience", "fair_prefill_share", "priority_preemption", "async_scheduling", "late_launch",
            "pod", "wait_for_plan", "tuning_seconds",
        ),
    ),
)  # fmt: skip


def merged(base: Sequence[OptionGroup], groups: Sequence[OptionGroup]) -> tuple[OptionGroup, ...]:
    """Append the fields of `groups` to the groups of `base` with the same title, in the order of `groups`. Every title
    of `base` must be in `groups`."""
    known = {group.title: group for group in base}
    empty = OptionGroup("")
    return tuple(
        OptionGroup(title, known.get(title, empty).common + common, known.get(title, empty).more + more)
        for title, common, more in groups
    )


def described(model: type[M]) -> type[M]:
    """Use the text below each field as its description. Faster at start than pydantic's `use_attribute_docstrings`."""
    with suppress(OSError):  # no source code: no descriptions
        module = ast.parse(inspect.getsource(sys.modules[model.__module__]))
        (body,) = (n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == model.__name__)
        for field, text in pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(description))):
                    model.model_fields[name].description = " ".join(description.split())
    return model
