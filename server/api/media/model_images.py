"""`ModelImages`: the images of requests to one model, from their parts to their spans in the prompt."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

from weft import install_hint
from weft.engine.config import expanded
from weft.engine.errors import ModelError, one_line
from weft.engine.images.plan import VERSION, Detail, ImagePlan, ImageRule, ImageSizeError
from weft.engine.images.rules import read_preprocessor, rule_of
from weft.engine.wire.messages import Image
from weft.engine.wire.pixels import PixelShelf, ShelfFull
from weft.server.api.media.addresses import FetchRefused
from weft.server.api.media.decoded import Decoded, DecodedImages, Key
from weft.server.api.media.decoders import DecodeFailed, Decoders, DecodersBusy, OpenImage
from weft.server.api.media.fetch import Fetcher
from weft.server.api.media.parts import ImagePart
from weft.server.api.media.sources import OpenFile, Sources
from weft.server.config import ServeConfig
from weft.server.errors import ApiError, bad_request, unavailable
from weft.server.observe.metrics import Metrics
from weft.server.text.tokenizer import Tokenizer

MAX_SIDE = 16384
MAX_RATIO = 200
CODE = "invalid_image"


class Placed(NamedTuple):
    """A part and its path in the request, for errors."""

    part: ImagePart
    param: str


class Prepared(NamedTuple):
    plan: ImagePlan
    digest: bytes = b""
    file: str = ""  # on the shelf


class Shelved:
    """Files on the shelf, until `close` or the end of this object."""

    def __init__(self, shelf: PixelShelf) -> None:
        self.names: list[str] = []
        self.close = weakref.finalize(self, shelf.discard, self.names)
        """Idempotent."""


class Media:
    """What the models of a process share."""

    def __init__(
        self, sources: Sources, decoders: Decoders, shelf: PixelShelf, metrics: Metrics, *, client: int,
        limit: int, max_pixels: int,
    ) -> None:  # fmt: skip
        """`client`: this process's number on the shelf. `limit`: images of a request."""
        self.sources, self.decoders, self.shelf, self.metrics = sources, decoders, shelf, metrics
        self.client, self.limit, self.max_pixels = client, limit, max_pixels

    def close(self) -> None:
        """Idempotent."""
        self.decoders.close()


def make_media(config: ServeConfig, pixels: str, metrics: Metrics, *, client: int) -> Media:
    """`pixels`: the directory of the shelf."""
    size = int(config.max_image_mib * 2**20)
    fetcher = Fetcher(config.allowed_media_domains, size) if config.image_urls else None
    local = None if config.allowed_local_media_path is None else expanded(config.allowed_local_media_path)
    return Media(
        Sources(fetcher, local, size), Decoders(config.max_image_pixels), PixelShelf(pixels), metrics,
        client=client, limit=config.limit_images, max_pixels=config.max_image_pixels,
    )  # fmt: skip


def find_rule(config: ServeConfig, tokenizer: Tokenizer) -> ImageRule | None:
    """The rule of a model's images; None if images are off. Raises `ModelError` if they cannot be served."""
    if not config.limit_images:
        return None
    if find_spec("PIL") is None:
        raise ModelError(f"Pillow is missing ({install_hint('vision')})")
    folder = config.model_path
    try:
        about = json.loads((folder / "config.json").read_bytes())
        rule = rule_of(about, read_preprocessor(folder), lambda t: tokenizer.encode(t, add_special_tokens=False))
    except (OSError, ValueError) as error:
        raise ModelError(one_line(error)) from None
    if rule is None:
        raise ModelError("its family has no image rule")
    return rule


