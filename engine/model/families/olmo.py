"""OLMo 2: norms only after attention and MLP, and norms over all heads of q and of k."""

from __future__ import annotations

from typing import Any

from weft.engine.model.families.family import Config, Family
from weft.engine.model.parts import Placement


def _olmo2(_config: Config) -> dict[str, Any]:
    return {"placement": Placement.POST, "qk_norm": "projection"}


OLMO2 = Family(("Olmo2ForCausalLM",), _olmo2, defaults={"rms_norm_eps": 1e-5})
