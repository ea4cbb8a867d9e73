"""The configuration of one engine, validated once.

Owns: the engine's options, service level objectives, and the paths of caches, presets and the demo model.
May import: errors and the demo model's path.
Never: reads a model or a device.
"""

from weft.engine.config.engine_config import MAX_BATCHED_TOKENS, NO_OPTION, EngineConfig, ModelImpl, Pod, Share
from weft.engine.config.objectives import Objective, itl_objective, kept_percentiles
from weft.engine.config.option_groups import OptionGroup
from weft.engine.config.paths import GGUF_INDEX, PRESETS, TOKENIZER_FILES, cache_home, expanded

__all__ = [
    "GGUF_INDEX", "MAX_BATCHED_TOKENS", "NO_OPTION", "PRESETS", "TOKENIZER_FILES", "EngineConfig", "ModelImpl",
    "Objective", "OptionGroup", "Pod", "Share", "cache_home", "expanded", "itl_objective", "kept_percentiles",
]  # fmt: skip
