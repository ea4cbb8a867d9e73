"""Fixtures shared by all tests: tiny checkpoints, made once a session."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# Helper modules next to the tests are imported by name; the repository root stays off sys.path.
for folder in ("engine", "kernels", "autosearch", "gpu"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# A busy machine is not a failure: each test sets its own timeout for examples and for generating them. Examples are the
# same in every run, so that a failure comes from the change under test; the nightly run draws others.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.register_profile("surprising", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
# Settings for tools that only need to know whether a test fails: they do not search for the smallest example.
settings.register_profile(
    "unshrunk", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.reuse, Phase.generate), database=None
)


gc.disable()  # nothing that was imported or collected is garbage


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is it later
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked nightly run only when they are selected, by their mark or by their name."""
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
