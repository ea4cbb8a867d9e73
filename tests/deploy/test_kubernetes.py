"""deploy/kubernetes: the output of kustomize is valid and fits the daemon."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from files import metric_names
from kubernetes_schemas import EXTENSIONS, VERSIONS, Schemas, extension_errors
from prometheus_client.parser import text_string_to_metric_families

from weft.engine.config import EngineConfig
from weft.server.config import ServeConfig
from weft.server.daemon.cli import _parser
from weft.server.observe.metrics import PROBES, Metrics
from weft.server.options import load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (FOLDER / "components").iterdir())


@cache
def built(folder: Path) -> list[dict[str, Any]]:
    """The output of the real kustomize."""
    for program, *words in (("kustomize", "build"), ("kubectl", "kustomize")):
        if (found := shutil.which(program)) is not None:
            command = [found, *words, "--load-restrictor", "LoadRestrictionsNone", str(folder)]
            made = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            assert made.returncode == 0, made.stderr
            return list(yaml.safe_load_all(made.stdout))
    pytest.skip("there is neither kustomize nor kubectl")


def one(objects: list[dict[str, Any]], *kinds: str) -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] in kinds]
    return found


def workload(overlay: str) -> dict[str, Any]:
    return one(built(FOLDER / "overlays" / overlay), "Deployment", "StatefulSet")


@pytest.fixture(scope="module", params=VERSIONS)
def schemas(request: pytest.FixtureRequest) -> Schemas:
    wheels = sorted((ROOT / "build/schemas").glob("kubernetes_validate-*.whl"))
    if not wheels:
        pytest.skip("there are no schemas: `make schemas` fetches them")
    return Schemas(wheels[-1], request.param)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_are_valid_for_kubernetes(schemas: Schemas, overlay: str) -> None:
    objects = built(FOLDER / "overlays" / overlay)
    assert len(objects) >= 6
    for each in objects:
        assert not schemas.errors(each), (each["kind"], each["metadata"]["name"])


def test_an_unknown_field_is_detected(schemas: Schemas) -> None:
    broken = yaml.safe_load(yaml.safe_dump(workload("cpu-demo")))
    broken["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    assert schemas.errors(broken)
    broken = yaml.safe_load((FOLDER / "components/keda/scaledobject.yaml").read_text())
    broken["spec"]["maxReplicas"] = 3
    assert extension_errors(broken)


@pytest.mark.parametrize("overlay", ["cpu-demo", "ssd-store"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_components_join_an_overlay(component: str, overlay: str, tmp_path: Path) -> None:
    up = "../" * (len(tmp_path.parts) - 1)  # kustomize accepts only relative paths
    kustomization = {
        "resources": [f"{up}{FOLDER}/overlays/{overlay}"],
        "components": [f"{up}{FOLDER}/components/{component}"],
    }
    if overlay == "ssd-store":
        kustomization |= yaml.safe_load((FOLDER / "README.md").read_text().split("```yaml\n")[1].split("```")[0])
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    alone = {(o["kind"], o["metadata"]["name"]) for o in built(FOLDER / "overlays" / overlay)}
    joined = built(tmp_path)
    assert len(joined) == len(alone) + 1
    added = [o for o in joined if o["kind"] in ("ServiceMonitor", "ScaledObject", "HorizontalPodAutoscaler")]
    assert len(added) == 1
    target = added[0]["spec"].get("scaleTargetRef")
    assert target is None or (target["kind"], target["name"]) in alone


def resources() -> list[dict[str, Any]]:
    files = [*FOLDER.glob("components/*/*.yaml"), ROOT / "deploy/gateway/inferencepool.yaml"]
    return [o for file in files if file.name != "kustomization.yaml" for o in yaml.safe_load_all(file.read_text())]


def test_custom_resources_use_the_fields_of_their_definitions(schemas: Schemas) -> None:
    kinds = set()
    for each in resources():
        if each["kind"] in EXTENSIONS:
            kinds.add(each["kind"])
            assert not extension_errors(each), each["kind"]
        elif each["kind"] != "HTTPRoute":
            assert not schemas.errors(each), each["kind"]
    assert kinds == set(EXTENSIONS)


def test_scaling_uses_metrics_that_exist() -> None:
    metrics = Metrics()
    exposed = {s.name for f in text_string_to_metric_families(metrics.render().decode()) for s in f.samples}
    by_kind = {o["kind"]: o for o in resources()}
    queries = [t["metadata"]["query"] for t in by_kind["ScaledObject"]["spec"]["triggers"]]
    names = set().union(*map(metric_names, queries))
    pods = {m["pods"]["metric"]["name"] for m in by_kind["HorizontalPodAutoscaler"]["spec"]["metrics"]}
    assert names == pods
    assert names <= exposed
    adapter = (FOLDER / "components/prometheus-adapter/horizontalpodautoscaler.yaml").read_text()
    assert set(re.findall(r"weft_\w+", adapter.partition("apiVersion")[0])) == pods


def options(overlay: str) -> dict[str, str]:
    return dict(one(built(FOLDER / "overlays" / overlay), "ConfigMap")["data"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_options_are_those_of_weft_serve(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options(overlay)
    assert {name.removeprefix("WEFT_").lower() for name in given} <= set(ServeConfig.model_fields)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config = load(ServeConfig, {}, None)
    container = workload(overlay)["spec"]["template"]["spec"]["containers"][0]
    assert config.host == "0.0.0.0"
    assert [p["containerPort"] for p in container["ports"]] == [config.port]
    if config.device == "cuda":
        mounts = {m["mountPath"] for m in container["volumeMounts"]}
        assert any(config.model.startswith(f"{mount}/") for mount in mounts)
        assert int(re.sub("Gi$", "", container["resources"]["limits"]["memory"])) > config.host_kv_gib
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(
            options(overlay).get("WEFT_TENSOR_PARALLEL_SIZE", 1)
        )
        load(EngineConfig, {}, None)
        (compile_container,) = workload(overlay)["spec"]["template"]["spec"]["initContainers"]
        assert compile_container["command"] == ["weft", "compile"]
        assert _parser().parse_args(["compile", *compile_container["args"]]).gpu == "h200"
        cache = [
            m["name"]
            for m in (*container["volumeMounts"], *compile_container["volumeMounts"])
            if m["mountPath"] == "/cache"
        ]
        assert cache == ["cache", "cache"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_stops_after_its_streams_and_starts_before_it_gets_requests(overlay: str) -> None:
    pod = workload(overlay)["spec"]["template"]["spec"]
    container = pod["containers"][0]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    readiness, liveness, startup = (container[f"{kind}Probe"] for kind in ("readiness", "liveness", "startup"))
    drain = float(options(overlay)["WEFT_DRAIN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + 15
    assert {p["httpGet"]["path"] for p in (readiness, liveness, startup)} == {"/ready", "/health"} <= set(PROBES)
    assert (startup["httpGet"]["path"], liveness["httpGet"]["path"]) == ("/ready", "/health")
    defaults = ServeConfig()
    # weft replaces an engine before Kubernetes replaces the pod, and weft itself gives up a start.
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > 2 * defaults.hang_timeout
    assert startup["periodSeconds"] * startup["failureThreshold"] > defaults.start_timeout
    assert pause > readiness["periodSeconds"] * readiness["failureThreshold"] - 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted_and_found_by_their_labels(overlay: str) -> None:
    objects, owner = built(FOLDER / "overlays" / overlay), workload(overlay)
    template = owner["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"]
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["image"] in ("weft:cpu", "weft:cuda")
    selectors = [
        owner["spec"]["selector"]["matchLabels"],
        one(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]
    selectors += [o["spec"]["selector"] for o in objects if o["kind"] == "Service"]
    selectors.append(one(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"])
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert "USER 10001" in (ROOT / "Dockerfile").read_text()


def test_the_stateful_pod_is_the_gpu_pod_plus_a_volume() -> None:
    usual, stateful = (workload(name)["spec"]["template"]["spec"] for name in ("one-gpu", "ssd-store"))
    stateful = yaml.safe_load(yaml.safe_dump(stateful))
    container = stateful["containers"][0]
    container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] != "kv"]
    for pod in (usual, stateful):
        for each in (*pod["containers"], *pod["initContainers"]):
            each["volumeMounts"].sort(key=lambda m: m["name"])
            for source in each["envFrom"]:
                source["configMapRef"] = "weft-options-…"
        pod["volumes"].sort(key=lambda v: v["name"])
    assert stateful == usual
    (claim,) = workload("ssd-store")["spec"]["volumeClaimTemplates"]
    size = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    assert size > float(options("ssd-store")["WEFT_SSD_KV_GIB"])
