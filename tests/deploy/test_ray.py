"""deploy/ray without Ray: settings, routing keys, choice and number of replicas, metrics, configuration files."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray_live
import yaml
from prometheus_client.parser import text_string_to_metric_families

from weft.deploy.ray.affinity import MOST_BLOCKS, Affinity, Blocks
from weft.deploy.ray.prompt import BLOCK, prompt_keys
from weft.deploy.ray.scaling import KV, REQUESTS, WAITING, Policy
from weft.deploy.ray.scrape import figures, labelled, merged
from weft.deploy.ray.settings import read
from weft.engine.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"


def conversation(*texts: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], **more}


# -- settings


def test_arguments_after_serve_run_configure_one_model() -> None:
    settings = read({"model": "demo", "replicas": "2"})
    (model,) = settings.models
    assert (model.names, model.replicas, model.gpus, model.deployment) == (["demo"], 2, 0.0, "weft-demo")
    assert model.serve_options()["port"] == 0


def test_a_replica_gets_a_gpu_for_each_rank() -> None:
    (model,) = read({"models": [{"model": "ORG/NAME", "options": {"tensor-parallel-size": 4}}]}).models
    assert (model.gpus, model.ranks) == (4.0, 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"modle": "demo"}, "modle: Extra inputs"),
        ({"model": "demo", "options": {"max_num_seqs": "many"}}, "options.max_num_seqs"),
        ({"model": "demo", "options": {"port": 1}}, "options.port: the replica sets it"),
        ({"models": []}, "models: "),
        ({"models": [{"model": "demo"}, {"model": "demo"}]}, "two models are named 'demo'"),
        ({"model": "demo", "scaling": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas is more"),
    ],
)
def test_a_wrong_setting_is_a_one_line_error(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(args)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_files_for_serve_and_kuberay_fit_the_application() -> None:
    config = yaml.safe_load((FOLDER / "serve_config.yaml").read_text())
    manifest = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
    assert yaml.safe_load(manifest["spec"]["serveConfigV2"]) == config
    (application,) = config["applications"]
    assert application["import_path"] == "weft.deploy.ray:app"
    settings = read(application["args"])
    assert len(settings.models) == 2
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    most = sum(m.scaling.max_replicas if m.scaling is not None else m.replicas for m in settings.models)
    assert group["maxReplicas"] == most
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > max(model.drain_timeout_s for model in settings.models)


# -- which replica


def test_a_longer_conversation_starts_with_the_keys_of_a_shorter_one() -> None:
    first, size = prompt_keys("m", conversation("a" * 1000, tools=[{"type": "function"}]))
    later, _ = prompt_keys("m", conversation("a" * 1000, "b" * 1000, tools=[{"type": "function"}]))
    assert len(first) == size // BLOCK
    assert later[: len(first)] == first
    assert len(later) > len(first)
    other, _ = prompt_keys("m", conversation("a" * 999 + "b" * 1000, tools=[{"type": "function"}]))
    assert other[:3] == first[:3]
    assert other[4:] != later[4:]


def test_tenants_and_models_share_no_keys() -> None:
    body = conversation("a" * 1000)
    found = [prompt_keys(model, body, tenant)[0] for model in "mn" for tenant in ("", "Bearer x")]
    found.append(prompt_keys("m", {**body, "cache_salt": "s"})[0])
    assert len({keys[0] for keys in found}) == len(found)


def test_prompts_of_any_kind_have_keys() -> None:
    for body in ({"prompt": "a" * 300}, {"prompt": list(range(300))}, {"input": "a" * 300}, {"system": "a" * 300}):
        assert len(prompt_keys("m", body)[0]) >= 1
    assert prompt_keys("m", {}) == ((), 0)
    assert prompt_keys("m", {"prompt": [1] * 300})[0] != prompt_keys("m", {"prompt": [2] * 300})[0]


def test_a_conversation_stays_with_its_prefix_unless_that_replica_refused() -> None:
    affinity = Affinity()
    affinity.replicas("abc")
    keys, size = prompt_keys("m", conversation("x" * 4000))
    home = affinity.choose(keys, size)[0]
    affinity.sent("1", home, keys, size)
    affinity.ended("1")
    affinity.ended("1")
    longer, longer_size = prompt_keys("m", conversation("x" * 4000, "y" * 500))
    assert affinity.choose(longer, longer_size)[0] == home
    ranks = affinity.choose(longer, longer_size, avoid=[home])
    assert ranks[0] != home
    assert ranks[-1] == home
    assert affinity.num_open == 0


def test_keys_reported_by_a_replica_count_like_sent_ones() -> None:
    seen = Blocks()
    keys, size = prompt_keys("m", conversation("x" * 4000))
    seen.add(keys)
    affinity = Affinity()  # from an ingress that starts with no history
    affinity.replicas("abc")
    affinity.update("b", seen.dump())
    assert affinity.choose(keys, size)[0] == "b"


def test_remembered_blocks_have_a_limit() -> None:
    blocks = Blocks(2)
    blocks.add([b"1", b"2", b"1", b"3"])
    assert (blocks.dump(), b"2" in blocks) == (b"13", False)
    assert MOST_BLOCKS * 8 == 65536


def test_replicas_may_join_and_leave() -> None:
    affinity = Affinity()
    assert affinity.choose((), 0) == []
    affinity.replicas("a")
    for i in range(50):
        affinity.sent(f"{i}", "a", (), 1000)
    affinity.replicas("ab")
    chosen = []
    for i in range(20):
        chosen.append(affinity.choose((), 1000)[0])
        affinity.sent(f"new {i}", chosen[-1], (), 1000)
    assert chosen == ["b"] * 20  # it has no work yet
    affinity.replicas("b")
    affinity.ended("1")
    affinity.sent("x", "a", (), 1000)
    assert affinity.choose((), 1000) == ["b"]


def test_many_conversations_keep_their_prefixes_and_share_the_work() -> None:
    rng = random.Random(5)
    affinity = Affinity()
    affinity.replicas("abc")
    kept: dict[str, set[bytes]] = {name: set() for name in "abc"}
    alone: set[bytes] = set()
    given = dict.fromkeys("abc", 0)
    hits = best = 0
    texts: list[list[str]] = [[] for _ in range(60)]
    open_: list[str] = []
    for i in range(900):
        texts[i % 60].append(rng.randbytes(rng.randrange(100, 700)).hex())
        keys, size = prompt_keys("m", conversation(*texts[i % 60]))
        name = affinity.choose(keys, size)[0]
        hit = next((j for j, key in enumerate(keys) if key not in kept[name]), len(keys))
        hits += hit
        best += next((j for j, key in enumerate(keys) if key not in alone), len(keys))
        given[name] += size - hit * BLOCK
        kept[name].update(keys)
        alone.update(keys)
        affinity.sent(str(i), name, keys, size)
        open_.append(str(i))
        if len(open_) > 24:
            affinity.ended(open_.pop(rng.randrange(len(open_))))
    assert hits >= 0.9 * best
    assert max(given.values()) <= 1.3 * sum(given.values()) / 3


# -- how many replicas


def context(now: int, ongoing: float = 0.0, **values_of: list[float]) -> Any:
    measures = {name: dict(enumerate(values)) for name, values in values_of.items()}
    return SimpleNamespace(
        current_num_replicas=now, target_num_replicas=1, total_num_requests=ongoing, aggregated_metrics=measures
    )


def test_the_metric_that_requires_the_most_replicas_wins() -> None:
    policy = Policy(target_requests=10, target_waiting=2, target_kv=0.8)
    assert policy(context(2, 0.0, **{REQUESTS: [0, 0], WAITING: [0, 0], KV: [0, 0]}))[0] == 0
    assert policy(context(2, 30.0))[0] == 3
    assert policy(context(2, 4.0, **{REQUESTS: [2, 2], WAITING: [4, 8], KV: [0.8, 0.4]}))[0] == 6
    assert policy(context(2, 4.0, **{REQUESTS: [2, 2], WAITING: [0, 0], KV: [1.0, 1.0]}))[0] == pytest.approx(2.5)
    assert policy(context(0, 4.0))[0] == 1


# -- metrics

ONE = """# HELP weft_a_total A
# TYPE weft_a_total counter
weft_a_total 3
weft_a_total{kind="x"} 2
# HELP weft_b B
# TYPE weft_b histogram
weft_b_bucket{le="+Inf"} 1
weft_b_count 1
weft_b_sum 0.5
# HELP weft_info Always 1
# TYPE weft_info gauge
weft_info{page_size="16",num_pages="64"} 1.0
"""


def test_metrics_of_replicas_become_one_exposition() -> None:
    families = {f.name: f for f in text_string_to_metric_families(merged({"d#1": ONE, "d#2": ONE}))}
    assert [s.labels for s in families["weft_a"].samples if not s.labels.get("kind")] == [
        {"replica": "d#1"},
        {"replica": "d#2"},
    ]
    assert len(families["weft_b"].samples) == 6
    assert families["weft_b"].type == "histogram"
    assert merged({}) == ""


def test_a_replica_reads_its_own_metrics() -> None:
    assert figures(ONE, frozenset({"weft_a_total"})) == {"weft_a_total": 5.0}
    assert labelled(ONE, "weft_info") == {"page_size": "16", "num_pages": "64"}
    assert labelled(ONE, "weft_none") == {}


# -- the daemon of a replica


async def test_a_daemon_that_cannot_start_reports_so() -> None:
    from weft.deploy.ray.child import Child
    from weft.engine.errors import WeftError

    with pytest.raises(WeftError, match="status 2"):
        await asyncio.wait_for(Child.start({"model": "/nowhere", "port": 0}, 60.0), 120)


# -- the private Ray of the other tests


def test_ray_is_started_again_in_another_folder_until_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_live, "PAUSE", 0.0)
    folders: list[str] = []
    stops: list[int] = []

    def init(lasting: int, **options: Any) -> None:
        folders.append(options["_temp_dir"])
        if len(folders) <= lasting:
            raise TimeoutError("the node timed out during startup")

    ray_live.begin(partial(init, 2), lambda: stops.append(len(folders)), "folder")
    assert folders == ["folder/1", "folder/2", "folder/3"]
    assert stops == [1, 2]
    folders.clear()
    with pytest.raises(TimeoutError):
        ray_live.begin(partial(init, 99), lambda: None, "folder")
    assert len(folders) == ray_live.ATTEMPTS
