"""Chooses the plan file of an engine: the operator's, a shipped one that fits, or none (the serial plan)."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import torch
from msgspec.structs import replace

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.engine.model.operations import ALL_REDUCE, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.kernel_sources import kernels_digest
from weft.engine.plans.plan import Plan, Target, by_name, load_plan, model_key
from weft.kernels.common.gpu import gpu

log = logging.getLogger("weft.engine")
SHIPPED = Path(__file__).parent
COLLECTIVES: Collection[str] = (ALL_REDUCE,)
"""Collective kernels that executors can run as operations of a pipeline."""


def target_of(spec: ModelSpec, device: torch.device, dtype: torch.dtype, pages: torch.dtype | None = None) -> Target:
    """Return this engine's target as plan files state it. pages: the dtype of K and V if it differs from `dtype`."""
    here = gpu(device)
    assert here is not None
    name = str(dtype).removeprefix("torch.") + ("+fp8" if spec.quantization is not None else "")
    name += "+kv8" if pages not in (None, dtype) else ""
    return Target(here.name, here.sms, model_key(spec), name, kernels_digest(spec, fp8="fp8" in name or "kv8" in name))


def _mismatch(made_for: Target, here: Target) -> str | None:
    for field in Target.__struct_fields__:
        if (theirs := getattr(made_for, field)) != (ours := getattr(here, field)):
            return f"it was made for {field} {theirs!r}, but this is {ours!r}"
    return None


def choose_plan(plan: str, spec: ModelSpec, here: Target, max_num_batched_tokens: int | None) -> Plan | None:
    """Return the plan to run, checked, or None for the serial plan alone.

    plan: `EngineConfig.plan`. max_num_batched_tokens: the operator's limit; None leaves it to the plan. Ignores, with a
    warning, a file made for another target or with collectives that no executor runs. Raises `ConfigError` if the
    operator's file cannot be read or describes an impossible pipeline."""
    if plan == "serial":
        return None
    if plan == "auto":
        found = [load_plan(file) for file in sorted(SHIPPED.glob("*.json"))]
        fitting = next((p for p in found if _mismatch(p.target, here) is None), None)
        if fitting is None and any(replace(p.target, kernels=here.kernels) == here for p in found):
            log.warning(
                "a shipped plan for this model was made with other kernel code; the serial plan runs "
                "(weft search makes a new one)"
            )
    else:
        fitting = load_plan(expanded(plan))
        if reason := _mismatch(fitting.target, here):
            log.warning("the plan %s is not used: %s; the serial plan runs (weft search makes a new one)", plan, reason)
            return None
    if fitting is None:
        return None
    if not fitting.periods:
        made = f" ({fitting.made})" if fitting.made else ""
        log.info("a search for this model and GPU%s found no pipeline faster than the serial plan; running that", made)
        return None
    spec = fitting.spec_of(spec)
    if unsupported := [op for op in by_name(spec).values() if op.role is Role.NETWORK and op.kernel not in COLLECTIVES]:
        names = ", ".join(f"{op.name} ({op.kernel})" for op in unsupported)
        log.warning("the plan %s is not used: pipelines cannot run %s yet; the serial plan runs", plan, names)
        return None
    for period in fitting.periods:
        period.check(spec, here.sms)
    most = max_num_batched_tokens or max(p.tokens for p in fitting.periods)
    usable = tuple(p for p in fitting.periods if p.tokens <= most)
    if not usable and plan != "auto":
        raise ConfigError(f"every pipeline of {plan} exceeds --max-num-batched-tokens {max_num_batched_tokens}")
    return replace(fitting, periods=usable) if usable else None
