"""`Refusal`: the error of loading a checkpoint after one of its matrices was changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weft.engine.errors import ModelError
from weft.engine.model.directory import read_spec
from weft.engine.model.weights import load_weights


class Refusal:
    """The error for a checkpoint in one file. name: of the changed matrix."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.tensors = load_file(folder / "model.safetensors")

    def __call__(self, **changes: torch.Tensor | None) -> str:
        """The error, one line, if the matrix's tensors of these endings are replaced; None: removed."""
        changed = {**self.tensors, **{f"{self._name}.{end}": t for end, t in changes.items()}}
        there = {n: t for n, t in changed.items() if t is not None}
        save_file(there, self._folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError) as error:
            load_weights(
                read_spec(self._folder), self._folder, device=torch.device("cpu"), dtype=torch.float32,
                max_positions=64,
            )  # fmt: skip
        assert "\n" not in str(error.value)
        return str(error.value)
