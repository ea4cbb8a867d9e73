"""Qwen2-VL to Qwen3-VL and Qwen3.5: an image keeps its shape, rounded to whole patches within bounds of pixels."""

from __future__ import annotations

import math
from typing import Any

from weft.engine.images.plan import LOW_DETAIL_SIDE, Detail, Encode, ImagePlan, ImageSizeError, Run, Tile, only

LARGEST_RATIO = 200
BICUBIC = 3
IMAGE = "<|image_pad|>"


class QwenVLRule:
    family = "qwen_vl"
    written = f"<|vision_start|>{IMAGE}<|vision_end|>"
    around = ("", "")
    low_if_several = False

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any], encode: Encode) -> None:
        self.marker = int(config.get("image_token_id") or only(encode(IMAGE), IMAGE))
        self.token_ids = frozenset({self.marker})
        self.resample = int(preprocessor.get("resample", BICUBIC))
        self._patch = int(preprocessor.get("patch_size", 14))
        self._merge = int(preprocessor.get("merge_size", 2))
        vision = config["vision_config"]
        if vision.get("patch_size", 14) != self._patch or vision.get("spatial_merge_size", 2) != self._merge:
            raise ValueError("the patches of the preprocessor are not those of the vision tower")
        size = preprocessor.get("size") or {}
        self._least = int(preprocessor.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
        self._most = int(preprocessor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        if max(height, width) > LARGEST_RATIO * min(height, width):
            raise ImageSizeError(f"one side is more than {LARGEST_RATIO} times as long as the other")
        most = max(self._least, min(self._most, LOW_DETAIL_SIDE**2)) if detail == "low" else self._most
        height, width = self._resized(height, width, most)
        grid = (1, height // self._patch, width // self._patch)
        runs = (Run(self.marker, grid[1] * grid[2] // self._merge**2, True),)
        return ImagePlan(((height, width),), (Tile(height, width),), grid, runs)

    def _resized(self, height: int, width: int, most: int) -> tuple[int, int]:
        unit = self._patch * self._merge
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self._least:
            grow = math.sqrt(self._least / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * unit, columns * unit
