"""Helpers of the tests of the server, the load generator and the simulator are imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("tools", "server", "loadgen", "fleet")]
