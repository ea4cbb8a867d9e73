"""Ray Serve LLM with weft's engine. The types of requests are stand-ins for SGLang's (`ray_types`); see `make ray`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray.serve", reason="make ray has it")

from openai import AsyncOpenAI, BadRequestError
from ray_live import PATIENCE, own_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TYPES = str(Path(__file__).parent / "ray_types")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), TYPES))))
        patch.setattr(sys, "path", [*sys.path, TYPES])
        with own_ray() as address:
            yield address


async def test_an_application_of_ray_serve_llm_runs_on_weft(url: str) -> None:
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": "org/tiny", "model_source": "demo"},
        server_cls="weft.deploy.ray.llm:WeftServer",
        engine_kwargs={"max_num_seqs": 8, "admin_api_key": "admin"},
        deployment_config={"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.5}},
        log_engine_metrics=False,
    )
    front = {"num_replicas": 1, "autoscaling_config": None, "ray_actor_options": {"num_cpus": 0.5}}
    made = build_openai_app({"llm_configs": [config], "ingress_deployment_config": front})
    await asyncio.to_thread(serve.run, made, name="llm")
    api = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE)
    assert [model.id async for model in api.models.list()] == ["org/tiny"]
    question = [{"role": "user", "content": "What is 1 + 2?"}]
    whole = await api.chat.completions.create(model="org/tiny", messages=question, temperature=0)  # type: ignore[arg-type]
    stream = await api.chat.completions.create(  # type: ignore[call-overload]
        model="org/tiny", messages=question, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content != ""
    text = await api.completions.create(model="org/tiny", prompt="One, two,", max_tokens=4)
    assert text.usage is not None
    assert text.usage.completion_tokens <= 4
    with pytest.raises(BadRequestError, match="temperature"):
        await api.chat.completions.create(model="org/tiny", messages=question, temperature=-1)  # type: ignore[arg-type]
    (name,) = [n for n in serve.status().applications["llm"].deployments if n.startswith("WeftServer")]
    handle = serve.get_deployment_handle(name, "llm")
    await handle.reset_prefix_cache.remote()
    await handle.check_health.remote()
