"""Pixtral and Mistral 3: an image keeps its shape; a break token ends each row of patches."""

from __future__ import annotations

import math
from typing import Any

from weft.engine.images.plan import LOW_DETAIL_SIDE, Detail, Encode, ImagePlan, ImageSizeError, Run, Tile, only, side

BICUBIC = 3
IMAGE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


class PixtralRule:
    family = "pixtral"
    written = IMAGE
    around = ("", "")
    low_if_several = False

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any], encode: Encode) -> None:
        self.marker = int(config.get("image_token_id") or config.get("image_token_index") or only(encode(IMAGE), IMAGE))
        self._break, self._end = only(encode(BREAK), BREAK), only(encode(END), END)
        self.token_ids = frozenset({self.marker, self._break, self._end})
        self.resample = int(preprocessor.get("resample", BICUBIC))
        vision = config["vision_config"]
        self._unit = int(vision.get("patch_size", 16)) * int(config.get("spatial_merge_size") or 1)
        self._longest = side(preprocessor.get("size") or {"longest_edge": 1024}, "longest_edge")

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        longest = min(self._longest, LOW_DETAIL_SIDE) if detail == "low" else self._longest
        shrink = max(height, width) / longest
        if shrink > 1:
            height, width = math.floor(height / shrink), math.floor(width / shrink)
        if min(height, width) < 1:
            raise ImageSizeError("it is too narrow")
        rows, columns = -(-height // self._unit), -(-width // self._unit)
        size = rows * self._unit, columns * self._unit
        image, end_of_row = Run(self.marker, columns, True), Run(self._break, 1, False)
        runs = [run for _ in range(rows) for run in (image, end_of_row)]
        return ImagePlan((size,), (Tile(*size),), (rows, columns), (*runs[:-1], Run(self._end, 1, False)))
