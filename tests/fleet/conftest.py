"""The daemon of the server's tests, the engine's harness and the load generator's server are imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for folder in (TESTS / "fleet", TESTS / "server", TESTS / "engine", TESTS / "loadgen"):
    sys.path.insert(0, str(folder))
