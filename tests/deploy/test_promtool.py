"""promtool checks the configuration and runs the tests of the alerts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from files import DEPLOY

pytestmark = pytest.mark.slow


def run(*command: str | Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_configuration_and_rules_are_valid(promtool: str) -> None:
    run(promtool, "check", "config", DEPLOY / "prometheus/prometheus.yml")


def test_alerts_fire_when_they_should(promtool: str) -> None:
    run(promtool, "test", "rules", Path(__file__).with_name("alerts.test.yml"))
