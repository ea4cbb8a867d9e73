"""Gemma 3: every image becomes one square with a fixed number of embeddings."""

from __future__ import annotations

from typing import Any

from weft.engine.images.plan import Detail, Encode, ImagePlan, Run, Tile, only, side

BILINEAR = 2
BEGIN, IMAGE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Gemma3Rule:
    family = "gemma3"
    written = BEGIN
    around = ("\n\n", "\n\n")  # tokenized with the text around, as by the model's processor
    low_if_several = False

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any], encode: Encode) -> None:
        if preprocessor.get("do_pan_and_scan"):
            raise ValueError("pan and scan is not supported")
        self.marker = int(config.get("boi_token_index") or only(encode(BEGIN), BEGIN))
        image = int(config.get("image_token_id") or config.get("image_token_index") or only(encode(IMAGE), IMAGE))
        end = int(config.get("eoi_token_index") or only(encode(END), END))
        self.token_ids = frozenset({self.marker, image, end})
        self.resample = int(preprocessor.get("resample", BILINEAR))
        size = preprocessor.get("size") or {"height": 224, "width": 224}
        height, width = side(size, "height"), side(size, "width")
        count = int(config.get("mm_tokens_per_image") or 256)
        runs = (Run(self.marker, 1, False), Run(image, count, True), Run(end, 1, False))
        self._plan = ImagePlan(((height, width),), (Tile(height, width),), (1,), runs)

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:  # noqa: ARG002
        return self._plan
