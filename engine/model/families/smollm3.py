"""SmolLM3: Llama's layer, without positions on every fourth."""

from __future__ import annotations

from typing import Any

from weft.engine.model.families.family import Config, Family, windows
from weft.engine.model.parts import Layer


def _parts(config: Config) -> dict[str, Any]:
    number, every = int(config["num_hidden_layers"]), int(config.get("no_rope_layer_interval") or 4)
    rotated = config.get("no_rope_layers") or [int(bool((i + 1) % every)) for i in range(number)]
    if not config.get("use_sliding_window"):
        config = {**config, "sliding_window": None}
    own = windows(config, lambda i: not rotated[i])
    return {"layers": tuple(Layer(w, rope=0 if r else None) for w, r in zip(own, rotated, strict=True))}


SMOLLM3 = Family(("SmolLM3ForCausalLM",), _parts, defaults={"tie_word_embeddings": True, "rope_theta": 2e6})
