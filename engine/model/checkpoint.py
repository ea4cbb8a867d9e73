"""Sources of weights: `Checkpoint`, a directory of safetensors files; `Dummy`, seeded random tensors."""

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
from weft.kernels.formats.packed_form import PackedForm


class Part(NamedTuple):
    """The part to read: one of `of` equal parts along dimension `dim` (1: all), or a span of it (see `span`)."""

    dim: int = 0
    part: int = 0
    of: int = 1
    begin: int = 0
    total: int = 0

    @classmethod
    def span(cls, begin: int, total: int, dim: int = 0) -> Part:
        """Read from `begin` on, as much as the requested shape has, of `total` along `dim`."""
        return cls(dim, 0, 2, begin, total)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the full tensor that has a shard of `shape`."""
        return tuple((self.total or n * self.of) if d == self.dim else n for d, n in enumerate(shape))

    def of_whole(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        size = shape[self.dim]
        begin = self.begin + self.part * size
        own = slice(begin, begin + size)
        return tuple(own if d == self.dim else slice(None) for d in range(len(shape)))


WHOLE = Part()


class Stored(NamedTuple):
    """A tensor in a file, not read yet."""

    raw: Tensor  # The mapped bytes, contiguous in the last dimension.
    decode: Callable[[Tensor, torch.dtype], Tensor] | None = None
    """Converts the bytes, where they were copied to, into a new tensor of a dtype; None: they are plain numbers."""
    by_rows: bool = False  # `decode` also converts some of the rows.


class Packing(NamedTuple):
    """How a matrix of a checkpoint, or a part of it, can be kept in 4 or 8 bits: see `PackedRows`."""

    form: PackedForm
    order: Tensor | None = None


class TensorSource(Protocol):
    """The tensors of a checkpoint by name."""

    def rename(self, known: str, prefix: str, others: tuple[str, ...], instead: str = "") -> None: ...

    def __contains__(self, name: str) -> bool: ...

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored: ...

    def packing(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Packing | None: ...

    def packed(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored: ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def refuse_further_layers(self, layer: str, num_layers: int) -> None: ...

    def surplus(self, harmless: Iterable[str]) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a model on their device."""

    source: Callable[[str, tuple[int, ...], Part, torch.dtype], Tensor]
    known: Callable[[str], bool] | None  # Whether a name exists; None: any requested name does, in the plainest form.
    dtype: torch.dtype  # Serving dtype.
    shapes: Callable[[str], tuple[int, ...]] | None = None  # Shape in the files of a known name.
    packings: Callable[[str, tuple[int, ...], Part], Packing | None] | None = None
    """How matrices `[out, inner]` are kept in 4 or 8 bits; None: no matrix is. A packed one is requested as uint8."""

    def get(self, name: str, shape: tuple[int, ...], part: Part = WHOLE, dtype: torch.dtype | None = None) -> Tensor:
        return self.source(name, shape, part, dtype or self.dtype)

    def packing(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Packing | None:
        """Return how to keep a matrix packed; None: not."""
        return None if self.packings is None or not self.has(name) else self.packings(name, shape, part)

    def has(self, name: str) -> bool:
        return self.known is not None and self.known(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape in the files of a name for which `has` is true."""
        assert self.shapes is not None
        return self.shapes(name)


class Checkpoint:
    """Named tensors of a directory of safetensors files, each checked against the shape that the config implies.

    Falls back to PyTorch files (`pytorch_model.bin`), from which it reads only tensors."""

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
        # Open all at once to report a damaged shard before reading any other.
        self._open: dict[str, Any] = {file: _open(path / file, stack) for file in sorted(set(self._files.values()))}
        self._path = path
        self._asked: set[str] = set()
        self._inside: dict[str, str] = {}  # Names in the files, where they differ.

    def rename(self, known: str, prefix: str, others: tuple[str, ...], instead: str = "") -> None:
        """Map requested names, which start with `prefix`, to one of `others` if only that form of `known` exists.
        instead: the tensor to read for `known` if there is none."""
        for other in (*others, ""):  # embedding models have no prefix
            if known not in self._files and other + known.removeprefix(prefix) in self._files:
                self._inside = {
                    prefix + name.removeprefix(other): name
                    for name in self._files
                    if name.startswith(other) and not name.startswith("lm_head.")
                }
                outer = other.removesuffix(prefix)
                self._inside |= {
                    name.removeprefix(outer): name
                    for name in self._files
                    if outer and name.startswith(f"{outer}lm_head.")
                }
                renamed = {name: self._files[inside] for name, inside in self._inside.items()}
                self._files = {n: f for n, f in self._files.items() if n not in self._inside.values()} | renamed
        if known not in self._files and instead in self._files:
            self._inside[known], self._files[known] = instead, self._files[instead]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored:
        """Return the tensor or a part of it; only that part will be read. shape: shape of the part.

        Raises `ModelError` if the tensor is missing or has another shape."""
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self._path} has no tensor {name}, which config.json requires")
        self._asked.add(name)
        inside, want = self.inside(name), part.whole(shape)
        if (there := self.inside_shape(inside, file)) != want:
            raise ModelError(f"{name} has shape {there}, config.json requires {want}")
        if part.of == 1:
            return Stored(self.whole(inside, file))
        return Stored(self._read(inside, file, lambda f, name: f.get_slice(name)[part.of_whole(shape)]))

    def packing(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Packing | None:  # noqa: ARG002
        """Return how a matrix `[out, inner]` can be kept packed; None: not."""
        return None

    def packed(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored:
        """Return a matrix for which `packing` is not None, decoded to the bytes of `PackedRows`."""
        raise NotImplementedError

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape in the files of an existing tensor."""
        return self.inside_shape(self.inside(name), self._files[name])

    def inside(self, name: str) -> str:
        """Return the tensor's name in the files."""
        return self._inside.get(name, name)

    def shards(self) -> dict[str, list[str]]:
        """Return the names inside each file."""
        return {file: sorted(opened.keys()) for file, opened in self._open.items()}

    def whole(self, inside: str, file: str) -> Tensor:
        """Return a tensor by its name inside a file."""
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
        """Raise `ModelError` if there are more layers. layer: prefix of a layer's names, `{}` for its number."""
        pattern = re.compile(re.escape(layer).replace(re.escape("{}"), r"(\d+)"))
        numbers = [int(match[1]) for name in self._files if (match := pattern.match(name))]
        if (there := max(numbers, default=-1) + 1) > num_layers:
            raise ModelError(
                f"{self._path} has weights of {there} layers, but config.json says num_hidden_layers {num_layers}: "
                f"{layer.format(num_layers)}… would be ignored"
            )

    def surplus(self, harmless: Iterable[str]) -> list[str]:
        """Return names that were not requested, except those that end with one of `harmless`."""
        return sorted(name for name in self._files.keys() - self._asked if not name.endswith(tuple(harmless)))


class _Pickled:
    """The tensors of a PyTorch file, memory-mapped if its format allows; same interface as `safe_open`."""

    def __init__(self, file: Path) -> None:
        """Raises `ModelError`, one line, for a damaged file or one with anything but tensors."""
        try:
            try:
                found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files from before PyTorch 1.6 are not archives and cannot be mapped
                found = torch.load(file, map_location="cpu", weights_only=True)
            self._tensors: dict[str, Tensor] = {name: t for name, t in found.items() if isinstance(t, Tensor)}
        except (OSError, EOFError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
            reason = str(error).strip().split("\n")[0][:120] or type(error).__name__
            raise ModelError(f"{file} is not a PyTorch file with only tensors: {reason}") from None

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
    """Raises `ModelError`, one line, for a Git LFS pointer and for a damaged or incomplete file."""
    refuse_pointer(file)
    if file.suffix == ".bin":
        return _Pickled(file)
    try:
        return stack.enter_context(safe_open(file, "pt"))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file} is not a complete safetensors file ({file.stat().st_size:,} bytes; {error}): download it again"
        ) from None


class Dummy:
    """Seeded random tensors: matrices with the scale of trained ones, norms near one."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        # The meta device holds only shapes.
        self._generator = torch.Generator(device).manual_seed(seed) if device.type != "meta" else None

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        # Draw the full tensor so that every rank gets its shard of the same model.
        t = torch.empty(part.whole(shape), dtype=torch.float32, device=self._device)
        if self._generator is None:  # torch would import its compiler for a meta tensor
            return t[part.of_whole(shape)]
        if len(shape) == 1 and not name.endswith("bias"):
            t.uniform_(0.9, 1.1, generator=self._generator)
        else:
            t.normal_(0.0, 0.02, generator=self._generator)
        return t[part.of_whole(shape)]
