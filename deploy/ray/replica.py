"""Defines `Replica`, a Serve replica that runs a daemon and forwards requests to it byte for byte."""

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
from weft.deploy.ray.exchange import Head, HttpRequest
from weft.deploy.ray.prompt import BLOCK, TOKEN_BYTES
from weft.deploy.ray.router import PAGES
from weft.deploy.ray.scrape import figures, labelled
from weft.engine.errors import WeftError

POLL_SECONDS = 2.0
"""Seconds between polls of the daemon's metrics."""
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
"""Daemon metrics that Ray's endpoint also exports; all others are at the application's /metrics."""
NAMES = frozenset(GAUGES) | frozenset(COUNTERS)

logger = logging.getLogger("ray.serve")


class Replica:
    async def __init__(self, options: dict[str, Any], start_seconds: float) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the daemon. options: options of `weft serve`. Raises `WeftError` if it does not become ready."""
        self.name = serve.get_replica_context().replica_id.unique_id
        self._child = await Child.start(options, start_seconds, float(options.get("drain_timeout", 30.0)))
        self._caller = Caller(self._child.url, self.name)
        self._open = 0
        self._figures: dict[str, float] = {}
        self._blocks = Blocks(await self._num_blocks())
        self._gauges = {name: Gauge(name, description=text) for name, text in GAUGES.items()}
        # Ray adds the ending `_total` itself.
        self._counters = {name: Counter(name.removesuffix("_total"), description=t) for name, t in COUNTERS.items()}
        self._polling = asyncio.create_task(self._poll())

    async def _num_blocks(self) -> int:
        """Return the approximate number of text blocks that the KV pages hold."""
        info = labelled(await self.metrics(), "weft_cache_config_info")
        tokens = int(info.get("page_size", 0)) * int(info.get("num_pages", 0))
        return max(1, min(MOST_BLOCKS, tokens * TOKEN_BYTES // BLOCK))

    async def answer(self, request: HttpRequest) -> AsyncGenerator[Head | bytes, None]:
        """Yield a `Head`, then the body as it arrives. Raises `aiohttp.ClientError` if the daemon breaks off."""
        self._open += 1
        try:
            async with aclosing(self._caller.send(request)) as answer:
                async for part in answer:
                    if isinstance(part, Head) and part.status == 200:
                        self._blocks.add(request.keys)
                    yield part
        finally:
            self._open -= 1

    async def metrics(self) -> str:
        """Return the daemon's metrics."""
        return (await self._caller.probe("/metrics"))[1]

    async def named_metrics(self) -> tuple[str, str]:
        """Return this replica's name and its metrics."""
        return self.name, await self.metrics()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                now = figures(await self.metrics(), NAMES)
            except (aiohttp.ClientError, TimeoutError):
                continue  # the health check reports it
            for name, gauge in self._gauges.items():
                gauge.set(now.get(name, 0.0))
            for name, counter in self._counters.items():
                # Counters survive an engine restart; a replica never restarts its daemon.
                if (grown := now.get(name, 0.0) - self._figures.get(name, 0.0)) > 0:
                    counter.inc(grown)
            self._figures = now

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the measures of `scaling.Policy`. Called by Serve."""
        return {
            scaling.REQUESTS: float(self._open),
            scaling.WAITING: self._figures.get("weft_requests_waiting", 0.0),
            scaling.KV: self._figures.get("weft_kv_cache_usage_ratio", 0.0),
        }

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the recently seen blocks for routers. Called by Serve."""
        return {PAGES: self._blocks.dump()}

    async def check_health(self) -> None:
        """Raise if this replica should be replaced. Called by Serve.

        The daemon restarts an ended engine; a replica is replaced if its daemon has ended or does not answer.
        """
        if self._child.exit_status is not None:
            raise WeftError(f"the daemon ended with status {self._child.exit_status}")
        status, text = await self._caller.probe("/health")
        if status != 200:
            raise WeftError(f"the daemon is unhealthy: {text[:200]}")

    async def process_ids(self) -> dict[str, int]:
        """Return the process ids of the Ray worker and its daemon, for inspection."""
        return {"worker": os.getpid(), "daemon": self._child.pid}

    async def __del__(self) -> None:
        """Stop the daemon. Called by Serve after open answers have ended or timed out."""
        if hasattr(self, "_polling"):
            self._polling.cancel()
            await self._child.stop()
            await self._caller.close()
