"""`DraftSpec`: a model that drafts for another, before its weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.spec import ModelSpec


class Target(NamedTuple):
    """The model that a drafter drafts for."""

    spec: ModelSpec
    path: Path
    max_positions: int  # positions that requests may have


class DraftWeights(Protocol):
    def tensors(self) -> Sequence[Tensor]: ...

    @property
    def num_bytes(self) -> int: ...


class DraftSpec(Protocol):
    """Its K and V lie in the target's pages, after the target's layers, each at the position of its token. So a page
    depends only on its own tokens and those before it."""

    @property
    def layer(self) -> ModelSpec:
        """Shapes of its layers. All of them keep K and V of the same shape."""
        ...

    def load(self, dtype: torch.dtype, max_positions: int, device: torch.device) -> DraftWeights:
        """Read the weights. Raises `ModelError`, one line."""
        ...


def check_layers(path: Path, spec: ModelSpec) -> None:
    """Raise `ModelError` unless the drafter's layers can keep their K and V in the target's pages."""
    why = ""
    if spec.recurrent or any(spec.windows):
        why = "a model that drafts needs full attention in all layers"
    elif spec.quantization is not None or spec.integers is not None:
        why = "a model that drafts must have weights in 16 or 32 bits"
    if why:
        raise ModelError(f"{path}: {why}")
