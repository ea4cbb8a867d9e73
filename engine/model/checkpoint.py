"""Where weights come from: `Checkpoint`, a directory of safetensors files; `Dummy`, made up from a seed."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.engine.errors import ModelError, refuse_pointer
from weft.engine.model.index import read_index


class Part(NamedTuple):
    """Which of `of` equal parts along dimension `dim` is wanted; of one, the whole. Or a span of it: see `span`."""

    dim: int = 0
    part: int = 0
    of: int = 1
    begin: int = 0
    total: int = 0

    @classmethod
    def span(cls, begin: int, total: int, dim: int = 0) -> Part:
        """As much as is asked for, from `begin` on, where the whole has `total` along `dim`."""
        return cls(dim, 0, 2, begin, total)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor that has a part of `shape`."""
        return tuple((self.total or n * self.of) if d == self.dim else n for d, n in enumerate(shape))

    def of_whole(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        size = shape[self.dim]
        begin = self.begin + self.part * size
        own = slice(begin, begin + size)
        return tuple(own if d == self.dim else slice(None) for d in range(len(shape)))


WHOLE = Part()


class Stored(NamedTuple):
    """A tensor in a file."""

    raw: Tensor
    """the mapped bytes, not read yet; contiguous in its last dimension"""
    decode: Callable[[Tensor, torch.dtype], Tensor] | None = None
    """makes numbers of them in a dtype, where they were copied to and in memory of their own; None: they are numbers"""


class TensorSource(Protocol):
    """The tensors of a checkpoint by their names."""

    def rename(self, known: str, prefix: str, others: tuple[str, ...]) -> None: ...

    def __contains__(self, name: str) -> bool: ...

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored: ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def refuse_further_layers(self, layer: str, num_layers: int) -> None: ...

    def surplus(self, harmless: Iterable[str]) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a model on their device."""

    source: Callable[[str, tuple[int, ...], Part, torch.dtype], Tensor]
    known: Callable[[str], bool] | None
    """whether there is a name; None: whatever is asked for, in the plainest form"""
    dtype: torch.dtype
    """they are served in"""
    shapes: Callable[[str], tuple[int, ...]] | None = None
    """of a name that is known"""

    def get(self, name: str, shape: tuple[int, ...], part: Part = WHOLE, dtype: torch.dtype | None = None) -> Tensor:
        return self.source(name, shape, part, dtype or self.dtype)

    def has(self, name: str) -> bool:
        return self.known is not None and self.known(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """In the files, of a name that `has` knows."""
        assert self.shapes is not None
        return self.shapes(name)


class Checkpoint:
    """Named tensors of a directory of safetensors files, each checked against the shape the config promises.

    Where there are none, those of PyTorch (`pytorch_model.bin`), of which nothing but tensors is read.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        if not index.exists() and not single.exists():
            pickled = path / "pytorch_model.bin.index.json", path / "pytorch_model.bin"
            index, single = pickled if any(file.exists() for file in pickled) else (index, single)
        refuse_pointer(index)
        try:
            if index.exists():
                self._files = read_index(index)
            elif single.exists():
                self._files = dict.fromkeys(_open(single, stack).keys(), single.name)
            else:
                raise ModelError(f"{path} has no model.safetensors and no model.safetensors.index.json")
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the weights in {path}: {error}") from None
        missing = sorted({f for f in self._files.values() if not (path / f).is_file()})
        if missing:
            raise ModelError(f"{path} lacks {len(missing)} shard(s) that its index names: {', '.join(missing[:3])}")
        # All at once: a damaged shard is said before the others are read.
        self._open: dict[str, Any] = {file: _open(path / file, stack) for file in sorted(set(self._files.values()))}
        self._path = path
        self._asked: set[str] = set()
        self._there: dict[str, str] = {}
        """names in the files, where they are others"""

    def rename(self, known: str, prefix: str, others: tuple[str, ...]) -> None:
        """Names are asked for with `prefix` and have one of `others` here, if the tensor `known` is there only so."""
        for other in (*others, ""):  # without any: of the model alone, as embedding models are kept
            if known not in self._files and other + known.removeprefix(prefix) in self._files:
                self._there = {
                    prefix + name.removeprefix(other): name
                    for name in self._files
                    if name.startswith(other) and not name.startswith("lm_head.")
                }
                renamed = {name: self._files[there] for name, there in self._there.items()}
                self._files = {n: f for n, f in self._files.items() if n not in self._there.values()} | renamed

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored:
        """The tensor, or a part of it, which is then all that will be read; `shape` is that of what comes back.

        Raises `ModelError` when there is none, or one of another shape.
        """
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self._path} has no tensor {name}, which config.json asks for")
        self._asked.add(name)
        try:
            inside = self._there.get(name, name)
            lazy = self._open[file].get_slice(inside)
            there, want = tuple(lazy.get_shape()), part.whole(shape)
            if there != want:
                raise ModelError(f"{name} has shape {there}, config.json asks for {want}")
            tensor: Tensor = lazy[part.of_whole(shape)] if part.of > 1 else self._open[file].get_tensor(inside)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {name} from {self._path / file}: {error}") from None
        return Stored(tensor)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return self._read(self.inside(name), self._files[name], lambda f, inside: f.get_slice(inside).get_shape())

    def inside(self, name: str) -> str:
        """Its name in the files."""
        return self._there.get(name, name)

    def shards(self) -> dict[str, list[str]]:
        """The files, and the names inside each of them."""
        return {file: sorted(opened.keys()) for file, opened in self._open.items()}

    def whole(self, inside: str, file: str) -> Tensor:
        """The tensor of a name inside a file."""
        return self._read(inside, file, lambda f, name: f.get_tensor(name))

    def inside_shape(self, inside: str, file: str) -> tuple[int, ...]:
        return self._read(inside, file, lambda f, name: f.get_slice(name).get_shape())

    def _read(self, inside: str, file: str, how: Callable[[Any, str], Any]) -> Any:
        try:
            found = how(self._open[file], inside)
            return tuple(found) if isinstance(found, list) else found
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {inside} from {self._path / file}: {error}") from None

    def refuse_further_layers(self, layer: str, num_layers: int) -> None:
        """`layer`: the beginning of a layer's names, `{}` for its number. Raises `ModelError` when there are more."""
        pattern = re.compile(re.escape(layer).replace(re.escape("{}"), r"(\d+)"))
        numbers = [int(match[1]) for name in self._files if (match := pattern.match(name))]
        if (there := max(numbers, default=-1) + 1) > num_layers:
            raise ModelError(
                f"{self._path} has weights of {there} layers, config.json says num_hidden_layers {num_layers}: "
                f"{layer.format(num_layers)}… would be left out"
            )

    def surplus(self, harmless: Iterable[str]) -> list[str]:
        """Names that nobody asked for; without those that end with one of `harmless`."""
        return sorted(name for name in self._files.keys() - self._asked if not name.endswith(tuple(harmless)))


