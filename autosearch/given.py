"""What a search begins with: the profile it runs on, recorded or modelled, and the plan it starts from."""

from __future__ import annotations

from pathlib import Path

from weft.autosearch.accelerators import accelerator
from weft.autosearch.bench_protocol import Load
from weft.autosearch.modelled import modelled_profile
from weft.autosearch.profile import Profile, load_profile, recorded_profiles
from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Plan, Target, load_plan, model_key

MODELLED = "h200"
"""the accelerator that stands for several GPUs of which no profile was recorded"""


def find_profile(
    spec: ModelSpec, load: Load, given: Path | None, target: Target | None
) -> Profile | None:  # fmt: skip
    """The profile to search on. given: `--profile`. target: this machine's GPU; None without one.

    Of several ranks it is a modelled one where none was recorded. Raises `ConfigError` when the given one is of another
    model or GPU, or there is none and nothing to measure on.
    """
    key = model_key(spec)
    if given is not None:
        profile = load_profile(given)
        if profile.target.model != key:
            raise ConfigError(f"the profile {given} is of another model ({profile.target.model}), not {key}")
        if target is not None and profile.target != target:
            raise ConfigError(f"the profile {given} is not of this GPU and these kernels: leave out --profile")
        return profile
    for _, profile in recorded_profiles():
        fits = profile.target.model == key if target is None else profile.target == target
        if fits and profile.load.tokens >= load.tokens:
            return profile
    if target is not None:
        return None
    if spec.shard_of.ranks > 1:
        return modelled_profile(spec, load, accelerator(MODELLED))
    raise ConfigError(
        "there is no GPU here and no recorded profile of this model: give one with --profile FILE, or --gpu NAME for "
        "a modelled one"
    )


def known_plan(path: Path, spec: ModelSpec) -> Plan:
    """That of `--start`. Raises `ConfigError` when they are of another model."""
    plan = load_plan(path)
    if plan.target.model != model_key(spec):
        raise ConfigError(f"--start {path} is a plan of another model ({plan.target.model}), not {model_key(spec)}")
    bound = plan.spec_of(spec)
    for period in plan.periods:
        period.check(bound)
    return plan
