"""`shared_weights`: the weights of a model in memory that several engines map and one of them loads.

The tensors follow each other in memory, with a table of where each belongs in the model. An engine that maps the memory
builds `Weights` from the table and reads no file. The memory is read-only once it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from weft.engine.model.layer_weights import ProjectionWeights
from weft.engine.model.weights import Weights
from weft.engine.runner.memory.sleep import ALIGNMENT
from weft.engine.wire.weight_exchange import ExchangedWeights, WeightExchange
from weft.kernels.formats.fp8 import Fp8Weight
from weft.kernels.formats.fp8_matrix import Fp8Matrix
from weft.kernels.formats.packed_matrix import PackedMatrix
from weft.kernels.native.tiles import Tiles

KINDS = {kind.__name__: kind for kind in (Weights, ProjectionWeights, Fp8Matrix, Fp8Weight, PackedMatrix, Tiles)}
"""Classes that weights consist of, besides tensors, mappings and tuples."""


class SharedMemory(Protocol):
    """Device memory as a file descriptor."""

    def make(self, num_bytes: int, fill: Callable[[Tensor], None]) -> int:
        """Allocate memory and make it read-only after `fill` has written it, `[num_bytes]` uint8. Returns a descriptor
        that the caller closes. Raises `OutOfMemory`."""
        ...

    def map(self, fd: int, num_bytes: int) -> Tensor:
        """Map the memory read-only, `[num_bytes]` uint8. `fd` may be closed afterwards."""
        ...


def shared_weights(
    exchange: WeightExchange, name: str, memory: SharedMemory, load: Callable[[], Weights],
    waiting: Callable[[], None] = lambda: None,
) -> Weights:  # fmt: skip
    """Return the weights of this name from the exchange, or load and publish them. Raises what `load` raises.

    waiting: called repeatedly while another engine loads."""
    with exchange.lock(waiting):
        found = exchange.find()
        if found is None or found.name != name:
            if found is not None:
                found.close()
            _put(exchange, name, memory, load())
            found = exchange.find()
        assert found is not None
        try:
            return _mapped(found, memory)
        finally:
            found.close()


def _put(exchange: WeightExchange, name: str, memory: SharedMemory, weights: Weights) -> None:
    layout = _Layout()
    contents = {"num_bytes": 0, "weights": layout.encode(weights)}
    contents["num_bytes"] = layout.num_bytes
    file = os.memfd_create("weft-weights-contents")
    with open(file, "wb", closefd=False) as writer:
        writer.write(msgspec.json.encode(contents))
    fd = memory.make(layout.num_bytes, layout.fill)
    exchange.put(name, fd, file)
    os.close(fd)
    os.close(file)


def _mapped(found: ExchangedWeights, memory: SharedMemory) -> Weights:
    size = os.fstat(found.contents).st_size
    contents = msgspec.json.decode(os.pread(found.contents, size, 0))
    home = memory.map(found.memory, contents["num_bytes"])
    made: dict[str, Tensor] = {}

    def tensor(offset: int, dtype: str, shape: list[int], stride: list[int]) -> Tensor:
        key = repr((offset, dtype, shape, stride))
        if key not in made:
            kind = getattr(torch, dtype)
            empty = torch.empty(0, dtype=kind, device=home.device)
            made[key] = empty.set_(home.untyped_storage(), offset // kind.itemsize, shape, stride)
        return made[key]  # tied tensors, such as head and embedding, stay one tensor

    def value(encoded: Any) -> Any:
        if not isinstance(encoded, dict):
            return encoded
        ((what, inside),) = encoded.items()
        if what == "tensor":
            return tensor(*inside)
        if what == "tuple":
            return tuple(map(value, inside))
        parts = {name: value(part) for name, part in inside.items()}
        return parts if what == "mapping" else KINDS[what](**parts)

    weights = value(contents["weights"])
    assert isinstance(weights, Weights)
    return weights


class _Layout:
    """Assigns tensors to offsets in the memory."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._at: dict[int, int] = {}  # Offsets by the address of a storage.
        self._storages: list[tuple[int, Tensor]] = []  # Offset and content, `[bytes]` uint8.

    def encode(self, value: Any) -> Any:
        """Return the value in JSON form. All but numbers, strings and None become `{kind: content}`."""
        if isinstance(value, Tensor):
            return {"tensor": self._placed(value)}
        if is_dataclass(value):
            return {type(value).__name__: {f.name: self.encode(getattr(value, f.name)) for f in fields(value)}}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {type(value).__name__: {name: self.encode(getattr(value, name)) for name in value._fields}}
        if isinstance(value, tuple):
            return {"tuple": [self.encode(part) for part in value]}
        if isinstance(value, Mapping):
            return {"mapping": {name: self.encode(part) for name, part in value.items()}}
        assert value is None or isinstance(value, str | int | float), value
        return value

    def _placed(self, tensor: Tensor) -> tuple[int, str, list[int], list[int]]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._at:
            self._at[storage.data_ptr()] = self.num_bytes
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages.append((self.num_bytes, whole))
            self.num_bytes += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        offset = self._at[storage.data_ptr()] + int(tensor.storage_offset()) * tensor.itemsize
        return offset, str(tensor.dtype).removeprefix("torch."), [int(n) for n in tensor.shape], list(tensor.stride())

    def fill(self, home: Tensor) -> None:
        for at, whole in self._storages:
            home[at : at + len(whole)].copy_(whole)
