"""Inputs of a search: the profile, recorded or from formulas, and the starting plan."""

from __future__ import annotations

from pathlib import Path

from weft.autosearch.accelerators import accelerator
from weft.autosearch.bench_protocol import Load
from weft.autosearch.formula_profile import formula_profile
from weft.autosearch.profile import Profile, load_profile, recorded_profiles
from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Plan, Target, load_plan, model_key

DEFAULT_ACCELERATOR = "h200"
"""Accelerator of the formulas for several GPUs without a recorded profile."""


def find_profile(spec: ModelSpec, load: Load, given: Path | None, target: Target | None) -> Profile | None:
    """Return the profile to search on, or None if it must be measured. given: `--profile`. target: this GPU, if any.

    Uses formulas for several ranks without a recorded profile. Raises `ConfigError` if the given profile does not fit,
    or if there is neither a profile nor a GPU.
    """
    key = model_key(spec)
    if given is not None:
        profile = load_profile(given)
        if profile.target.model != key:
            raise ConfigError(f"the profile {given} is for another model ({profile.target.model}), not {key}")
        if target is not None and profile.target != target:
            raise ConfigError(f"the profile {given} is for another GPU or other kernels: leave out --profile")
        return profile
    for _, profile in recorded_profiles():
        fits = profile.target.model == key if target is None else profile.target == target
        if fits and profile.load.tokens >= load.tokens:
            return profile
    if target is not None:
        return None
    if spec.shard_of.ranks > 1:
        return formula_profile(spec, load, accelerator(DEFAULT_ACCELERATOR))
    raise ConfigError(
        "there is no GPU here and no recorded profile of this model: give one with --profile FILE, or use formulas "
        "with --gpu NAME"
    )


def known_plan(path: Path, spec: ModelSpec) -> Plan:
    """Load the plan of `--start`. Raises `ConfigError` if it is for another model."""
    plan = load_plan(path)
    if plan.target.model != model_key(spec):
        raise ConfigError(f"--start {path} is a plan for another model ({plan.target.model}), not {model_key(spec)}")
    bound = plan.spec_of(spec)
    for period in plan.periods:
        period.check(bound)
    return plan
