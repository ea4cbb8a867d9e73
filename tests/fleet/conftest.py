"""The daemon of the server's tests, and the engine's harness, are imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "server", Path(__file__).parents[1] / "engine"):
    sys.path.insert(0, str(folder))
