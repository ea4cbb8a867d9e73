"""`ImageRows`: the pool of embeddings of images on the device, and the tower that fills it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from weft.engine.runner.iteration.batch import EncodeJob

if TYPE_CHECKING:
    from weft.engine.model.vision.tower import Tower  # imports transformers, which takes seconds

log = logging.getLogger("weft.engine")


class ImageRows:
    """`rows [capacity, 1 + deepstack, H]` in the dtype of activations. The scheduler decides which image gets which
    rows (`scheduling.image_rows`)."""

    def __init__(self, tower: Tower, capacity: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.tower, self.capacity = tower, capacity
        self._shape, self._dtype = (capacity, 1 + tower.vision.deepstack, hidden_size), dtype
        self._rows: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of a full pool."""
        return int(np.prod(self._shape)) * self._dtype.itemsize

    @property
    def rows(self) -> Tensor:
        if self._rows is None:
            # The system maps zeroed pages on first touch, so rows that no image used take no memory.
            self._rows = torch.from_numpy(np.zeros(self.num_bytes, np.uint8)).view(self._dtype).view(self._shape)
        return self._rows

    def free(self) -> None:
        """Free the pool until it is next needed: the model sleeps."""
        self._rows = None

    def encode(self, jobs: Sequence[EncodeJob]) -> tuple[float, tuple[int, ...]]:
        """Encode images into their rows. Returns the seconds, and the indices of jobs that failed; their rows are
        zero."""
        begin = time.perf_counter()
        failed = []
        for i, job in enumerate(jobs):
            at = torch.from_numpy(job.rows.astype(np.int64))
            try:
                made = self.tower.encode(job.pixels, job.shapes, job.grid)
                if made.shape != (len(at), *self._shape[1:]):
                    raise ValueError(f"embeddings {tuple(made.shape)} for {len(at)} rows of {self._shape[1:]}")
                if not bool(made.isfinite().all()):
                    raise ValueError("its embeddings are not finite")
            except (RuntimeError, ValueError, IndexError, TypeError) as error:  # the tower's code is not ours
                log.warning("an image of tiles %s could not be encoded: %s", job.shapes[:4], error)
                self.rows[at] = 0
                failed.append(i)
                continue
            self.rows[at] = made.to(self._dtype)
        return time.perf_counter() - begin, tuple(failed)
