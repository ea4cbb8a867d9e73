"""Defines `WeftServer` and `WeftEngine`, which replace vLLM in Ray Serve LLM.

To use them, set `server_cls: weft.deploy.ray.llm:WeftServer` in an `LLMConfig`. Ray Serve LLM takes the types of
requests and answers from vLLM or SGLang, so one of these must be installed; their engines are not loaded.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from ray.llm._internal.serve.core.configs import openai_api_models as types
from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.serve.llm.deployment import LLMServer

from weft.deploy.ray.caller import Caller
from weft.deploy.ray.child import Child
from weft.deploy.ray.exchange import Head, HttpRequest
from weft.deploy.ray.settings import Model, read
from weft.engine.errors import WeftError

Answers = AsyncGenerator[Any, None]
RAY_FIELDS = frozenset({"request_id"})
"""Fields that Ray Serve LLM adds to requests."""


def model_of(llm_config: Any) -> Model:
    """Convert an `LLMConfig`. `engine_kwargs` are options of `weft serve`. Raises `ConfigError`."""
    loading = llm_config.model_loading_config
    source = loading.model_source if isinstance(loading.model_source, str) else None
    return read(
        {"model": source or loading.model_id, "name": loading.model_id, "options": dict(llm_config.engine_kwargs)}
    ).models[0]


class WeftEngine(LLMEngine):
    """Implements the engine protocol of Ray Serve LLM with a daemon that it starts."""

    def __init__(self, llm_config: Any) -> None:
        self._model = model_of(llm_config)
        self._paused = False

    async def start(self) -> None:
        """Start the daemon. Raises `WeftError` if it does not become ready."""
        options = self._model.serve_options()
        self._child = await Child.start(options, self._model.start_timeout_s, float(options.get("drain_timeout", 30.0)))
        self._caller = Caller(self._child.url)

    # -- requests

    def chat(self, request: Any, raw_request_info: Any = None) -> Answers:
        return self._answers("/v1/chat/completions", types.ChatCompletionResponse, request, raw_request_info)

    def completions(self, request: Any, raw_request_info: Any = None) -> Answers:
        return self._answers("/v1/completions", types.CompletionResponse, request, raw_request_info)

    def embeddings(self, request: Any, raw_request_info: Any = None) -> Answers:
        return self._answers("/v1/embeddings", types.EmbeddingResponse, request, raw_request_info)

    def tokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        return self._answers("/tokenize", types.TokenizeResponse, request, raw_request_info)

    def detokenize(self, request: Any, raw_request_info: Any = None) -> Answers:
        return self._answers("/detokenize", types.DetokenizeResponse, request, raw_request_info)

    def transcriptions(self, request: Any, raw_request_info: Any = None) -> Answers:
        return self._answers("/v1/audio/transcriptions", types.TranscriptionResponse, request, raw_request_info)

    async def _answers(self, path: str, kind: Any, request: Any, info: Any) -> Answers:
        """Yield events as text, or one answer of this kind, or an `ErrorResponse`."""
        async with aclosing(self._send(path, request, info)) as answers:
            async for answer in answers:
                yield kind.model_validate(answer) if isinstance(answer, dict) else answer

    async def _send(self, path: str, request: Any, info: Any) -> Answers:
        """Like `_answers`, with the answer as a dict. Closing it early aborts the request on the daemon."""
        body = request.model_dump(mode="json", exclude_unset=True, exclude=set(RAY_FIELDS))
        headers = {"content-type": "application/json"}
        for name, value in (info.headers if info is not None else {}).items():
            if name.lower() in ("authorization", "x-api-key", "x-request-id", "traceparent") and value:
                headers[name.lower()] = value
        sent = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        head, whole, held = None, b"", b""
        async with aclosing(self._caller.send(HttpRequest("POST", path, sent, orjson.dumps(body)))) as parts:
            async for part in parts:
                if isinstance(part, Head):
                    head = part
                elif head is not None and head.is_stream:
                    held += part
                    end = held.rfind(b"\n\n") + 2
                    if end > 1:
                        yield held[:end].decode()
                        held = held[end:]
                else:
                    whole += part
        if head is None or head.is_stream:
            return
        value = orjson.loads(whole)
        yield value if head.status == 200 else _error_response(head.status, value)

    # -- lifecycle

    async def check_health(self) -> None:
        """Raise if the replica should be replaced."""
        if self._child.exit_status is not None:
            raise WeftError(f"the daemon ended with status {self._child.exit_status}")
        status, text = await self._caller.probe("/health")
        if status != 200:
            raise WeftError(f"the daemon is unhealthy: {text[:200]}")

    async def shutdown(self) -> None:
        await self._child.stop()
        await self._caller.close()

    async def reset_prefix_cache(self) -> None:
        """Reset the prefix cache. Raises `WeftError` without `admin_api_key` in `engine_kwargs`."""
        key = self._model.serve_config().admin_api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        status, text = await self._caller.probe("/admin/reset_prefix_cache", "POST", headers)
        if status != 200:
            raise WeftError(f"the prefix cache was not reset: {text[:200]}")

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def resolve_lora(self, lora_model: Any) -> None:
        raise NotImplementedError("weft does not support LoRA adapters")

    async def start_profile(self) -> None:
        raise NotImplementedError("use the daemon's profiler: POST /admin/profile")

    async def stop_profile(self) -> None:
        raise NotImplementedError("use the daemon's profiler: POST /admin/profile")

    async def build_asgi_app(self) -> Any:
        raise NotImplementedError("for direct serving, use the application weft.deploy.ray:app")


class WeftServer(LLMServer):
    """Ray's LLM server with weft's engine, without requirements on vLLM's configuration."""

    _default_engine_cls = WeftEngine

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return options with one bundle for the daemon and all its ranks."""
        model = model_of(llm_config)
        options = copy.deepcopy(llm_config.deployment_config)
        actor = {"num_cpus": 1, **options.get("ray_actor_options", {})}
        if model.gpus and "num_gpus" not in actor:
            actor["num_gpus"] = model.gpus
        if llm_config.runtime_env:
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
        return {**options, "ray_actor_options": actor}


def _error_response(status: int, value: Any) -> Any:
    error = value.get("error", {}) if isinstance(value, dict) else {}
    return types.ErrorResponse(
        error=types.ErrorInfo(
            message=str(error.get("message", value)),
            type=str(error.get("type") or "invalid_request_error"),
            param=error.get("param"),
            code=status,
        )
    )
