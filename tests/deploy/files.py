"""The files of deploy/, parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = ("recording.yml", "alerts.yml")


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def dashboards() -> dict[str, Any]:
    """Dashboards by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(DEPLOY.glob("grafana/dashboards/*.json"))}


def rules() -> list[dict[str, Any]]:
    files = [read_yaml(DEPLOY / "prometheus" / name) for name in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


class Query(NamedTuple):
    dashboard: str
    panel: str
    expr: str

    @property
    def name(self) -> str:
        return f"{self.dashboard} / {self.panel} / {self.expr}"

    def filled(self, *, job: str, interval: str, range: str) -> str:
        """The expression with Grafana's variables as they are when every daemon is selected."""
        expr = self.expr.replace("$__rate_interval", interval).replace("$__range", range)
        return expr.replace("$job", job).replace("$instance", ".*")


def queries() -> Iterator[Query]:
    for file, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield Query(file, panel["title"], target["expr"])
        for annotation in dashboard["annotations"]["list"]:
            yield Query(file, annotation["name"], annotation["expr"])


def metric_names(expr: str) -> set[str]:
    """The names in an expression that belong to weft."""
    return set(re.findall(r"\bweft[_:][a-z0-9_:]+", expr))
