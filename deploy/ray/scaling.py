"""Defines `Policy`, which computes the number of replicas for Ray Serve's autoscaler from engine metrics."""

from __future__ import annotations

from typing import Any

REQUESTS, WAITING, KV = "requests", "waiting", "kv"
"""Keys of `Replica.record_autoscaling_stats`: open requests, waiting sequences, share of KV pages held."""


class Policy:
    """Computes replicas x mean / target per measure and takes the maximum, as Kubernetes' autoscaler does."""

    def __init__(self, target_requests: float, target_waiting: float, target_kv: float) -> None:
        self._targets = {REQUESTS: target_requests, WAITING: target_waiting, KV: target_kv}

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        """Return the wanted replicas; Serve applies limits and delays. ctx: `ray.serve.config.AutoscalingContext`."""
        now = ctx.current_num_replicas
        if now == 0:
            return ctx.target_num_replicas, {}
        metrics = ctx.aggregated_metrics or {}
        # Serve also counts requests queued ahead of replicas, so its figure can be larger.
        wanted = [ctx.total_num_requests / self._targets[REQUESTS]]
        for measure, target in self._targets.items():
            figures = list(metrics.get(measure, {}).values())
            if figures:
                wanted.append(now * sum(figures) / len(figures) / target)
        return max(wanted), {}
