"""`ImagePool`: the embeddings of images on the device; `ImageRows`: with the tower that fills it on its own thread."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.engine.model.vision.family import Vision
from weft.engine.runner.iteration.batch import I32, EncodeJob, Encoding

if TYPE_CHECKING:
    from weft.engine.model.vision.tower import Tower  # imports transformers, which takes seconds

NICENESS = 5  # of the threads that encode on a CPU, so that decodes go first
RESERVED_TOKENS = 4096  # embeddings of an image whose activations GPU memory is reserved for
log = logging.getLogger("weft.engine")


class ImagePool:
    """`rows [capacity, 1 + deepstack, H]` in the dtype of activations. The scheduler decides which image gets which
    rows (`scheduling.image_rows`). Ranks other than 0 have only this."""

    def __init__(
        self, vision: Vision, capacity: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.vision, self.capacity, self.device = vision, capacity, device
        self._shape, self._dtype = (capacity, 1 + vision.deepstack, hidden_size), dtype
        self._rows: Tensor | None = None
        self._making = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of a full pool."""
        return int(np.prod(self._shape)) * self._dtype.itemsize

    @property
    def rows(self) -> Tensor:
        with self._making:  # an iteration and the encoder may both be the first to need it
            if self._rows is None and self.device.type != "cpu":
                self._rows = torch.zeros(self._shape, dtype=self._dtype, device=self.device)
            elif self._rows is None:
                # The system maps zeroed pages on first touch, so rows that no image used take no memory.
                self._rows = torch.from_numpy(np.zeros(self.num_bytes, np.uint8)).view(self._dtype).view(self._shape)
            return self._rows

    def free(self) -> None:
        """Free the pool until it is next needed: the model sleeps. Graphs on a GPU keep its address."""
        if self.device.type != "cuda":
            self._rows = None

    def put(self, rows: I32, embeddings: NDArray[np.uint8]) -> None:
        """Write the bytes of embeddings that another rank has computed."""
        made = torch.from_numpy(embeddings).view(self._dtype).view(len(rows), *self._shape[1:])
        self.rows[torch.from_numpy(rows.astype(np.int64)).to(self.device)] = made.to(self.device)

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights that images need."""
        return ()

    def warm_up(self) -> int:
        """Return the bytes of GPU memory that encoding an image takes."""
        return 0


class ImageRows(ImagePool):
    """Images are encoded one at a time on a thread, while iterations run. The thread ends when no image is left: on a
    CPU, its OpenMP team would slow down the runner's (`CpuRunner`). On a GPU it has its own stream."""

    def __init__(self, tower: Tower, capacity: int, hidden_size: int, dtype: torch.dtype, threads: int = 0) -> None:
        """threads: those of an encoder on a CPU."""
        super().__init__(tower.vision, capacity, hidden_size, dtype, tower.device)
        self.tower = tower
        self.spread: Callable[[I32, Tensor], None] = lambda _rows, _made: None
        """Called on the encoder's thread with new embeddings and their rows, before an iteration may read them."""
        self._threads = threads
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._queue: deque[tuple[EncodeJob, Encoding]] = deque()
        self._thread: threading.Thread | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()

    def tensors(self) -> Iterable[Tensor]:
        return self.tower.tensors()

    def warm_up(self) -> int:
        """Encode an image as large as the pool, or the largest that memory is reserved for, without keeping it. Returns
        the bytes of GPU memory that this took."""
        shapes, grid = self.tower.vision.example(min(self.capacity, RESERVED_TOKENS))
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.tower.encode(bytearray(3 * sum(h * w for h, w in shapes)), shapes, grid)
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def begin(self, job: EncodeJob) -> Encoding:
        """Start to encode an image into its rows."""
        encoding = Encoding()
        with self._lock:
            self._queue.append((job, encoding))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="weft-encoder")
                self._thread.start()
        return encoding

    def wait(self, seconds: float) -> bool:
        """Wait until an image has been encoded since the last call. Returns False at once if there is none to come."""
        if self._thread is None and not self._ended.is_set():
            return False
        self._ended.wait(seconds)
        self._ended.clear()
        return True

    def drain(self) -> None:
        """Wait until no image is left."""
        while (thread := self._thread) is not None:
            thread.join()

    def close(self) -> None:
        """Encode no further image, and end the thread."""
        with self._lock:
            self._queue.clear()
        self.drain()

    def _work(self) -> None:
        if self._stream is None:
            torch.set_num_threads(max(1, self._threads))
            with contextlib.suppress(OSError, AttributeError):  # only Linux has priorities of threads
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            while True:
                with self._lock:
                    if not self._queue:
                        self._thread = None
                        return
                    job, encoding = self._queue.popleft()
                begin = time.perf_counter()
                encoding.failed = not self._encode(job)
                encoding.seconds = time.perf_counter() - begin
                encoding.done = True
                self._ended.set()

    def _encode(self, job: EncodeJob) -> bool:
        """Encode an image into its rows. Returns False if that failed."""
        try:
            at = torch.from_numpy(job.rows.astype(np.int64)).to(self.device)
            made = self.tower.encode(job.pixels, job.shapes, job.grid)
            if made.shape != (len(at), *self._shape[1:]):
                raise ValueError(f"embeddings {tuple(made.shape)} for {len(at)} rows of {self._shape[1:]}")
            if not bool(made.isfinite().all()):
                raise ValueError("its embeddings are not finite")
            self.rows[at] = made = made.to(self._dtype)
            if self._stream is not None:
                self._stream.synchronize()
            self.spread(job.rows, made)
        except Exception as error:  # the tower's code is not ours
            log.warning("an image of tiles %s could not be encoded: %s", job.shapes[:4], error)
            return False
        return True
