"""Idefics3 and SmolVLM: an image is cut into square tiles, and a small copy of it follows them."""

from __future__ import annotations

import math
from typing import Any

from weft.engine.images.plan import Detail, Encode, ImagePlan, Run, Tile, only, side

FAKE, IMAGE, GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"
LARGEST_SIDE = 4096  # limit of the resized image in any configuration
LANCZOS = 1


class Idefics3Rule:
    family = "idefics3"
    written = IMAGE
    around = ("", "")
    low_if_several = False

    def __init__(self, config: dict[str, Any], preprocessor: dict[str, Any], encode: Encode) -> None:
        vision = config["vision_config"]
        self.marker = int(config.get("image_token_id") or only(encode(IMAGE), IMAGE))
        self.token_ids = frozenset({self.marker})
        self.resample = int(preprocessor.get("resample", LANCZOS))
        self._longest = side(preprocessor.get("size") or {"longest_edge": 4 * 364}, "longest_edge")
        self._tile = side(preprocessor.get("max_image_size") or {"longest_edge": 364}, "longest_edge")
        self._splits = bool(preprocessor.get("do_image_splitting", True))
        if self._tile % vision["patch_size"] or self._tile != vision["image_size"]:
            raise ValueError(f"tiles of {self._tile} pixels do not fit a tower for {vision['image_size']}")
        self._embeddings = (self._tile // vision["patch_size"]) ** 2 // int(config.get("scale_factor", 2)) ** 2
        self._encode = encode
        self._pieces: dict[str, list[int]] = {}

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        size = self._scaled(height, width)
        tile, canvas = self._tile, [size]
        if not self._splits or detail == "low":
            canvas.append((tile, tile))
            return ImagePlan(tuple(canvas), (Tile(tile, tile),), (0, 0), self._runs(0, 0))
        rows, columns = self._grid(*size)
        canvas.append((rows * tile, columns * tile))
        if rows == columns == 1:
            return ImagePlan(tuple(canvas), (Tile(tile, tile),), (0, 0), self._runs(0, 0))
        tiles = [
            Tile(tile, tile, (column * tile, row * tile, (column + 1) * tile, (row + 1) * tile))
            for row in range(rows)
            for column in range(columns)
        ]
        return ImagePlan(tuple(canvas), (*tiles, Tile(tile, tile)), (rows, columns), self._runs(rows, columns))

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """The size with the longer side as configured and the shorter one even."""
        ratio, longest = width / height, self._longest
        if width >= height:
            shorter = int(longest / ratio)
            height, width = max(shorter + shorter % 2, 1), longest
        else:
            shorter = int(longest * ratio)
            height, width = longest, max(shorter + shorter % 2, 1)
        if max(height, width) <= LARGEST_SIDE:
            return height, width
        ratio = width / height
        if width >= height:
            return max(int(LARGEST_SIDE / ratio), 1), LARGEST_SIDE
        return LARGEST_SIDE, max(int(LARGEST_SIDE * ratio), 1)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles. The shorter side follows from the longer one after that was rounded up."""
        ratio, tile = width / height, self._tile
        if width >= height:
            columns = math.ceil(width / tile)
            return math.ceil(int(columns * tile / ratio) / tile), columns
        rows = math.ceil(height / tile)
        return rows, math.ceil(int(rows * tile * ratio) / tile)

    def _runs(self, rows: int, columns: int) -> tuple[Run, ...]:
        image = Run(self.marker, self._embeddings, True)
        runs: list[Run] = []
        newline = ""
        for row in range(rows):
            for column in range(columns):
                runs += [*self._text(f"{newline}{FAKE}<row_{row + 1}_col_{column + 1}>"), image]
                newline = ""
            newline = "\n"
        gap = "\n\n" if rows else ""
        return (*runs, *self._text(f"{gap}{FAKE}{GLOBAL}"), image, *self._text(FAKE))

    def _text(self, text: str) -> list[Run]:
        if text not in self._pieces:
            self._pieces[text] = self._encode(text)
        return [Run(token_id, 1, False) for token_id in self._pieces[text]]
