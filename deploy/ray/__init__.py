"""weft on Ray: a Ray Serve application of daemons, an engine for Ray Serve LLM, and batches over Ray Data.

Owns: the ingress, prefix routing among replicas, scaling, the daemon of a replica.
May import: server/ (errors, configuration, bodies, exposition, the batch client, the router's rule); engine/wire; ray.
Never: an engine or its scheduler; a replica is `weft serve`, reached over HTTP.
"""

from __future__ import annotations

from typing import Any

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    """Import `app` lazily, for `serve run weft.deploy.ray:app`, so that other modules work without Ray."""
    if name != "app":
        raise AttributeError(name)
    from weft.deploy.ray.application import app

    return app
