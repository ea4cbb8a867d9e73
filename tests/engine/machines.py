"""`machine_settings`: how many examples a state machine tries."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def machine_settings(examples: int, steps: int, *, daily: int) -> settings:
    """`make test` tries `daily` examples. The nightly run and mutation testing, which use other profiles, try
    `examples`; they begin with the same ones."""
    hurried = settings.get_current_profile_name() == "unhurried"
    return settings(
        max_examples=daily if hurried else examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
