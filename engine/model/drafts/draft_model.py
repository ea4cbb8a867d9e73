"""A small model of the target's vocabulary that drafts (`"method": "draft_model"`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.engine.errors import ModelError
from weft.engine.model.directory import read_json, read_spec
from weft.engine.model.drafts.spec import Target, check_layers
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights, load_weights


@dataclass(frozen=True, slots=True)
class DraftModel:
    """See `DraftSpec`."""

    path: Path
    layer: ModelSpec  # the whole model

    def load(self, dtype: torch.dtype, max_positions: int, device: torch.device) -> Weights:
        return load_weights(self.layer, self.path, device=device, dtype=dtype, max_positions=max_positions)


def read_draft_model(path: Path, target: Target) -> DraftModel:
    """Read a model directory. Raises `ModelError`, one line, for another vocabulary or unsupported layers."""
    spec = read_spec(path)
    check_layers(path, spec)
    if spec.latent is not None:
        raise ModelError(f"{path}: a draft model cannot have latent attention")
    if spec.max_positions < target.max_positions:
        raise ModelError(
            f"{path}: it has {spec.max_positions} positions, requests may have {target.max_positions}: "
            "lower --max-model-len"
        )
    if spec.vocab_size != target.spec.vocab_size:
        raise ModelError(
            f"{path}: it has a vocabulary of {spec.vocab_size} tokens, the model {target.spec.vocab_size}: "
            "a draft model must have the same"
        )
    if (there := _vocabulary(target.path)) is not None and _vocabulary(path) not in (None, there):
        raise ModelError(f"{path}: its tokenizer.json has another vocabulary than the model's")
    return DraftModel(path, spec)


def _vocabulary(path: Path) -> Any:
    """Return the tokens of a `tokenizer.json`; None if there is none."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    model = read_json(file).get("model")
    return model.get("vocab") if isinstance(model, dict) else None
