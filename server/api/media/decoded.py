"""`DecodedImages`: the pixels of recent images. A conversation sends its images again with every turn."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from weft.engine.images.plan import Detail, ImagePlan

LIMIT = 64 << 20  # bytes of pixels to keep


class Key(NamedTuple):
    """Clients with different salts share nothing, so that no client can time what another one has sent."""

    salt: str
    detail: Detail
    content: bytes  # digest of the file


class Decoded(NamedTuple):
    plan: ImagePlan
    tiles: bytes


class DecodedImages:
    """Least recently used images are dropped first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit, self.num_bytes = limit, 0
        self._images: OrderedDict[Key, Decoded] = OrderedDict()

    def get(self, key: Key) -> Decoded | None:
        found = self._images.get(key)
        if found is not None:
            self._images.move_to_end(key)
        return found

    def put(self, key: Key, image: Decoded) -> None:
        if key in self._images or len(image.tiles) > self._limit:
            return
        self._images[key] = image
        self.num_bytes += len(image.tiles)
        while self.num_bytes > self._limit:
            _, dropped = self._images.popitem(last=False)
            self.num_bytes -= len(dropped.tiles)
