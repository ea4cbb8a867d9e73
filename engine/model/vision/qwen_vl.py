"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images of any size, positions on a grid (M-RoPE); in 3 deepstack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any, Self

from weft.engine.model.vision.family import Shapes, Vision, whole

if TYPE_CHECKING:
    from torch import Tensor, nn

HALVES = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVl(Vision):
    patch: int  # Pixels of a patch's side.
    frames: int  # Frames of a patch; a picture is repeated.

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        vision = config["vision_config"]
        name = str(config.get("model_type", ""))
        third, deep = name.startswith("qwen3"), name.startswith("qwen3_vl")
        indexes = vision.get("deepstack_visual_indexes", (8, 16, 24)) if deep else ()
        return cls(
            patch=whole(vision.get("patch_size", 16 if third else 14), "vision_config.patch_size"),
            frames=whole(vision.get("temporal_patch_size", 2), "vision_config.temporal_patch_size"),
            rope_grid=whole(vision.get("spatial_merge_size", 2), "vision_config.spatial_merge_size"),
            deepstack=len(indexes),
            cpu_only=name.startswith("qwen3_5"),
            mean=HALVES if third else CLIP_MEAN,
            std=HALVES if third else CLIP_STD,
        )

    def num_embeddings(self, shapes: Shapes, grid: tuple[int, ...]) -> int:
        if len(shapes) != 1 or len(grid) != 3 or grid[0] != 1:
            raise ValueError("it must be one tile with a grid (1, height, width)")
        _, height, width = grid
        if shapes[0] != (height * self.patch, width * self.patch):
            raise ValueError(f"its grid {height} x {width} of {self.patch} pixels is not {shapes[0]}")
        if height % self.rope_grid or width % self.rope_grid or not height or not width:
            raise ValueError(f"its grid {height} x {width} is no multiple of {self.rope_grid}")
        return height * width // self.rope_grid**2

    def example(self, tokens: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        side = self.rope_grid * max(1, isqrt(tokens))
        return ((side * self.patch, side * self.patch),), (1, side, side)

    def parts(self, model: Any) -> nn.ModuleDict:
        from torch import nn

        return nn.ModuleDict({"tower": model.model.visual})

    def on_gpu(self, parts: Any) -> None:
        if hasattr(parts["tower"].config, "window_size"):
            from weft.engine.model.vision.segments import use_segments

            use_segments(parts["tower"])

    def embed(self, parts: Any, tiles: Sequence[Tensor], grid: tuple[int, ...]) -> Tensor:
        import torch

        (tile,) = tiles
        made = parts["tower"](self._patches(tile, grid), grid_thw=torch.tensor([grid], device=tile.device))
        further = getattr(made, "deepstack_features", None) or ()
        return torch.stack((made.pooler_output, *further), 1)

    def _patches(self, tile: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Return `[patches, 3 * frames * patch * patch]`. Patches that become one token follow each other."""
        _, height, width = grid
        joined, side = self.rope_grid, self.patch
        cut = tile.reshape(3, height // joined, joined, side, width // joined, joined, side)
        rows = cut.permute(1, 4, 2, 5, 0, 3, 6)[..., None, :, :].expand(*[-1] * 5, self.frames, -1, -1)
        return rows.reshape(height * width, -1)
