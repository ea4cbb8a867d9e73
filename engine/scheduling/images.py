"""`Images`: the images of prompts: which are encoded in an iteration, how far chunks may go, what iterations read.

Images are encoded while iterations run, the next one of each prompt first, up to half of the pool. A chunk ends before
an image whose embeddings are not there yet. A prompt holds the embeddings from the start of the encoding until all
tokens of the image are confirmed, or until it loses its slot. The pool keeps them for later prompts while it can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from weft.engine.errors import RequestError
from weft.engine.model.vision.family import Vision
from weft.engine.runner.device.image_rows import ImageRows
from weft.engine.runner.iteration.batch import I32, Batch, EncodeJob, ImageInputs
from weft.engine.scheduling.image_rows import RowPool
from weft.engine.scheduling.request import PromptImage, Request, Rows
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire import messages
from weft.engine.wire.messages import Finish, ImageStats
from weft.engine.wire.page_keys import image_key, image_parts
from weft.engine.wire.pixels import PixelShelf

MAX_IMAGES = 4096  # images in a prompt
MAX_TILES = 4096  # tiles of an image
MAX_BYTES = 1 << 30  # pixels of an image
UNENCODED = "an image could not be encoded"
GONE = "the pixels of an image are gone: send the request again"


class Images:
    """The images of one scheduler's requests. Only for models that take any."""

    def __init__(self, slots: SlotTable, vision: Vision, encoder: ImageRows, shelf: PixelShelf | None) -> None:
        self._slots, self._vision, self._encoder, self._shelf = slots, vision, encoder, shelf
        self.pool = RowPool(encoder.capacity)
        self._most, self._pending = encoder.capacity // 2, 0  # Embeddings that may be due at once, and that are.
        self._encoding: list[Rows] = []
        self._waiting: set[Request] = set()
        self._holding: set[Request] = set()  # requests that hold embeddings
        self.refused: dict[Request, tuple[str, Finish]] = {}
        """Requests that cannot continue, why, and how they end. The scheduler ends them."""
        self._images = self._tokens = self._queries = self._hits = self._failures = 0
        self._seconds = 0.0

    # -- arrival

    def attach(self, request: Request, images: Sequence[messages.Image]) -> None:
        """Check the images of a request that has arrived, and give it what depends on them. Raises `RequestError`."""
        if len(images) > MAX_IMAGES:
            raise RequestError(f"the prompt has {len(images)} images, more than {MAX_IMAGES}", "images")
        made: list[PromptImage] = []
        end = 0
        for number, image in enumerate(images, 1):
            if problem := self._problem(image, end, request.prompt_len):
                raise RequestError(f"image {number}: {problem}", "images")
            end = image.start + image.length
            mask = np.frombuffer(image.mask, np.uint8) if image.mask else np.ones(image.length, np.uint8)
            made.append(PromptImage(image, image_key(image), (image.start + np.flatnonzero(mask)).astype(np.int32)))
        request.images = tuple(made)
        request.image_parts = image_parts(images, self._slots.page_size)
        if self._vision.rope_grid:
            request.rope, request.rope_delta = rope_positions(images, request.prompt_len, self._vision.rope_grid)

    def _problem(self, image: messages.Image, end: int, prompt_len: int) -> str:
        """Return what is wrong with an image that may begin at position `end`, or ""."""
        if len(image.digest) != 32:
            return "its digest does not have 32 bytes"
        if not end <= image.start < image.start + image.length <= prompt_len:
            return f"its span {image.start} + {image.length} overlaps another or exceeds the prompt"
        if image.mask and (len(image.mask) != image.length or max(image.mask) > 1):
            return "its mask does not fit its span"
        if not 1 <= len(image.shapes) <= MAX_TILES or any(h < 1 or w < 1 for h, w in image.shapes):
            return "it has no tiles, too many, or an empty one"
        if 3 * sum(h * w for h, w in image.shapes) > MAX_BYTES:
            return f"it has more than {MAX_BYTES >> 20} MiB of pixels"
        count = sum(image.mask) if image.mask else image.length
        try:
            expected = self._vision.num_embeddings(image.shapes, image.grid)
        except ValueError as error:
            return str(error)
        if count != expected:
            return f"its span holds {count} embeddings, but its tiles give {expected}"
        if (self._vision.rope_grid or self._vision.bidirectional) and count != image.length:
            return "it has other tokens between its embeddings"
        if count > self.pool.capacity:
            return f"it has {count} embeddings, more than --encoder-cache-tokens {self.pool.capacity}"
        return ""

    # -- forming an iteration

    def begin(self) -> None:
        """Start to form an iteration: take images that have been encoded, and begin to encode those that are next."""
        self._take_encoded()
        self._waiting.clear()
        s = self._slots
        for slot in s.in_order(s.prefilling()).tolist():
            request = s.of(slot)
            image = next((i for i in request.images if i.end > s.scheduled[slot] and i.rows is None), None)
            if image is not None and request not in self.refused:
                self._acquire(request, image)

    @property
    def num_waiting(self) -> int:
        """Requests whose next token waits for an image to be encoded."""
        return len(self._waiting)

    def _take_encoded(self) -> None:
        for rows in [rows for rows in self._encoding if rows.encoding is not None and rows.encoding.done]:
            encoding, rows.encoding = rows.encoding, None
            assert encoding is not None
            self._encoding.remove(rows)
            self._pending -= len(rows.rows)
            self._images += 1
            self._tokens += len(rows.rows)
            self._seconds += encoding.seconds
            if not encoding.failed:
                continue
            self._failures += 1
            self.pool.drop(rows)
            for request in self._holding:
                if any(image.rows is rows for image in request.images):
                    self.refused[request] = UNENCODED, Finish.NONFINITE

    @property
    def undivided(self) -> int:
        """Most tokens of an image that no chunk may cut; 0: chunks may cut images."""
        return self._vision.bidirectional

    def most(self, slot: int, done: int, length: int, room: int | None, *, first: bool) -> int:
        """Return how many of the `length` tokens from `done` on can be computed now. Images that they need and that are
        not encoded become due. If attention is bidirectional within images, no chunk ends inside one: the `first`
        tokens of a chunk may then be more than `length`, up to the image's end, but no more than `room`."""
        request = self._slots.of(slot)
        if length <= 0 or request in self.refused:
            return 0
        for image in request.images:
            if image.end <= done:
                continue
            if image.start >= done + length:
                break
            if not self._ready(request, image):
                if first and image.start <= done:
                    self._waiting.add(request)
                return max(0, image.start - done)
            if self._vision.bidirectional and image.end > done + length:
                whole = first and image.start <= done and (room is None or image.end - done <= room)
                return image.end - done if whole else max(0, image.start - done)
        return length

    def _ready(self, request: Request, image: PromptImage) -> bool:
        """Return whether the image's embeddings are there."""
        if image.rows is None:
            self._acquire(request, image)
        return image.rows is not None and image.rows.encoding is None

    def _acquire(self, request: Request, image: PromptImage) -> None:
        """Hold the image's embeddings, or begin to encode it, if there is room."""
        name = (request.salt, image.key)
        rows = self.pool.hold(name)
        if rows is None:
            count = len(image.places)
            if self._encoding and self._pending + count > self._most:
                return
            if (rows := self.pool.allocate(name, count)) is None:
                return
            if (job := self._job(request, image, rows)) is None:
                self.pool.drop(rows)
                self.pool.release(rows)
                return
            rows.encoding = self._encoder.begin(job)
            self._encoding.append(rows)
            self._pending += count
        else:
            self._hits += 1
        image.rows = rows
        self._holding.add(request)
        self._queries += 1

    def _job(self, request: Request, image: PromptImage, rows: Rows) -> EncodeJob | None:
        """Return the job that encodes an image, with a copy of its pixels. Refuses the request if there are none."""
        of = image.image
        try:
            if self._shelf is None:
                raise FileNotFoundError
            pixels = self._shelf.take(of.file, 3 * sum(h * w for h, w in of.shapes))
        except (OSError, ValueError):
            self.refused[request] = GONE, Finish.REFUSED
            return None
        return EncodeJob(rows.rows, pixels, of.shapes, of.grid)

    def inputs(self, batch: Batch) -> Batch:
        """Return the batch with its images and rotary positions."""
        s, d = self._slots, batch.num_decodes
        deltas = s.rope_delta.take(batch.slots)
        chunks = [(row, s.of(slot)) for row, slot in enumerate(batch.slots[d:].tolist(), d)]
        if not deltas.any() and not any(request.images for _, request in chunks):
            return batch
        rows = np.full(batch.num_tokens, -1, np.int32)
        rope = until = None
        if self._vision.rope_grid:
            rope = np.tile(batch.positions + np.repeat(deltas, batch.query_len), (3, 1))
        if self._vision.bidirectional:
            until = batch.positions.copy()
        ends = np.cumsum(batch.query_len)
        for row, request in chunks:
            at, stop = int(ends[row] - batch.query_len[row]), int(ends[row])
            position = int(batch.positions[at])
            for image in request.images:
                self._place(image, rows[at:stop], position)
                if until is not None:
                    inside = until[at:stop]
                    inside[(inside >= image.start) & (inside < image.end)] = image.end - 1
            if rope is not None and request.rope is not None:
                own = request.rope[:, position : position + stop - at]
                rope[:, at : at + own.shape[1]] = own
        return batch._replace(images=ImageInputs(rows, rope, until))

    @staticmethod
    def _place(image: PromptImage, rows: I32, position: int) -> None:
        """Write the rows of an image's embeddings to those of a chunk's tokens that have one. position: the first
        token's."""
        begin, end = np.searchsorted(image.places, (position, position + len(rows)))
        if begin < end:
            assert image.rows is not None  # ensured by `most`
            rows[image.places[begin:end] - position] = image.rows.rows[begin:end]

    # -- committing an iteration

    def commit(self) -> None:
        """Release images whose tokens are all confirmed."""
        for request in list(self._holding):
            confirmed, holds = self._slots.confirmed[request.slot], False
            for image in request.images:
                if image.rows is not None and confirmed >= image.end:
                    self.pool.release(image.rows)
                    image.rows = None
                holds |= image.rows is not None
            if not holds:
                self._holding.discard(request)

    def release(self, request: Request) -> None:
        """Release the embeddings of a request that loses its slot."""
        self.refused.pop(request, None)
        self._holding.discard(request)
        for image in request.images:
            if image.rows is not None:
                self.pool.release(image.rows)
                image.rows = None

    def forget(self) -> None:
        """Forget all embeddings: the model sleeps, or the cache is reset."""
        self.pool.forget()

    def check(self, requests: Iterable[Request]) -> None:
        """Raise `AssertionError` unless the references to embeddings agree with the requests that hold them."""
        self.pool.check()
        held = Counter(id(image.rows) for request in requests for image in request.images if image.rows is not None)
        for rows in self.pool.rows():
            assert rows.references == held[id(rows)], "references to embeddings disagree with their owners"

    def stats(self) -> ImageStats:
        return ImageStats(
            encoded=self._images, tokens=self._tokens, seconds=self._seconds, queries=self._queries, hits=self._hits,
            failures=self._failures, rows=self.pool.num_used, capacity=self.pool.capacity,
        )  # fmt: skip


def rope_positions(images: Sequence[messages.Image], length: int, merge: int) -> tuple[I32, int]:
    """Return rotary positions `[3, length]` (time, height, width) of a prompt, and the difference of later tokens'
    positions. An image's tokens form a grid of `merge` by `merge` patches each; the text after it continues after its
    longer side."""
    positions = np.empty((3, length), np.int32)
    at = now = 0
    for image in images:
        text = image.start - at
        positions[:, at : image.start] = now + np.arange(text)
        now += text
        _, height, width = (side // merge if i else side for i, side in enumerate(image.grid))
        grid = np.indices((*image.grid[:1], height, width)).reshape(3, -1)
        positions[:, image.start : image.start + image.length] = now + grid
        now += max(height, width)
        at = image.start + image.length
    positions[:, at:] = now + np.arange(length - at)
    return positions, now - at
