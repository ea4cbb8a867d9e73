"""`Pooler`: how hidden states become embeddings, as `sentence-transformers` notes it in a model's directory."""

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
    """`pooling`, then the first numbers where fewer are asked for, then length 1."""

    pooling: Pooling
    prompts: dict[str, str] = field(default_factory=dict)
    """what stands in front of a text, by name"""
    default: str = ""
    """the prompt of texts whose request names none"""

    def finish(self, state: bytes, dimensions: int | None) -> npt.NDArray[np.float32]:
        """`[dimensions]` of length 1, from a pooled hidden state of float32 (all of it where None is asked for)."""
        vector = np.frombuffer(state, np.float32)[:dimensions].astype(np.float64)
        length = float(np.linalg.norm(vector))
        return (vector / (length or 1.0)).astype(np.float32)


def read_pooler(path: Path, asked: Literal["auto", "last", "mean", "none"]) -> Pooler | None:
    """Of the model in a directory; None where embeddings are switched off.

    Raises `ModelError`, one line, for files that cannot be read or ask for what is not there. What the operator asks
    for wins over the directory's pooling; its prompts hold all the same.
    """
    if asked == "none":
        return None
    said = None
    for module in _read(path / MODULES, list) or ():
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _HARMLESS:
            raise ModelError(f"{MODULES} has a step that is not supported: {clip(kind)}")
        if kind == "Pooling":
            config = _read(path / str(module.get("path", "")) / "config.json", dict) or {}
            said = _pooling_of(config, strict=asked == "auto")
    about = _read(path / PROMPTS, dict) or {}
    prompts = {str(k): v for k, v in (about.get("prompts") or {}).items() if isinstance(v, str)}
    default = prompts.get(str(about.get("default_prompt_name")), "")
    return Pooler(said or "last" if asked == "auto" else asked, prompts, default)


def _pooling_of(config: dict[str, Any], *, strict: bool) -> Pooling | None:
    """What a `1_Pooling/config.json` says. Not `strict`: None for what is not supported."""
    modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    if isinstance(mode := config.get("pooling_mode"), str):
        modes = [mode]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]]
    if not strict:
        return None
    named = clip(", ".join(modes)) or "nothing"
    raise ModelError(f"its pooling ({named}) is not supported: --pooling last or mean decides otherwise")


def _read(path: Path, kind: type) -> Any:
    """A JSON file, None where there is none. Raises `ModelError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {clip(str(error))}") from None
    if not isinstance(value, kind):
        raise ModelError(f"{path.name} is not what sentence-transformers writes")
    return value
