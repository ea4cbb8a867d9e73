"""`Pooler`: how hidden states become embeddings, read from a model's `sentence-transformers` files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from weft.engine.errors import ModelError
from weft.engine.wire.sampling import Pooling
from weft.server.errors import clip

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_HARMLESS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pools hidden states, truncates them to the requested dimensions and normalizes them."""

    pooling: Pooling
    prompts: dict[str, str] = field(default_factory=dict)  # text prefixes by name
    default: str = ""  # the prefix for requests that name none

    def finish(self, state: bytes, dimensions: int | None) -> npt.NDArray[np.float32]:
        """The normalized embedding `[dimensions]` of a pooled float32 hidden state. None keeps all dimensions."""
        vector = np.frombuffer(state, np.float32)[:dimensions].astype(np.float64)
        length = float(np.linalg.norm(vector))
        return (vector / (length or 1.0)).astype(np.float32)


def read_pooler(path: Path, asked: Literal["auto", "last", "mean", "none"]) -> Pooler | None:
    """The pooler of the model at `path`; None if embeddings are disabled.

    An explicit `asked` overrides the model's pooling but not its prompts. Raises `ModelError` for unreadable files and
    unsupported steps.
    """
    if asked == "none":
        return None
    pooling = None
    for module in _read(path / MODULES, list) or ():
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _HARMLESS:
            raise ModelError(f"{MODULES} has an unsupported step: {clip(kind)}")
        if kind == "Pooling":
            config = _read(path / str(module.get("path", "")) / "config.json", dict) or {}
            pooling = _pooling_of(config, strict=asked == "auto")
    about = _read(path / PROMPTS, dict) or {}
    prompts = {str(k): v for k, v in (about.get("prompts") or {}).items() if isinstance(v, str)}
    default = prompts.get(str(about.get("default_prompt_name")), "")
    return Pooler(pooling or "last" if asked == "auto" else asked, prompts, default)


def _pooling_of(config: dict[str, Any], *, strict: bool) -> Pooling | None:
    """The mode in a `1_Pooling/config.json`. Unsupported modes raise `ModelError` if `strict`, else return None."""
    modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    if isinstance(mode := config.get("pooling_mode"), str):
        modes = [mode]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]]
    if not strict:
        return None
    named = clip(", ".join(modes)) or "nothing"
    raise ModelError(f"its pooling ({named}) is not supported; override it with --pooling last or mean")


def _read(path: Path, kind: type) -> Any:
    """The value of a JSON file; None if the file is missing. Raises `ModelError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {clip(str(error))}") from None
    if not isinstance(value, kind):
        raise ModelError(f"{path.name} is not in the format of sentence-transformers")
    return value
