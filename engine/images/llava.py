"""LLaVA: an image is one square; LLaVA-NeXT and LLaVA-OneVision add square tiles of a larger copy to it."""

from __future__ import annotations

from typing import Any

from weft.engine.images.anyres import Size, best_resolution, fitted, num_tiled
from weft.engine.images.pixtral import PixtralRule
from weft.engine.images.plan import Detail, Encode, ImagePlan, ImageRule, ImageSizeError, Run, Tile, only, side

BICUBIC = 3
IMAGE = "<image>"
LARGEST_SQUARE = 4096  # longest side of an image that is padded to a square in its own size
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)


def llava_rule(config: dict[str, Any], preprocessor: dict[str, Any], encode: Encode) -> ImageRule:
    """Return the rule of a LLaVA; that of Pixtral if it has Pixtral's tower."""
    tower = config["vision_config"].get("model_type")
    return (PixtralRule if tower == "pixtral" else LlavaRule)(config, preprocessor, encode)


class LlavaRule:
    family = "llava"
    written = IMAGE
    around = ("", "")

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any], encode: Encode) -> None:
        vision = config["vision_config"]
        self.marker = int(config.get("image_token_index") or config.get("image_token_id") or only(encode(IMAGE), IMAGE))
        self.token_ids = frozenset({self.marker})
        self.resample = int(preprocessor.get("resample", BICUBIC))
        self._side = side(preprocessor.get("crop_size") or preprocessor["size"], "height", "shortest_edge")
        if vision["image_size"] != self._side or self._side % vision["patch_size"]:
            raise ValueError(f"images of {self._side} pixels do not fit the vision tower")
        self._patches = self._side // vision["patch_size"]
        self._newline = int(config["model_type"] != "llava")
        self._tiled = [(int(h), int(w)) for h, w in config.get("image_grid_pinpoints") or ()] if self._newline else []
        if any(h % self._side or w % self._side or not h or not w for h, w in self._tiled):
            raise ValueError(f"image_grid_pinpoints are not multiples of {self._side}")
        self.low_if_several = config["model_type"] == "llava_onevision"
        self._most_tiles = most_tiles(config)
        self._pads = bool(preprocessor.get("do_pad")) or bool(self._newline)
        mean = preprocessor.get("image_mean") or CLIP_MEAN
        red, green, blue = (int(255 * float(value)) for value in mean)
        self._background = red, green, blue

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        if self._tiled and detail != "low":
            return self._in_tiles((height, width))
        run = Run(self.marker, self._patches**2 + self._newline, True)
        canvas, tile = (self._square if self._pads else self._center)(height, width)
        return ImagePlan(canvas, (tile,), (), (run,), self._background)

    def _in_tiles(self, size: Size) -> ImagePlan:
        """The whole image as a square, then the tiles of a larger one with black bars."""
        best = best_resolution(size, self._tiled)
        height, width = fitted(size, best)
        top, left, unit = (best[0] - height) // 2, (best[1] - width) // 2, self._side
        tiles = [
            Tile(unit, unit, (x - left, y - top, x - left + unit, y - top + unit))
            for y in range(0, best[0], unit)
            for x in range(0, best[1], unit)
        ]
        count = num_tiled(size, self._tiled, unit, self._patches, self._most_tiles)
        if not count:
            raise ImageSizeError("it is too narrow")
        run = Run(self.marker, self._patches**2 + count, True)
        return ImagePlan(((height, width),), (Tile(unit, unit, whole=True), *tiles), size, (run,))

    def _square(self, height: int, width: int) -> tuple[tuple[Size, ...], Tile]:
        """The image with bars that make it a square, reduced. A very large image is reduced first."""
        canvas: tuple[Size, ...] = ()
        if (longest := max(height, width)) > LARGEST_SQUARE:
            height, width = (max(1, each * LARGEST_SQUARE // longest) for each in (height, width))
            canvas, longest = ((height, width),), LARGEST_SQUARE
        top, left = (longest - height) // 2, (longest - width) // 2
        return canvas, Tile(self._side, self._side, (-left, -top, longest - left, longest - top))

    def _center(self, height: int, width: int) -> tuple[tuple[Size, ...], Tile]:
        """The middle square of the image."""
        unit, shortest = self._side, min(height, width)
        height, width = (unit if each == shortest else int(unit * each / shortest) for each in (height, width))
        top, left = (height - unit) // 2, (width - unit) // 2
        return ((height, width),), Tile(unit, unit, (left, top, left + unit, top + unit))


def most_tiles(config: dict[str, Any]) -> int:
    """Return to how many tiles' embeddings an image is reduced; 0: not at all. Raises `ValueError`."""
    if config["model_type"] != "llava_onevision":
        return 0
    return int(str(config.get("vision_aspect_ratio") or "anyres_max_9").removeprefix("anyres_max_"))
