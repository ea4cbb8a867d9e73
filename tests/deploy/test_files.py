"""The files in deploy/ agree with each other and with the daemon."""

from __future__ import annotations

import re
from typing import Any

import pytest
from files import DEPLOY, dashboards, metric_names, queries, read_yaml, rules
from prometheus_client.parser import text_string_to_metric_families

from weft.engine.wire.heartbeat import Heartbeats, Watch
from weft.engine.wire.messages import EnergyStats, EngineReady, EngineStats
from weft.server.observe.metrics import ENDPOINTS, Metrics

DATA_PANELS = ("timeseries", "stat", "heatmap")


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Names of samples that the daemon exposes or rules record."""
    metrics = Metrics(watch=Watch(Heartbeats(2)), models={"demo": [0]})
    ready = {name: 0 for name in EngineReady.__struct_fields__ if name != "eos_token_ids"}
    metrics.engines[0].loaded("demo", EngineReady(**{**ready, "dtype": "", "device": "", "eos_token_ids": ()}))
    metrics.engines[0].update(EngineStats(energy=EnergyStats(source="nvml")))
    metrics.requests.labels("/v1/completions", "200").inc()
    for tier in ("gpu", "host"):
        metrics.load_seconds.labels(tier).observe(0.1)
    families = text_string_to_metric_families(metrics.render().decode())
    exposed = {sample.name for family in families for sample in family.samples}
    return exposed | {rule["record"] for rule in rules() if "record" in rule}


def test_rules_use_metrics_that_exist(known: set[str]) -> None:
    for rule in rules():
        assert metric_names(rule["expr"]) <= known, rule


def test_dashboards_use_metrics_that_exist(known: set[str]) -> None:
    for query in queries():
        assert metric_names(query.expr) <= known, query.name


def test_every_alert_has_a_severity_and_an_action() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({alert["alert"] for alert in alerts}) == len(alerts)
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket"), alert
        assert alert["annotations"].keys() == {"summary", "description"}, alert


def test_every_alert_is_tested_firing_and_quiet() -> None:
    cases = [
        c for test in read_yaml(DEPLOY / "../tests/deploy/alerts.test.yml")["tests"] for c in test["alert_rule_test"]
    ]
    firing = {case["alertname"] for case in cases if case["exp_alerts"]}
    quiet = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert firing == quiet == {rule["alert"] for rule in rules() if "alert" in rule}


def test_latency_objectives_lie_on_a_bucket() -> None:
    metrics = Metrics()
    assert 0.5 in metrics.ttft.bounds
    assert 0.2 in metrics.normalized.bounds


def test_availability_covers_every_request_for_a_models_answer() -> None:
    requested = [rule["expr"] for rule in rules() if rule.get("labels") == {"slo": "availability"}]
    requested += [query.expr for query in queries() if query.dashboard == "slo.json"]
    of_endpoints = re.compile(r'weft_requests_total\{[^}]*endpoint=~"([^"]*)"')
    (pattern,) = {pattern for expr in requested for pattern in of_endpoints.findall(expr)}
    answering = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"}
    assert {each for each in ENDPOINTS if re.fullmatch(pattern, each)} == {*answering, "/invocations"}


@pytest.mark.parametrize("dashboard", dashboards().values(), ids=dashboards())
def test_panels_are_complete(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert dashboard["schemaVersion"] == 42
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["type"] in DATA_PANELS, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target.get("legendFormat") is not None for target in panel["targets"]), panel["title"]
        if panel["type"] == "stat":
            assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]


@pytest.mark.parametrize("dashboard", dashboards().values(), ids=dashboards())
def test_panels_fill_the_grid_without_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    rows = 1 + max(y for _, y in taken)
    assert taken == {(x, y) for x in range(24) for y in range(rows)}


def test_dashboards_link_to_each_other() -> None:
    uids = {dashboard["uid"] for dashboard in dashboards().values()}
    for dashboard in dashboards().values():
        assert {link["url"] for link in dashboard["links"]} == {f"/d/{uid}" for uid in uids - {dashboard["uid"]}}


def test_services_find_each_other_and_their_files() -> None:
    services = read_yaml(DEPLOY / "compose.yaml")["services"]
    mounts: dict[str, str] = {}
    for service in services.values():
        for mount in service.get("volumes", ()):
            source, target, *_ = mount.split(":")
            if source.startswith("."):
                assert (DEPLOY / source).is_dir(), mount
                mounts[target] = source
    scraped = read_yaml(DEPLOY / "prometheus/prometheus.yml")["scrape_configs"]
    assert [job["job_name"] for job in scraped] == ["weft"]
    assert scraped[0]["static_configs"] == [{"targets": ["weft:8000"]}]
    assert services["weft"]["ports"] == ["127.0.0.1:${WEFT_PORT:-8000}:8000"]
    (source,) = read_yaml(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read_yaml(DEPLOY / "grafana/provisioning/dashboards/weft.yaml")["providers"]
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.removeprefix(provider["options"]["path"] + "/") in dashboards()
