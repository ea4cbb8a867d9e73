"""`Settings`: what the application can be told: `args` of a Serve configuration, words behind `serve run`."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weft.engine.errors import ConfigError, wrong_option
from weft.server.config import ServeConfig

OWN_OPTIONS = ("host", "port", "handover", "tls_cert", "tls_key", "model", "served_model_name")
"""of `weft serve`, which the replica sets itself"""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scaling(_Part):
    """When a model gets more replicas, or fewer. Each target is a mean over replicas; the one that asks for the most
    replicas is followed."""

    min_replicas: int = Field(1, ge=0, description="replicas at least")
    max_replicas: int = Field(4, ge=1, description="and at most")
    target_requests: float = Field(64.0, gt=0, description="open requests of a replica")
    target_waiting: float = Field(2.0, gt=0, description="sequences of a replica that wait for its engine")
    target_kv: float = Field(0.85, gt=0, le=1, description="part of a replica's KV pages that is held")
    upscale_delay_s: float = Field(10.0, ge=0, description="seconds that more must be wanted for")
    downscale_delay_s: float = Field(300.0, ge=0, description="seconds that fewer must do for")
    interval_s: float = Field(2.0, gt=0, description="between measurements")

    @model_validator(mode="after")
    def _bounds(self) -> Scaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas")
        return self


class Model(_Part):
    """One model, served by a deployment of its own."""

    model: str = Field("demo", min_length=1, description="as `weft serve` takes it")
    name: str | None = Field(None, min_length=1, description="that requests use [the model's own]")
    options: dict[str, Any] = Field({}, description="further options of `weft serve`, by their names in its YAML file")
    replicas: int = Field(1, ge=1, description="daemons, unless `scaling` is given")
    scaling: Scaling | None = Field(None, description="from how many replicas to how many, and when")
    num_cpus: float = Field(1.0, ge=0, description="that Ray reserves for a replica")
    num_gpus: float | None = Field(None, ge=0, description="the same [one a rank; none for demo and device: cpu]")
    max_ongoing_requests: int = Field(1024, ge=1, description="requests of a replica; more wait in the ingress")
    start_timeout_s: float = Field(1800.0, gt=0, description="seconds that a daemon may take until it is ready")
    drain_timeout_s: float = Field(120.0, gt=0, description="seconds that open requests get when a replica goes")

    @model_validator(mode="after")
    def _options(self) -> Model:
        for name in self.options:
            if name.replace("-", "_") in OWN_OPTIONS:
                raise ValueError(f"options.{name}: the replica sets it")
        try:
            self.serve_config()
        except ValidationError as error:
            name, reason = wrong_option(error, ServeConfig)
            raise ValueError(f"options.{name}: {reason}" if name else f"options: {reason}") from None
        return self

    def serve_options(self) -> dict[str, Any]:
        """What the daemon's YAML file has."""
        options = {name.replace("-", "_"): value for name, value in self.options.items()}
        given: dict[str, Any] = {"ui": False, "access_log": False, **options, "model": self.model}
        if self.name is not None:
            given["served_model_name"] = [self.name]
        return {**given, "host": "127.0.0.1", "port": 0}

    def serve_config(self) -> ServeConfig:
        return ServeConfig.model_validate(self.serve_options())

    @property
    def names(self) -> list[str]:
        """That requests may use."""
        return self.serve_config().model_names

    @property
    def deployment(self) -> str:
        return re.sub(r"[^\w.-]+", "--", f"weft-{self.names[0]}")

    @property
    def ranks(self) -> int:
        """GPUs that the daemon spreads over."""
        config = self.serve_config()
        return config.tensor_parallel_size * config.data_parallel_size

    @property
    def gpus(self) -> float:
        if self.num_gpus is not None:
            return self.num_gpus
        return 0.0 if self.model == "demo" or self.serve_config().device == "cpu" else float(self.ranks)


class Ingress(_Part):
    """What takes HTTP from Serve's proxies."""

    replicas: int = Field(1, ge=1, description="processes; each routes by what it has sent and what replicas tell")
    num_cpus: float = Field(1.0, ge=0, description="that Ray reserves for one")
    max_ongoing_requests: int = Field(4096, ge=1, description="requests of one at a time")
    max_body_mib: float = Field(32.0, gt=0, description="size of a request's body at most, in MiB")


class Settings(_Part):
    models: list[Model] = Field(min_length=1, description="the first one answers what names none of them")
    ingress: Ingress = Field(default_factory=lambda: Ingress.model_validate({}))

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, value: Any) -> Any:
        """`model=demo replicas=2` stands for a list with that model alone."""
        if isinstance(value, dict) and "models" not in value:
            own = {name: given for name, given in value.items() if name in Model.model_fields}
            return {**{n: v for n, v in value.items() if n not in own}, "models": [own]}
        return value

    @model_validator(mode="after")
    def _different_names(self) -> Settings:
        names = [name for model in self.models for name in model.names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two models are called {twice[0]!r}: give one of them another name")
        return self


def read(args: dict[str, Any]) -> Settings:
    """Raises `ConfigError`, one line."""
    try:
        return Settings.model_validate(args)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {first['msg']}" if where else first["msg"]) from None
