"""Fixtures shared by all tests: tiny checkpoints, made once a session."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# Helpers beside the tests are imported by name; the repository root stays off sys.path.
for folder in ("engine", "kernels", "autosearch", "gpu"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# A busy machine is no failure: how long an example may take, or to think of it, is the test's own timeout. The same
# examples each time, for what fails on a change is to be the change's; other ones are for the night.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.register_profile("surprising", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
# What a tool that only wants to know whether a test fails asks for: no search for the smallest example.
settings.register_profile(
    "unshrunk", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.reuse, Phase.generate), database=None
)


gc.disable()  # nothing of what is imported and collected is garbage


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is it later
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked nightly runs when it is asked for: by its mark, or by its name."""
    if "nightly" in config.option.markexpr or any("::" in argument for argument in config.args):
        return
    tonight = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=tonight)
    items[:] = [item for item in items if item not in tonight]


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # lanes share the cores: two threads that wait for each other take three times as long


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model(family)`: the directory of a random checkpoint of that family."""
    from tiny import save_tiny

    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family.replace(".", "")))
        return made[family]

    return get
