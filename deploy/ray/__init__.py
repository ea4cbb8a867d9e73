"""weft on Ray: a Ray Serve application whose replicas are daemons, an engine for Ray Serve LLM, batches over Ray Data.

Owns: the ingress, routing among replicas by prefix, when to scale, the daemon of a replica.
May import: server/ (errors, configuration, bodies, exposition, the batch client, the router's rule); engine/wire; ray.
Never: an engine or its scheduler: a replica is `weft serve`, asked over HTTP.
"""

from __future__ import annotations

from typing import Any

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    """`app`, for `serve run weft.deploy.ray:app`; what needs no Ray can be imported without it."""
    if name != "app":
        raise AttributeError(name)
    from weft.deploy.ray.application import app

    return app
