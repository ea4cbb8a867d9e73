"""Where weights come from: `Checkpoint`, a directory of safetensors files; `Dummy`, made up from a seed."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.engine.errors import ModelError


class Part(NamedTuple):
    """Which of `of` equal parts along dimension `dim` is wanted; of one, the whole."""

    dim: int = 0
    part: int = 0
    of: int = 1

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor that has a part of `shape`."""
        return tuple(n * self.of if d == self.dim else n for d, n in enumerate(shape))

    def of_whole(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        size = shape[self.dim]
        own = slice(self.part * size, (self.part + 1) * size)
        return tuple(own if d == self.dim else slice(None) for d in range(len(shape)))


WHOLE = Part()


class TensorSource(Protocol):
    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        """The tensor, or a part of it, which is then all that is read; `shape` is that of what comes back.

        Raises `ModelError` when there is none, or one of another shape.
        """
        ...


class Checkpoint:
    """Named tensors of a directory of safetensors files, each checked against the shape the config promises."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        try:
            if index.exists():
                self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            elif single.exists():
                with safe_open(single, "pt") as f:
                    self._files = dict.fromkeys(f.keys(), single.name)
            else:
                raise ModelError(f"{path} has no model.safetensors and no model.safetensors.index.json")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(f"cannot read the weights in {path}: {error}") from None
        missing = sorted({f for f in self._files.values() if not (path / f).is_file()})
        if missing:
            raise ModelError(f"{path} lacks {len(missing)} shard(s) that its index names: {', '.join(missing[:3])}")
        self._path, self._stack = path, stack
        self._open: dict[str, safe_open] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self._path} has no tensor {name}")
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self._path / file, "pt"))
            lazy = self._open[file].get_slice(name)
            there, want = tuple(lazy.get_shape()), part.whole(shape)
            if there != want:
                raise ModelError(f"{name} has shape {there}, config.json asks for {want}")
            tensor: Tensor = lazy[part.of_whole(shape)] if part.of > 1 else self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {name} from {self._path / file}: {error}") from None
        return tensor


class Dummy:
    """Seeded random tensors: matrices of the scale a trained model has, norms near one."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        # All of it is drawn whatever part is asked for: every rank cuts the same model.
        t = torch.empty(part.whole(shape), dtype=torch.float32, device=self._generator.device)
        if len(shape) == 1 and not name.endswith("bias"):
            t.uniform_(0.9, 1.1, generator=self._generator)
        else:
            t.normal_(0.0, 0.02, generator=self._generator)
        return t[part.of_whole(shape)]