class ModelImages:
    def __init__(self, media: Media, rule: ImageRule) -> None:
        self.rule = rule
        self._media = media
        self._origin = f"{rule.family} {VERSION} {version('pillow')}".encode()
        self._decoded = DecodedImages()

    async def load(
        self, images: Mapping[str, Placed], files: OpenFile | None, *, pixels: bool, salt: str = ""
    ) -> tuple[dict[str, Prepared], Shelved]:
        """Fetch and prepare a request's images, by id. Without `pixels`, only their plans. salt: of the client. Raises
        `ApiError`."""
        shelved = Shelved(self._media.shelf)
        low = self.rule.low_if_several and len(images) > 1
        tasks = {
            id: asyncio.ensure_future(self._one(placed, files, shelved, pixels, salt, low))
            for id, placed in images.items()
        }
        try:
            await asyncio.gather(*tasks.values())
        except BaseException:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            shelved.close()
            raise
        return {id: task.result() for id, task in tasks.items()}, shelved

    async def _one(
        self, placed: Placed, files: OpenFile | None, shelved: Shelved, pixels: bool, salt: str, low: bool
    ) -> Prepared:
        media, part = self._media, placed.part
        detail = "low" if low else part.detail
        source = media.sources.label(part)
        with self._counted(source, placed.param):
            begin = time.perf_counter()
            data = await media.sources.read(part, files)
            if source == "url":
                media.metrics.image_fetch_seconds.observe(time.perf_counter() - begin)
            content = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
            key = Key(salt, detail, content)
            if (known := self._decoded.get(key)) is None:
                async with media.decoders.open(data) as image:
                    begin = time.perf_counter()
                    plan = self._plan(image, detail)
                    if not pixels:
                        return Prepared(plan)
                    known = Decoded(plan, await image.tiles(plan, self.rule.resample))
                    media.metrics.image_decode_seconds.observe(time.perf_counter() - begin)
                self._decoded.put(key, known)
            plan, tiles = known
            if not pixels:
                return Prepared(plan)
            file = media.shelf.put(media.client, [tiles])
            shelved.names.append(file)
            media.metrics.image_pixels.inc(plan.num_pixels)
            return Prepared(plan, self._digest(content, plan, detail), file)

    @contextmanager
    def _counted(self, source: str, param: str) -> Iterator[None]:
        """Count an image, and translate errors."""
        outcome = "refused"
        try:
            yield
            outcome = "ready"
        except (FetchRefused, DecodeFailed, ImageSizeError) as error:
            raise bad_request(f"{param}: the image cannot be used: {error}.", param, CODE) from None
        except ShelfFull:
            raise unavailable("Too many images are being processed.", "images_full", 2) from None
        except DecodersBusy:
            raise unavailable("The server could not decode the image now. Try again.", "images_busy", 2) from None
        finally:
            self._media.metrics.images.labels(source, outcome).inc()

    def _plan(self, image: OpenImage, detail: Detail) -> ImagePlan:
        width, height = image.width, image.height
        size = f"it has {width} × {height} pixels"
        if width * height > self._media.max_pixels:
            raise ImageSizeError(f"{size}, more than {self._media.max_pixels} in all")
        if max(width, height) > MAX_SIDE:
            raise ImageSizeError(f"{size}, more than {MAX_SIDE} on a side")
        if min(width, height) < 1 or max(width, height) > MAX_RATIO * min(width, height):
            raise ImageSizeError(f"{size}, and one side is more than {MAX_RATIO} times as long as the other")
        return self.rule.plan(width, height, detail)

    def _digest(self, content: bytes, plan: ImagePlan, detail: Detail) -> bytes:
        """Identify the embeddings. The plan stands for the options of the model's processor. content: the digest of the
        file."""
        digest = hashlib.sha256()
        about = f"{detail} {self.rule.resample} {plan.canvas} {plan.tiles} {plan.background}".encode()
        for piece in (self._origin, about, content):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
        return digest.digest()

    def check_number(self, images: Sequence[Placed]) -> None:
        """Raises `ApiError` for more images than a request may have."""
        if len(images) > (limit := self._media.limit):
            param = images[limit].param
            raise bad_request(f"{param}: a request may have at most {limit} images (--limit-images).", param)

    def expand(self, ids: Sequence[int], images: Sequence[Prepared]) -> tuple[list[int], tuple[Image, ...]]:
        """Replace each marker by its image's placeholder. `images`: in the order of the prompt. Raises `ApiError` if
        the prompt has other tokens of images."""
        marker, others = self.rule.marker, self.rule.token_ids
        if ids.count(marker) != len(images) or any(i in others and i != marker for i in ids):
            raise image_token_error("messages")
        out: list[int] = []
        spans = []
        left = iter(images)
        for token_id in ids:
            if token_id != marker:
                out.append(token_id)
                continue
            image = next(left)
            spans.append(_span(image, len(out)))
            for run in image.plan.placeholder:
                out += [run.token_id] * run.length
        return out, tuple(spans)


def _span(image: Prepared, start: int) -> Image:
    """An image whose placeholder begins at `start`. Its span is from its first embedding to its last."""
    flags = b"".join(bytes([run.is_embedding]) * run.length for run in image.plan.placeholder)
    first, last = flags.index(1), flags.rindex(1)
    mask = flags[first : last + 1]
    return Image(
        digest=image.digest, start=start + first, mask=b"" if all(mask) else mask, length=len(mask), file=image.file,
        shapes=image.plan.shapes, grid=image.plan.grid,
    )  # fmt: skip


def image_token_error(param: str) -> ApiError:
    what = f"{param}: the prompt contains tokens that stand for images. Send images as parts of messages"
    return bad_request(f"{what}, and do not write the model's image tokens as text.", param, CODE)
