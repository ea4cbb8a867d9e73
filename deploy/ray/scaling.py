"""`Policy`: how many replicas a model should have, by what its engines tell; for Ray Serve's autoscaler."""

from __future__ import annotations

from typing import Any

REQUESTS, WAITING, KV = "requests", "waiting", "kv"
"""what `Replica.record_autoscaling_stats` tells: open requests, sequences that wait, part of the KV pages held"""


class Policy:
    """As Kubernetes' autoscaler does it: replicas x mean / target, for each measure, and the most of them."""

    def __init__(self, target_requests: float, target_waiting: float, target_kv: float) -> None:
        self._targets = {REQUESTS: target_requests, WAITING: target_waiting, KV: target_kv}

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        """ctx: `ray.serve.config.AutoscalingContext`. The replicas wanted; Serve applies bounds and delays."""
        now = ctx.current_num_replicas
        if now == 0:
            return ctx.target_num_replicas, {}
        told = ctx.aggregated_metrics or {}
        # Serve counts requests that wait in front of replicas too, so its figure may be the larger one.
        wanted = [ctx.total_num_requests / self._targets[REQUESTS]]
        for measure, target in self._targets.items():
            figures = list(told.get(measure, {}).values())
            if figures:
                wanted.append(now * sum(figures) / len(figures) / target)
        return max(wanted), {}
