"""`Conversion`: brings a checkpoint's tensors to their serving dtype on CPU threads, ahead of use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.model.checkpoint import Stored
from weft.engine.model.finite import FiniteCheck
from weft.kernels.formats.packed_form import PackedForm
from weft.kernels.formats.packed_rows import floats_of

MOST_THREADS = 16  # Beyond this, threads wait for each other's Python code.
PIECE = 1 << 20  # Values that a thread converts at once.
AHEAD_BYTES = 256 << 20  # Converted bytes ahead of use, in addition to the next tensor.


class Wanted(NamedTuple):
    """A tensor that packing will request."""

    name: str
    stored: Stored
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: tuple[PackedForm, int] | None = None  # Form and columns of a matrix that is kept packed.

    @property
    def target(self) -> tuple[int, ...]:
        """The shape of the tensor in memory."""
        return self.shape if self.packed is None else (self.shape[0], self.packed[0].row_bytes(self.packed[1]))

    def check(self, finite: FiniteCheck, made: Tensor) -> None:
        """Add the tensor, or some of its rows, to the check."""
        if self.packed is not None:
            finite.add(self.name, floats_of(made, *self.packed))
        elif self.dtype.is_floating_point:
            finite.add(self.name, made)


class Conversion:
    """Returns copies of the tensors `wanted`, in order, each once, and adds them to `finite`.

    Each of its threads, and the one that created it, uses a single torch thread meanwhile: a team of threads per
    operation would spend its time waiting on a busy machine. As a context manager it stops its threads on exit.
    """

    def __init__(self, wanted: Sequence[Wanted], finite: FiniteCheck, threads: int | None = None) -> None:
        """threads: as many as torch uses by default."""
        self._wanted, self._finite = deque(wanted), finite
        self._coming: deque[tuple[Tensor, list[Future[None]]]] = deque()
        self._ahead = 0
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(
            min(MOST_THREADS, threads or self._torch_threads), "weft-convert", torch.set_num_threads, (1,)
        )

    def __enter__(self) -> Conversion:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._torch_threads)

    def take(self) -> Tensor:
        """Return the next tensor. Raises read errors."""
        while self._wanted and (not self._coming or self._ahead <= AHEAD_BYTES):
            self._begin(self._wanted.popleft())
        tensor, pieces = self._coming.popleft()
        for piece in pieces:
            piece.result()
        self._ahead -= tensor.nbytes
        return tensor

    def _begin(self, wanted: Wanted) -> None:
        stored = wanted.stored
        with torch.inference_mode(False):  # The mode belongs to a thread, and other threads write the tensor.
            target = torch.empty(wanted.target, dtype=wanted.dtype)
        whole = stored.decode is not None and not stored.by_rows
        pieces = [(stored.raw, target)] if whole else _pieces(stored.raw, target)
        self._coming.append((target, [self._pool.submit(self._convert, wanted, *piece) for piece in pieces]))
        self._ahead += target.nbytes

    def _convert(self, wanted: Wanted, raw: Tensor, target: Tensor) -> None:
        decode = wanted.stored.decode
        values = raw if decode is None else decode(raw, target.dtype)
        target.copy_(values.reshape(target.shape))
        wanted.check(self._finite, target)


def _pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split both along their first dimensions, which are the same but for the last, into pieces of about `PIECE`."""
    if target.dim() < 2 or target.numel() <= PIECE or source.shape[:-1] != target.shape[:-1]:
        yield source, target
    elif target.dim() == 2:
        rows = max(1, PIECE // target.shape[1])
        yield from zip(source.split(rows), target.split(rows), strict=True)
    else:
        for one, other in zip(source, target, strict=True):
            yield from _pieces(one, other)
