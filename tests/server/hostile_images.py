"""Image files that attack a decoder, and URLs that attack a network."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, *extra: bytes, depth: int = 8, color: int = 2) -> bytes:
    """A PNG with any header and any data."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def zeros(num_bytes: int) -> bytes:
    return zlib.compress(bytes(num_bytes), 1)


def patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


PNG, JPEG, WEBP, GIF, BMP = (saved(NOISE, form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP"))
FRAME = JPEG.index(b"\xff\xc0")

REFUSED: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "a byte": lambda: b"\x89",
    "text": lambda: b"hello world",
    "zeros": lambda: bytes(4096),
    "random": lambda: np.random.default_rng(1).bytes(4096),
    "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "svg with entities": lambda: b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "b">]><svg>&a;</svg>',
    "html": lambda: b"<!DOCTYPE html><script>alert(1)</script>",
    "pdf": lambda: b"%PDF-1.7\n1 0 obj\n",
    "postscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "tiff": lambda: saved(NOISE, "TIFF"),
    "float tiff": lambda: saved(Image.new("F", (8, 8)), "TIFF"),
    "ico": lambda: saved(NOISE.resize((16, 16)), "ICO"),
    "ppm": lambda: saved(NOISE, "PPM"),
    "jpeg 2000": lambda: b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(64),
    "heic": lambda: b"\x00\x00\x00\x18ftypheic" + bytes(64),
    "avif": lambda: b"\x00\x00\x00\x18ftypavif" + bytes(64),
    "mp4": lambda: b"\x00\x00\x00\x18ftypisom" + bytes(64),
    "zip": lambda: b"PK\x03\x04" + bytes(64),
    "fits": lambda: b"SIMPLE  =                    T" + bytes(2880),
    "pixels: bomb": lambda: png(30000, 30000, zeros(2**20)),
    "pixels: bomb in a small file": lambda: png(8000, 8000, zeros(8000 * 24001)),
    "pixels: most": lambda: png(2**31 - 1, 2**31 - 1, zeros(9)),
    "side: wide": lambda: png(100_000, 1, zeros(300_001)),
    "side: high": lambda: png(1, 100_000, zeros(400_000)),
    "ratio": lambda: png(2010, 10, zeros(10 * 6031)),
    "no pixels: width": lambda: png(0, 10, zeros(9)),
    "no pixels: both": lambda: png(0, 0, zeros(9)),
    "png: truncated": lambda: PNG[: len(PNG) // 2],
    "png: signature alone": lambda: PNG[:8],
    "png: header alone": lambda: PNG[:33],
    "png: bad checksum": lambda: patched(PNG, 29, b"\0\0\0\0"),
    "png: no data": lambda: png(64, 64, b""),
    "png: data is not compressed": lambda: png(64, 64, b"not zlib at all"),
    "png: too little data": lambda: png(4000, 4000, zeros(100)),
    "png: chunk longer than the file": lambda: PNG[:33] + struct.pack(">I", 2**31 - 1) + b"IDAT" + b"x",
    "png: text bomb": lambda: png(8, 8, zeros(200), chunk(b"zTXt", b"a\0\0" + zeros(2**26))),
    "png: odd depth": lambda: png(8, 8, zeros(200), depth=7),
    "png: odd color": lambda: png(8, 8, zeros(200), color=9),
    "jpeg: truncated": lambda: JPEG[: len(JPEG) // 2],
    "jpeg: start alone": lambda: JPEG[:2],
    "jpeg: no frame": lambda: JPEG[:FRAME] + b"\xff\xd9",
    "jpeg: bomb": lambda: patched(JPEG, FRAME + 5, struct.pack(">HH", 65535, 65535)),
    "gif: truncated": lambda: GIF[: len(GIF) // 2],
    "gif: header alone": lambda: GIF[:13],
    "gif: bomb": lambda: patched(GIF, 6, struct.pack("<HH", 65535, 65535)),
    "webp: truncated": lambda: WEBP[: len(WEBP) // 2],
    "webp: header alone": lambda: WEBP[:12],
    "bmp: truncated": lambda: BMP[: len(BMP) // 2],
    "bmp: bomb": lambda: patched(BMP, 18, struct.pack("<ii", 2**30, 2**30)),
    "bmp: negative size": lambda: patched(BMP, 18, struct.pack("<i", -64)),
}
"""Files that must be refused."""


def _with_exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(NOISE, "JPEG", exif=exif)


ACCEPTED: dict[str, Callable[[], bytes]] = {
    "animated gif": lambda: saved(NOISE, "GIF", save_all=True, append_images=[NOISE.rotate(90)] * 3),
    "animated webp": lambda: saved(NOISE, "WEBP", save_all=True, append_images=[NOISE.rotate(90)] * 3),
    "animated png": lambda: saved(NOISE, "PNG", save_all=True, append_images=[NOISE.rotate(90)] * 3),
    "cmyk": lambda: saved(NOISE.convert("CMYK"), "JPEG"),
    "palette": lambda: saved(NOISE.convert("P"), "PNG"),
    "palette with transparency": lambda: saved(NOISE.convert("P"), "PNG", transparency=0),
    "gray with alpha": lambda: saved(NOISE.convert("LA"), "PNG"),
    "alpha": lambda: saved(NOISE.convert("RGBA"), "PNG"),
    "one bit": lambda: saved(NOISE.convert("1"), "PNG"),
    "sixteen bits": lambda: saved(Image.fromarray(np.full((8, 8), 40000, np.uint16)), "PNG"),
    "rotated by exif": lambda: _with_exif(6),
    "odd exif": lambda: _with_exif(99),
    "damaged exif": lambda: _with_exif(6).replace(b"Exif\0\0II", b"Exif\0\0XX"),
    "one pixel": lambda: saved(Image.new("RGB", (1, 1)), "PNG"),
    "three pixels high": lambda: saved(Image.new("RGB", (7, 3)), "PNG"),
    "black": lambda: saved(Image.new("RGB", (64, 64)), "PNG"),
    "polyglot: page after the image": lambda: PNG + b"<script>alert(1)</script>",
    "polyglot: archive after the image": lambda: JPEG + b"PK\x03\x04" + bytes(64),
    "progressive": lambda: saved(NOISE, "JPEG", progressive=True),
    "many text chunks": lambda: png(8, 8, zeros(200), *[chunk(b"tEXt", b"a\0b")] * 1000),
}
"""Odd files that are images."""

URLS = [
    "http://127.0.0.1/",
    "http://localhost/",
    "http://localhost./",
    "http://LOCALHOST:80/",
    "https://127.0.0.1/",
    "http://127.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0177.0.0.1/",
    "http://0/",
    "http://0.0.0.0/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[fe80::1%25lo]/",
    "http://[fd00::1]/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://100.64.0.1/",
    "http://198.18.0.1/",
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    "http://example.org:22/",
    "http://example.org:8000/",
    "http://example.org:99999/",
    "http://user:password@example.org/",
    "http://127.0.0.1#@example.org/",
    "http://example.org\\@127.0.0.1/",
    "http://example.org /",
    "http://example.org/\r\nHost: x",
    "http://exa\tmple.org/",
    "http:///etc/passwd",
    "http://",
    "https://[/",
    "ftp://example.org/a.png",
    "gopher://127.0.0.1:6379/_FLUSHALL",
    "file:///etc/passwd",
    "/etc/passwd",
    "data:image/png,abc",
    "data:image/png;base64",
    "data:image/png;base64,***",
    "data:text/html;base64,PGh0bWw+",
    "javascript:alert(1)",
    "http://" + "a" * 9000 + "/",
    "http://xn--/",
    "http://\u2488\u2488.example/",
]
"""URLs that must be refused without a connection."""
