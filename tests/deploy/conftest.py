"""Paths of Prometheus and its tool. Helpers of the daemon's tests are imported by name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / "build/prometheus/usr/bin"
"""`make test` unpacks Debian's package here"""

sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests/server")]


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=UNPACKED)
    if found is None:
        pytest.skip(f"there is no {name}: `make prometheus` fetches it on Debian, elsewhere see prometheus.io")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    return _program("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    return _program("prometheus")
