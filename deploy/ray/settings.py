"""Defines `Settings`, the application's settings: `args` of a Serve configuration, or arguments of `serve run`."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weft.engine.errors import ConfigError, invalid_option
from weft.server.config import ServeConfig

OWN_OPTIONS = ("host", "port", "handover", "tls_cert", "tls_key", "model", "served_model_name")
"""Options of `weft serve` that the replica sets itself."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scaling(_Section):
    """Autoscaling of a model. Each target is a mean over replicas; the one that needs the most replicas applies."""

    min_replicas: int = Field(1, ge=0, description="minimum replicas")
    max_replicas: int = Field(4, ge=1, description="maximum replicas")
    target_requests: float = Field(64.0, gt=0, description="open requests per replica")
    target_waiting: float = Field(2.0, gt=0, description="sequences per replica waiting for its engine")
    target_kv: float = Field(0.85, gt=0, le=1, description="share of a replica's KV pages in use")
    upscale_delay_s: float = Field(10.0, ge=0, description="seconds before scaling up")
    downscale_delay_s: float = Field(300.0, ge=0, description="seconds before scaling down")
    interval_s: float = Field(2.0, gt=0, description="seconds between measurements")

    @model_validator(mode="after")
    def _bounds(self) -> Scaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas")
        return self


class Model(_Section):
    """A model with a separate deployment."""

    model: str = Field("demo", min_length=1, description="model, as in `weft serve`")
    name: str | None = Field(None, min_length=1, description="name in requests [the model's name]")
    options: dict[str, Any] = Field({}, description="more options of `weft serve`, by their YAML names")
    replicas: int = Field(1, ge=1, description="number of daemons, unless `scaling` is set")
    scaling: Scaling | None = Field(None, description="autoscaling")
    num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves per replica")
    num_gpus: float | None = Field(
        None, ge=0, description="GPUs that Ray reserves per replica [one per rank; none for demo and device: cpu]"
    )
    max_ongoing_requests: int = Field(1024, ge=1, description="requests per replica; more wait in the ingress")
    start_timeout_s: float = Field(1800.0, gt=0, description="seconds until a daemon must be ready")
    drain_timeout_s: float = Field(120.0, gt=0, description="seconds for open requests when a replica stops")

    @model_validator(mode="after")
    def _options(self) -> Model:
        for name in self.options:
            if name.replace("-", "_") in OWN_OPTIONS:
                raise ValueError(f"options.{name}: the replica sets it")
        try:
            self.serve_config()
        except ValidationError as error:
            name, reason = invalid_option(error, ServeConfig)
            raise ValueError(f"options.{name}: {reason}" if name else f"options: {reason}") from None
        return self

    def serve_options(self) -> dict[str, Any]:
        """Return the content of the daemon's YAML file."""
        options = {name.replace("-", "_"): value for name, value in self.options.items()}
        given: dict[str, Any] = {"ui": False, "access_log": False, **options, "model": self.model}
        if self.name is not None:
            given["served_model_name"] = [self.name]
        return {**given, "host": "127.0.0.1", "port": 0}

    def serve_config(self) -> ServeConfig:
        return ServeConfig.model_validate(self.serve_options())

    @property
    def names(self) -> list[str]:
        """Model names for requests."""
        return self.serve_config().model_names

    @property
    def deployment(self) -> str:
        return re.sub(r"[^\w.-]+", "--", f"weft-{self.names[0]}")

    @property
    def ranks(self) -> int:
        """Number of GPUs of the daemon."""
        config = self.serve_config()
        return config.tensor_parallel_size * config.data_parallel_size

    @property
    def gpus(self) -> float:
        if self.num_gpus is not None:
            return self.num_gpus
        return 0.0 if self.model == "demo" or self.serve_config().device == "cpu" else float(self.ranks)


class Ingress(_Section):
    """Settings of the ingress, which takes HTTP requests from Serve's proxies."""

    replicas: int = Field(1, ge=1, description="processes; each routes by requests it sent and reports of replicas")
    num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves per process")
    max_ongoing_requests: int = Field(4096, ge=1, description="concurrent requests per process")
    max_body_mib: float = Field(32.0, gt=0, description="maximum request body, in MiB")


class Settings(_Section):
    models: list[Model] = Field(min_length=1, description="the first one answers requests that name none")
    ingress: Ingress = Field(default_factory=lambda: Ingress.model_validate({}))

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, value: Any) -> Any:
        """Convert `model=demo replicas=2` to a list with one model."""
        if isinstance(value, dict) and "models" not in value:
            own = {name: given for name, given in value.items() if name in Model.model_fields}
            return {**{n: v for n, v in value.items() if n not in own}, "models": [own]}
        return value

    @model_validator(mode="after")
    def _different_names(self) -> Settings:
        names = [name for model in self.models for name in model.names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two models are named {twice[0]!r}; rename one of them")
        return self


def read(args: dict[str, Any]) -> Settings:
    """Validate settings. Raises `ConfigError`."""
    try:
        return Settings.model_validate(args)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {first['msg']}" if where else first["msg"]) from None
