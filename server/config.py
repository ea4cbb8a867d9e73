"""`ServeConfig`: everything `weft serve` can be told: the options of the engine and of HTTP, flat."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.engine.config import EngineConfig

LogLevel = Literal["debug", "info", "warning", "error"]


class ServeConfig(EngineConfig):
    """Options of one daemon. The field descriptions are the text of `weft serve --help`."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    served_model_name: list[str] = Field(
        [], description="names that requests may use, the first is the one that answers carry [the model's own name]"
    )
    api_key: list[str] = Field([], repr=False, description="keys that clients may present [no key needed]")
    admin_api_key: str | None = Field(None, min_length=1, repr=False, description="key of /admin/ [/admin/ is off]")
    max_queued_requests: int = Field(
        1024, ge=0, description="sequences waiting for the engine at most; beyond that 503 with Retry-After"
    )
    max_queued_tokens: int = Field(
        1_000_000, ge=1, description="prompt tokens waiting for their first output token at most; beyond that 503"
    )
    request_timeout: float | None = Field(None, gt=0, description="seconds a request may take in all [no limit]")
    drain_timeout: float = Field(30.0, ge=0, description="seconds that open requests get to finish after SIGTERM")
    max_body_mib: float = Field(32.0, gt=0, description="size of a request body at most, in MiB")
    tokenizer_threads: int = Field(2, ge=1, le=64, description="threads that tokenize and render chat templates")
    log_level: LogLevel = Field("info", description="how much is logged to stderr")

    @field_validator("served_model_name", "api_key")
    @classmethod
    def _no_empty_entries(cls, value: list[str]) -> list[str]:
        if any(not entry.strip() for entry in value):
            raise ValueError("must not contain an empty entry")
        return value

    @property
    def engine(self) -> EngineConfig:
        """The part that the engine process is told."""
        return EngineConfig.model_validate({name: getattr(self, name) for name in EngineConfig.model_fields})

    @property
    def model_names(self) -> list[str]:
        return self.served_model_name or [self.model_name]
