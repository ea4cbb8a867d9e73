"""Prepared pixels against the image processors of `transformers`, to the bit; and how files of all kinds are read."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from weft.engine.images.rules import rule_of
from weft.server.api.media.prepare import ORIENTATION, Unreadable, cut, open_image, size_of, to_rgb

SIZES = [(1, 1), (3, 1), (1, 3), (31, 33), (64, 64), (200, 90), (90, 201), (150, 151)]
RAW = {"do_rescale": False, "do_normalize": False}
IDEFICS = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
LLAVA = {"image_token_index": 1, "vision_config": {"image_size": 28, "patch_size": 2}}
CLIP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
SQUARE = {"size": {"height": 28, "width": 28}}
PINPOINTS = [[28 * a, 28 * b] for a in range(1, 4) for b in range(1, 4)]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "idefics3": (
        {"model_type": "idefics3", "image_token_id": 1, "vision_config": {"image_size": 32, "patch_size": 8}},
        IDEFICS,
        Idefics3ImageProcessorPil,
    ),
    "smolvlm": (
        {"model_type": "smolvlm", "image_token_id": 1, "vision_config": {"image_size": 32, "patch_size": 8}},
        {**IDEFICS, "do_image_splitting": False},
        Idefics3ImageProcessorPil,
    ),
    "qwen": (
        {"model_type": "qwen2_5_vl", "image_token_id": 1, "vision_config": {}},
        {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}},
        Qwen2VLImageProcessorPil,
    ),
    "gemma3": (
        {
            "model_type": "gemma3",
            "boi_token_index": 1,
            "eoi_token_index": 2,
            "image_token_index": 3,
            "vision_config": {},
        },
        {"size": {"height": 56, "width": 56}},
        Gemma3ImageProcessorPil,
    ),
    "mistral3": (
        {"model_type": "mistral3", "image_token_index": 1, "vision_config": {"patch_size": 14}},
        {"size": {"longest_edge": 112}, "patch_size": 14},
        PixtralImageProcessorPil,
    ),
    "llava": ({"model_type": "llava", **LLAVA}, CLIP, CLIPImageProcessorPil),
    "llava-square": ({"model_type": "llava", **LLAVA}, {**CLIP, "do_pad": True}, LlavaImageProcessorPil),
    "llava-next": (
        {"model_type": "llava_next", "image_grid_pinpoints": PINPOINTS, **LLAVA},
        {**CLIP, "image_grid_pinpoints": PINPOINTS}, LlavaNextImageProcessorPil,
    ),
    "llava-onevision": (
        {"model_type": "llava_onevision", "image_grid_pinpoints": PINPOINTS, **LLAVA},
        {**SQUARE, "image_grid_pinpoints": PINPOINTS}, LlavaOnevisionImageProcessorPil,
    ),
}  # fmt: skip


def noise(width: int, height: int) -> Any:
    return np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)


def written(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("family", CASES)
def test_tiles_equal_those_of_the_processor(family: str) -> None:
    config, settings, processor = CASES[family]
    rule = rule_of(config, settings, lambda _: [7])
    assert rule is not None
    process = processor(**settings, **RAW)
    for width, height in SIZES:
        plan = rule.plan(width, height)
        image = open_image(written(Image.fromarray(noise(width, height))))
        assert size_of(image) == (width, height)
        tiles = cut(to_rgb(image), plan.canvas, plan.tiles, rule.resample, plan.background)
        made = process(noise(width, height), input_data_format="channels_last", return_tensors="np")["pixel_values"]
        if family == "qwen":
            (height, width), (_, rows, columns) = plan.shapes[0], plan.grid
            made = made.reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)[..., 0, :, :]
            made = made.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, height, width)
        made = made.reshape(-1, *made.shape[-3:]).transpose(0, 2, 3, 1)
        assert len(tiles) == len(made)
        for tile, expected, shape in zip(tiles, made, plan.shapes, strict=True):
            assert (np.frombuffer(tile, np.uint8).reshape(*shape, 3) == expected).all(), (width, height)


def test_one_of_several_images_of_a_onevision_is_padded_as_by_its_processor() -> None:
    config, settings, processor = CASES["llava-onevision"]
    rule = rule_of(config, settings, lambda _: [7])
    assert rule is not None
    assert rule.low_if_several
    for width, height in SIZES:
        plan = rule.plan(width, height, "low")
        image = Image.fromarray(noise(width, height))
        made = processor(**settings, **RAW)(
            [[noise(width, height)] * 2], input_data_format="channels_last", return_tensors="np"
        )["pixel_values"]
        (tile,) = cut(image, plan.canvas, plan.tiles, rule.resample, plan.background)
        assert (np.frombuffer(tile, np.uint8).reshape(28, 28, 3) == made[0, 0].transpose(1, 2, 0)).all()


def test_a_very_large_image_is_reduced_before_it_is_padded() -> None:
    config, settings, _ = CASES["llava-square"]
    rule = rule_of(config, settings, lambda _: [7])
    assert rule is not None
    plan = rule.plan(16384, 82)
    (tile,) = cut(Image.new("RGB", (16384, 82), "red"), plan.canvas, plan.tiles, rule.resample, (0, 0, 255))
    pixels = np.frombuffer(tile, np.uint8).reshape(28, 28, 3)
    assert (pixels[0] == (0, 0, 255)).all()
    assert (pixels[14, :, 0] > 10).all()


def rgb(data: bytes) -> Any:
    return np.asarray(to_rgb(open_image(data)))


GRADIENT = np.arange(0, 256, 4, dtype=np.uint8).reshape(1, 64).repeat(8, 0)


def test_sixteen_bit_gray_keeps_its_shades() -> None:
    deep = Image.fromarray(GRADIENT.astype(np.uint16) * 256 + 77)
    assert (rgb(written(deep)) == GRADIENT[..., None]).all()


def test_transparency_becomes_white() -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[..., 0] = 200
    pixels[:2, :, 3] = 255
    expected = np.full((4, 4, 3), 255, np.uint8)
    expected[:2] = (200, 0, 0)
    rgba = Image.fromarray(pixels)
    assert (rgb(written(rgba)) == expected).all()
    assert (rgb(written(rgba, "WEBP", lossless=True)) == expected).all()
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([9, 9, 9, 200, 0, 0])
    palette.paste(1, (0, 0, 4, 2))
    assert (rgb(written(palette, transparency=0)) == expected).all()
    assert (rgb(written(palette, "GIF", transparency=0)) == expected).all()
    gray = Image.merge("LA", [Image.new("L", (4, 4), 50), rgba.getchannel("A")])
    assert rgb(written(gray))[[0, 3], 0, 0].tolist() == [50, 255]


@pytest.mark.parametrize("turn", range(1, 9))
def test_photographs_stand_upright(turn: int) -> None:
    from PIL import ImageOps

    image = Image.fromarray(noise(6, 4))
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    data = written(image, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert size_of(open_image(data)) == upright.size
    assert (rgb(data) == np.asarray(upright.convert("RGB"))).all()


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_odd_orientations_are_none(value: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = value
    assert size_of(open_image(written(Image.new("RGB", (6, 4)), exif=exif))) == (6, 4)


def test_only_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    for form in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if form == "WEBP" else {}
        data = written(frames[0], form, save_all=True, append_images=frames[1:], **options)
        assert (rgb(data) == (255, 0, 0)).all(), form


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
def test_modes_become_rgb(mode: str) -> None:
    image = Image.new("RGB", (8, 8), "white").convert(mode)
    form = "JPEG" if mode == "CMYK" else "PNG"
    found = rgb(written(image, form))
    assert found.shape == (8, 8, 3)
    assert (found >= 250).all()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?><svg/>", "SVG"),
        (b"%PDF-1.7\n", "PDF"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"\0\0\0\x18ftypavif\0\0\0\0", "AVIF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no supported format"),
        (b"II*\0\x08\0\0\0", "no supported format"),
        (b"hello", "no supported format"),
    ],
)
def test_other_files_are_named(data: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        open_image(data)


def test_truncated_files_are_refused() -> None:
    image = Image.fromarray(noise(64, 64))
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        data = written(image, form)
        with pytest.raises(Unreadable, match=r"truncated|damaged"):
            to_rgb(open_image(data[: len(data) // 2]))
