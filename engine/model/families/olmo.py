"""OLMo 2: norms only after attention and MLP, and norms over all heads of q and of k."""

from __future__ import annotations

from weft.engine.model.families.family import Family
from weft.engine.model.parts import Placement

OLMO2 = Family(
    ("Olmo2ForCausalLM",), lambda _config: {"placement": Placement.POST, "qk_norm": "projection"},
    defaults={"rms_norm_eps": 1e-5},
)  # fmt: skip