class _Pickled:
    """The tensors of a PyTorch file, mapped where its form allows that; the interface of `safe_open`."""

    def __init__(self, file: Path) -> None:
        """Raises `ModelError`, one line, for a damaged file and for one that holds anything but tensors."""
        try:
            try:
                found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # a file from before PyTorch 1.6 is no archive that could be mapped
                found = torch.load(file, map_location="cpu", weights_only=True)
            self._tensors: dict[str, Tensor] = {name: t for name, t in found.items() if isinstance(t, Tensor)}
        except (OSError, EOFError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
            reason = str(error).strip().split("\n")[0][:120] or type(error).__name__
            raise ModelError(f"{file} is no PyTorch file of tensors alone: {reason}") from None

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> _PickledSlice:
        return _PickledSlice(self._tensors[name])


class _PickledSlice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        return self._tensor[part]


def _open(file: Path, stack: ExitStack) -> Any:
    """Raises `ModelError`, one line, for a pointer and for a file that is damaged or incomplete."""
    refuse_pointer(file)
    if file.suffix == ".bin":
        return _Pickled(file)
    try:
        return stack.enter_context(safe_open(file, "pt"))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file} is no whole safetensors file ({file.stat().st_size:,} bytes; {error}): download it again"
        ) from None


class Dummy:
    """Seeded random tensors: matrices of the scale a trained model has, norms near one."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        # on the meta device, which holds shapes alone, nothing is drawn
        self._generator = torch.Generator(device).manual_seed(seed) if device.type != "meta" else None

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        # All of it is drawn whatever part is asked for: every rank cuts the same model.
        t = torch.empty(part.whole(shape), dtype=torch.float32, device=self._device)
        if self._generator is None:  # torch would import its compiler to draw nothing
            return t[part.of_whole(shape)]
        if len(shape) == 1 and not name.endswith("bias"):
            t.uniform_(0.9, 1.1, generator=self._generator)
        else:
            t.normal_(0.0, 0.02, generator=self._generator)
        return t[part.of_whole(shape)]
