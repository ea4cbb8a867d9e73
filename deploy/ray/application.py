"""Builds the Ray Serve application: an ingress, and a deployment per model."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from weft.deploy.ray import ingress, replica
from weft.deploy.ray.router import PrefixRouter
from weft.deploy.ray.scaling import Policy
from weft.deploy.ray.settings import Model, Scaling, read

ROUTING_SECONDS = 2.0
"""Seconds between reports of replicas to routers."""
HEALTH_SECONDS = 5.0
SHUTDOWN_POLL_SECONDS = 1.0
"""Seconds between checks for open answers of a stopping replica."""


def app(args: dict[str, Any]) -> Application:
    """Build the application. args: see `settings.Settings`. Raises `ConfigError`."""
    settings = read(args)
    handles: dict[str, Application] = {}
    for model in settings.models:
        bound = deployment(model)
        handles.update(dict.fromkeys(model.names, bound))
    front = settings.ingress
    made = serve.deployment(
        serve.ingress()(ingress.Ingress),
        name="weft-ingress",
        num_replicas=front.replicas,
        max_ongoing_requests=front.max_ongoing_requests,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_SECONDS,
        graceful_shutdown_timeout_s=max(model.drain_timeout_s for model in settings.models),
        ray_actor_options={"num_cpus": front.num_cpus},
    )
    return made.bind(handles, int(front.max_body_mib * 2**20))


def deployment(model: Model) -> Application:
    options: dict[str, Any] = {"num_replicas": model.replicas}
    if model.scaling is not None:
        options = {"num_replicas": None, "autoscaling_config": autoscaling(model.scaling)}
    resources: dict[str, float] = {"num_cpus": model.num_cpus, "num_gpus": model.gpus}
    if model.ranks > 1:
        # A replica is a daemon with all its ranks, so it needs one bundle on one node.
        bundle = {"CPU": model.num_cpus, "GPU": model.gpus}
        options["placement_group_bundles"] = [{name: amount for name, amount in bundle.items() if amount}]
        options["placement_group_strategy"] = "STRICT_PACK"
    made = serve.deployment(
        replica.Replica,
        name=model.deployment,
        max_ongoing_requests=model.max_ongoing_requests,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_SECONDS,
        graceful_shutdown_timeout_s=model.drain_timeout_s,
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{PrefixRouter.__module__}.{PrefixRouter.__name__}",
            request_routing_stats_period_s=ROUTING_SECONDS,
        ),
        **options,
    )
    return made.bind(model.serve_options(), model.start_timeout_s)


def autoscaling(scaling: Scaling) -> AutoscalingConfig:
    targets = {name: getattr(scaling, name) for name in ("target_requests", "target_waiting", "target_kv")}
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        metrics_interval_s=scaling.interval_s,
        look_back_period_s=2 * scaling.interval_s,
        target_ongoing_requests=scaling.target_requests,
        policy=AutoscalingPolicy(policy_function=f"{Policy.__module__}:{Policy.__name__}", policy_kwargs=targets),
    )
