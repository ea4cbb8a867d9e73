"""Checks objects against Kubernetes' schemas, read from the wheel of kubernetes-validate."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

VERSIONS = ("1.29.0", "1.37.0")
"""the oldest and the newest versions that the manifests must satisfy"""


class Schemas:
    def __init__(self, wheel: Path, version: str) -> None:
        self._wheel = zipfile.ZipFile(wheel)
        self._folder = f"kubernetes_validate/kubernetes-json-schema/v{version}-local-strict"
        definitions = Resource.from_contents(self._read("_definitions.json"))
        self._registry: Registry[Any] = Registry().with_resource("_definitions.json", definitions)

    def _read(self, name: str) -> Any:
        return json.loads(self._wheel.read(f"{self._folder}/{name}"))

    def errors(self, value: dict[str, Any]) -> list[str]:
        """The errors of a Kubernetes object, unknown fields included. Raises `KeyError` for an unknown kind."""
        group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", value["apiVersion"])
        schema = self._read(f"{value['kind'].lower()}-{group}.json")
        found = Draft202012Validator(schema, registry=self._registry).iter_errors(value)
        return [f"{'.'.join(map(str, e.path))}: {e.message[:200]}" for e in found]


_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_SELECTOR = {
    "type": "object",
    "required": ["matchLabels"],
    "properties": {"matchLabels": _LABELS},
    "additionalProperties": False,
}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {**required, **optional}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


EXTENSIONS: dict[str, dict[str, Any]] = {
    "ServiceMonitor": _object(
        {
            "selector": _SELECTOR,
            "endpoints": {
                "type": "array",
                "minItems": 1,
                "items": _object(
                    {"port": {"type": "string"}, "path": {"const": "/metrics"}, "interval": {"pattern": r"^\d+s$"}}
                ),
            },
        },
        jobLabel={"type": "string"},
    ),
    "ScaledObject": _object(
        {
            "scaleTargetRef": _object({"name": {"type": "string"}}, apiVersion={"const": "apps/v1"}, kind={}),
            "triggers": {
                "type": "array",
                "minItems": 1,
                "items": _object(
                    {
                        "type": {"const": "prometheus"},
                        "metadata": _object(
                            {
                                "serverAddress": {"type": "string"},
                                "query": {"type": "string"},
                                "threshold": {"type": "string"},
                            }
                        ),
                    }
                ),
            },
        },
        minReplicaCount={"type": "integer"},
        maxReplicaCount={"type": "integer"},
        pollingInterval={"type": "integer"},
        cooldownPeriod={"type": "integer"},
        advanced=_object({"horizontalPodAutoscalerConfig": _object({"behavior": {"type": "object"}})}),
    ),
    "InferencePool": _object(
        {
            "selector": _SELECTOR,
            "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": _object({"number": _PORT})},
            "endpointPickerRef": _object(
                {"name": {"type": "string"}},
                port=_object({"number": _PORT}),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        }
    ),
}
"""`spec` of kinds that are not part of Kubernetes: only the fields used here, written by hand"""


def extension_errors(value: dict[str, Any]) -> list[str]:
    found = Draft202012Validator(EXTENSIONS[value["kind"]]).iter_errors(value["spec"])
    return [f"{'.'.join(map(str, e.path))}: {e.message[:200]}" for e in found]
