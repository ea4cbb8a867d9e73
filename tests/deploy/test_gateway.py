"""deploy/gateway gives an endpoint picker the daemon's actual settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from weft.engine.config import EngineConfig
from weft.engine.wire.messages import EngineReady, EngineStats, SchedulerStats
from weft.server.config import ServeConfig
from weft.server.observe.metrics import ENDPOINTS, Metrics

GATEWAY = Path(__file__).parents[2] / "deploy" / "gateway"


def load(name: str) -> list[Any]:
    return list(yaml.safe_load_all((GATEWAY / name).read_text(encoding="utf-8")))


def test_the_picker_finds_its_plugins_and_the_daemons_page_size() -> None:
    (config,) = load("epp.yaml")
    plugins = {p.get("name", p["type"]): p.get("parameters", {}) for p in config["plugins"]}
    used = [p["pluginRef"] for profile in config["schedulingProfiles"] for p in profile["plugins"]]
    sources = config["dataLayer"]["sources"]
    used += [s["pluginRef"] for s in sources] + [e["pluginRef"] for s in sources for e in s["extractors"]]
    used.append(config["dataLayer"]["discovery"]["endpoints"]["pluginRef"])
    assert set(used) <= set(plugins)
    kv = plugins["precise-prefix-cache-producer"]
    assert kv["tokenProcessorConfig"]["blockSize"] == EngineConfig().page_size
    assert (
        EngineConfig(kv_events_endpoint="tcp://1.2.3.4:5557")
        .kv_topic("m")
        .startswith(kv["kvEventsConfig"]["topicFilter"])
    )
    assert plugins["token-producer"]["modelName"] == ServeConfig().model_names[0]
    assert {"/v1/completions/render", "/v1/chat/completions/render"} <= set(ENDPOINTS)


def test_the_daemons_of_the_file_meet_the_pickers_requirements() -> None:
    (config,) = load("endpoints.yaml")
    for endpoint in config["endpoints"]:
        assert set(endpoint) == {"name", "address", "port"}
        assert len(endpoint["address"].split(".")) == 4
        assert 0 < int(endpoint["port"]) < 65536
        assert isinstance(endpoint["port"], str)


def test_the_metrics_that_pickers_read_exist_with_their_labels() -> None:
    metrics = Metrics()
    metrics.engines[0].loaded(
        "m",
        EngineReady(
            model_type="x", num_parameters=1, dtype="float32", device="cpu", vocab_size=9, max_model_len=9,
            page_size=64, num_pages=100, max_num_seqs=4, max_num_batched_tokens=9, eos_token_ids=(1,), load_seconds=0.0,
        ),
    )  # fmt: skip
    metrics.engines[0].update(
        EngineStats(scheduler=SchedulerStats(running=3, waiting=2, pages_held=25, pages_total=100))
    )
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    gauges = {"vllm:num_requests_waiting": 2.0, "vllm:num_requests_running": 3.0, "vllm:kv_cache_usage_perc": 0.25}
    for name, value in gauges.items():
        assert (families[name].type, [s.value for s in families[name].samples]) == ("gauge", [value])
    (config,) = families["vllm:cache_config_info"].samples
    assert config.labels == {"block_size": "64", "num_gpu_blocks": "100"}


def test_the_pool_selects_weft_on_its_port() -> None:
    pool, route = load("inferencepool.yaml")
    assert pool["spec"]["targetPorts"] == [{"number": ServeConfig().port}]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
