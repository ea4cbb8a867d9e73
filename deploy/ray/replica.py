"""`Replica`: a Serve replica that holds a daemon and passes questions on to it, byte for byte."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp
from ray import serve
from ray.serve.metrics import Counter, Gauge

from weft.deploy.ray import scaling
from weft.deploy.ray.affinity import MOST_BLOCKS, Blocks
from weft.deploy.ray.caller import Caller
from weft.deploy.ray.child import Child
from weft.deploy.ray.exchange import Head, Question
from weft.deploy.ray.prompt import BLOCK, TOKEN_BYTES
from weft.deploy.ray.router import PAGES
from weft.deploy.ray.scrape import figures, labelled
from weft.engine.errors import WeftError

LOOK_SECONDS = 2.0
"""between looks at the daemon's metrics"""
GAUGES = {
    "weft_requests_running": "Sequences running",
    "weft_requests_waiting": "Sequences waiting",
    "weft_kv_cache_usage_ratio": "KV pages held / all",
}
COUNTERS = {
    "weft_prompt_tokens_total": "Prompt tokens of started requests",
    "weft_generation_tokens_total": "Tokens generated",
    "weft_prefix_cache_hit_tokens_total": "Prompt tokens found in a tier",
    "weft_preemptions_total": "Requests that lost their pages",
}
"""of the daemon, which Ray's endpoint has too; all others are at the application's /metrics"""
NAMES = frozenset(GAUGES) | frozenset(COUNTERS)

logger = logging.getLogger("ray.serve")


class Replica:
    async def __init__(self, options: dict[str, Any], start_seconds: float) -> None:  # type: ignore[misc]  # Serve awaits it
        """options: of `weft serve`. Raises `WeftError` when the daemon does not get ready."""
        self.name = serve.get_replica_context().replica_id.unique_id
        self._child = await Child.start(options, start_seconds, float(options.get("drain_timeout", 30.0)))
        self._caller = Caller(self._child.url, self.name)
        self._open = 0
        self._figures: dict[str, float] = {}
        self._blocks = Blocks(await self._room())
        self._gauges = {name: Gauge(name, description=text) for name, text in GAUGES.items()}
        # Ray adds the ending `_total` itself.
        self._counters = {name: Counter(name.removesuffix("_total"), description=t) for name, t in COUNTERS.items()}
        self._looking = asyncio.create_task(self._look())

    async def _room(self) -> int:
        """Blocks of text that its KV pages hold, about."""
        info = labelled(await self.metrics(), "weft_cache_config_info")
        tokens = int(info.get("page_size", 0)) * int(info.get("num_pages", 0))
        return max(1, min(MOST_BLOCKS, tokens * TOKEN_BYTES // BLOCK))

    async def answer(self, question: Question) -> AsyncGenerator[Head | bytes, None]:
        """A `Head`, then the body as it comes. Raises `aiohttp.ClientError` when the daemon breaks off."""
        self._open += 1
        try:
            async with aclosing(self._caller.ask(question)) as parts:
                async for part in parts:
                    if isinstance(part, Head) and part.status == 200:
                        self._blocks.add(question.keys)
                    yield part
        finally:
            self._open -= 1

    async def metrics(self) -> str:
        """The daemon's."""
        return (await self._caller.probe("/metrics"))[1]

    async def named_metrics(self) -> tuple[str, str]:
        """With this replica's name."""
        return self.name, await self.metrics()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                now = figures(await self.metrics(), NAMES)
            except (aiohttp.ClientError, TimeoutError):
                continue  # the health check says what is wrong
            for name, gauge in self._gauges.items():
                gauge.set(now.get(name, 0.0))
            for name, counter in self._counters.items():
                # An engine that was restarted counts on; a daemon is never restarted within a replica.
                if (grown := now.get(name, 0.0) - self._figures.get(name, 0.0)) > 0:
                    counter.inc(grown)
            self._figures = now

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling.Policy` looks at. Called by Serve."""
        return {
            scaling.REQUESTS: float(self._open),
            scaling.WAITING: self._figures.get("weft_requests_waiting", 0.0),
            scaling.KV: self._figures.get("weft_kv_cache_usage_ratio", 0.0),
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers learn of this replica. Called by Serve."""
        return {PAGES: self._blocks.told()}

    async def check_health(self) -> None:
        """Raises when this replica should be replaced. Called by Serve.

        An engine that ends is started anew by the daemon; a daemon that has ended, or that no longer answers, is not.
        """
        if self._child.exit_status is not None:
            raise WeftError(f"the daemon has ended with status {self._child.exit_status}")
        status, text = await self._caller.probe("/health")
        if status != 200:
            raise WeftError(f"the daemon is not healthy: {text[:200]}")

    async def process_ids(self) -> dict[str, int]:
        """Of the Ray worker and of its daemon, to look at them from outside."""
        return {"worker": os.getpid(), "daemon": self._child.pid}

    async def __del__(self) -> None:
        """Called by Serve when the open answers have ended, or had their time."""
        if hasattr(self, "_looking"):
            self._looking.cancel()
            await self._child.stop()
            await self._caller.close()
