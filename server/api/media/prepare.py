"""From the bytes of an image file to 8-bit RGB tiles. Runs in decoder processes only.

Pillow reads five formats here. Each of its errors becomes an `Unreadable` in our words: its own may show addresses.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

from PIL import Image, UnidentifiedImageError

# Plugins are imported before the process gives up opening files.
from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401  # isort: skip

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
ORIENTATION = 0x0112  # EXIF
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)

Image.MAX_IMAGE_PIXELS = None  # `check_size` has our bounds
Image.preinit()


class Unreadable(Exception):
    """The message is one clause for the client."""


def warm_up() -> None:
    """Read an image of each kind, so that Pillow imports everything it needs."""
    gray, color = Image.new("L", (2, 2)), Image.new("RGB", (2, 2))
    several = {"save_all": True, "append_images": [Image.new("RGB", (2, 2), "red")]}
    kinds = [(color, form, options) for form in FORMATS for options in ({}, several if form in Image.SAVE_ALL else {})]
    kinds += [(color.convert("P"), "PNG", {"transparency": 0}), (color.convert("CMYK"), "JPEG", {}), (gray, "GIF", {})]
    for image, form, options in kinds:
        file = io.BytesIO()
        image.save(file, form, **options)
        opened = open_image(file.getvalue())
        size_of(opened)
        cut(to_rgb(opened), [(3, 3)], [(1, 1, (0, 0, 2, 2), False)], Image.Resampling.LANCZOS)


def open_image(data: bytes) -> Image.Image:
    """Read the header. Raises `Unreadable`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise Unreadable(_other_kind(data)) from None
        except MemoryError:
            raise Unreadable("it needs too much memory") from None
        except Exception:  # decoders raise anything for damaged files
            raise Unreadable("its header is damaged") from None


def _other_kind(data: bytes) -> str:
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    supported = "send PNG, JPEG, WebP, GIF or BMP"
    if start.startswith((b"<svg", b"<?xml")) or b"<svg" in start:
        return f"SVG is not supported; {supported}"
    if start.startswith(b"%pdf"):
        return f"PDF is not supported; {supported}"
    if start.startswith((b"<!doctype", b"<html")):
        return f"it is a web page; {supported}"
    if data[4:8] == b"ftyp":
        return f"HEIC, AVIF and videos are not supported; {supported}"
    return f"it is in no supported format or damaged; {supported}" if data else "it is empty"


def turn_of(image: Image.Image) -> int:
    """The orientation of its EXIF data; 1 if there is none before the pixels. `image.getexif` would decode the pixels,
    and hide damage."""
    try:
        exif = Image.Exif()
        exif.load(image.info.get("exif") or b"")
        turn = exif.get(ORIENTATION, 1)
    except Exception:  # damaged EXIF data is no reason to refuse the image
        return 1
    return turn if isinstance(turn, int) and turn in _TURNS else 1


def size_of(image: Image.Image) -> tuple[int, int]:
    """Width and height as shown, after the EXIF orientation."""
    width, height = image.size
    return (height, width) if turn_of(image) in _SIDEWAYS else (width, height)


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode the first frame: upright, 8 bits, over white where it is transparent. Raises `Unreadable`."""
    turn = turn_of(image)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image.load()
            image = _flat(image)
        except Unreadable:
            raise
        except MemoryError:
            raise Unreadable("it needs too much memory") from None
        except Exception:  # decoders raise anything for damaged files
            raise Unreadable("it is truncated or damaged") from None
    return image.transpose(_TURNS[turn]) if turn in _TURNS else image


def _flat(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _high_bytes(image).convert("RGB")
    if image.mode in ("F", "I"):
        raise Unreadable("its pixels have more than 16 bits")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _high_bytes(image: Image.Image) -> Image.Image:
    """The upper eight of sixteen bits; Pillow's conversion would clip."""
    data = image.tobytes()  # in the byte order of the mode
    return Image.frombytes("L", image.size, data[0::2] if image.mode == "I;16B" else data[1::2])


def cut(
    image: Image.Image,
    canvas: Sequence[tuple[int, int]],
    tiles: Sequence[tuple[int, int, tuple[int, int, int, int] | None, bool]],
    resample: int,
    background: tuple[int, int, int] = (0, 0, 0),
) -> list[bytes]:
    """The tiles of an `ImagePlan`, each height × width × RGB."""
    how = Image.Resampling(resample)
    whole = image
    for height, width in canvas:
        image = image.resize((width, height), how)
    out = []
    for height, width, box, of_whole in tiles:
        tile = whole if of_whole else image
        if box is not None:
            tile = _crop(tile, box, background)
        if tile.size != (width, height):
            tile = tile.resize((width, height), how)
        out.append(tile.tobytes())
    return out


def _crop(image: Image.Image, box: tuple[int, int, int, int], background: tuple[int, int, int]) -> Image.Image:
    left, top, right, bottom = box
    if left >= 0 and top >= 0 and right <= image.width and bottom <= image.height:
        return image.crop(box)
    out = Image.new("RGB", (right - left, bottom - top), background)
    out.paste(image, (-left, -top))
    return out
