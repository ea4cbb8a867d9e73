"""Random tiny vision-language checkpoints, prompts with pictures for them, and `transformers` as the oracle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoModelForImageTextToText

from weft.engine.wire.messages import Image
from weft.engine.wire.pixels import PixelShelf

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
PLACEHOLDER = 300
MEAN, STD = (0.5, 0.4, 0.6), (0.5, 0.25, 0.3)


class Picture(NamedTuple):
    """Tiles of one image as `[h, w, 3]` uint8, its grid, and its span in a prompt: ids and which get embeddings."""

    tiles: tuple[np.ndarray, ...]
    grid: tuple[int, ...]
    ids: tuple[int, ...]
    mask: bytes = b""


class Prompt(NamedTuple):
    ids: np.ndarray
    images: tuple[Image, ...]
    pictures: tuple[Picture, ...]


class Kind(NamedTuple):
    """A family: its classes and configuration, how it sees a picture, and the oracle's further inputs."""

    name: str
    config: Callable[[], Any]
    picture: Callable[[np.random.Generator, int], Picture]
    """`picture(rng, size)`: sizes differ in shape, where the family allows that."""
    inputs: Callable[[Prompt], dict[str, Any]]


def prompt_of(shelf: PixelShelf, parts: Sequence[Sequence[int] | Picture]) -> Prompt:
    """Build a prompt of text and pictures, with the pixels on the shelf."""
    ids: list[int] = []
    images, pictures = [], []
    for part in parts:
        if not isinstance(part, Picture):
            ids += part
            continue
        raw = [tile.tobytes() for tile in part.tiles]
        digest = hashlib.sha256(repr([tile.shape for tile in part.tiles]).encode() + b"".join(raw)).digest()
        shapes = tuple((tile.shape[0], tile.shape[1]) for tile in part.tiles)
        file = shelf.put(1, raw)
        images.append(Image(digest, len(ids), part.mask, len(part.ids), file, shapes, part.grid))
        pictures.append(part)
        ids += part.ids
    return Prompt(np.array(ids, np.int32), tuple(images), tuple(pictures))


def normalised(tile: np.ndarray) -> np.ndarray:
    """Return `[3, h, w]` float32, as the image processors compute it."""
    scaled = (tile.astype(np.float64) / 255).astype(np.float32)
    return ((scaled - np.array(MEAN, np.float32)) / np.array(STD, np.float32)).transpose(2, 0, 1)


def _tile(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def _idefics3() -> Any:
    return transformers.Idefics3Config(
        image_token_id=PLACEHOLDER, scale_factor=2, pad_token_id=None, tie_word_embeddings=False,
        vision_config={
            "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 8,
        },
        text_config={"model_type": "llama", **TEXT},
    )  # fmt: skip


def _smolvlm() -> Any:
    idefics = _idefics3().to_dict()
    return transformers.SmolVLMConfig(
        image_token_id=PLACEHOLDER, scale_factor=2, pad_token_id=None, tie_word_embeddings=False,
        vision_config={k: v for k, v in idefics["vision_config"].items() if k != "model_type"},
        text_config={"model_type": "llama", **TEXT},
    )  # fmt: skip


def _split_picture(rng: np.random.Generator, size: int) -> Picture:
    """Tiles of 32 x 32, each with four embeddings, and an id for the tile's place before each."""
    tiles = tuple(_tile(rng, 32, 32) for _ in range(1 + size))
    ids: list[int] = []
    mask = b""
    for number in range(len(tiles)):
        ids += [PLACEHOLDER] * 4 + [310 + number]
        mask += b"\1\1\1\1\0"
    return Picture(tiles, (size, 1), tuple(ids[:-1]), mask[:-1])


def _stacked(prompt: Prompt) -> dict[str, Any]:
    tiles = [normalised(tile) for picture in prompt.pictures for tile in picture.tiles]
    return {"pixel_values": torch.from_numpy(np.stack(tiles))[None]} if tiles else {}


_VISION = {"hidden_size": 48, "num_heads": 4, "depth": 4, "patch_size": 4, "temporal_patch_size": 2}
_IDS = {"image_token_id": PLACEHOLDER, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}


def _mrope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0, **more}


def _qwen2_vl() -> Any:
    return transformers.Qwen2VLConfig(
        **_IDS, tie_word_embeddings=False,
        vision_config={"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2, "depth": 2, "num_heads": 4, "patch_size": 4},
        text_config={**TEXT, "rope_parameters": _mrope()},
    )  # fmt: skip


def _qwen25_vl() -> Any:
    return transformers.Qwen2_5_VLConfig(
        **_IDS, tie_word_embeddings=False,
        vision_config={
            **_VISION, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [3]
        },
        text_config={**TEXT, "rope_parameters": _mrope()},
    )  # fmt: skip


def _qwen3_vl() -> Any:
    return transformers.Qwen3VLConfig(
        **_IDS, tie_word_embeddings=False,
        vision_config={
            **_VISION, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        text_config={**TEXT, "head_dim": 16, "rope_parameters": _mrope(mrope_interleaved=True)},
    )  # fmt: skip


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def _qwen3_vl_moe() -> Any:
    text = {**TEXT, **_EXPERTS, "head_dim": 16, "rope_parameters": _mrope(mrope_interleaved=True)}
    vision = _qwen3_vl().vision_config.to_dict()
    return transformers.Qwen3VLMoeConfig(
        **_IDS, tie_word_embeddings=False, text_config=text,
        vision_config={k: v for k, v in vision.items() if k != "model_type"},
    )  # fmt: skip


def _hybrid(name: str, **more: Any) -> Any:
    """Return a Qwen3.5: recurrent layers, and a quarter of each head's dimensions turns with positions."""
    text = {
        **TEXT, **more, "head_dim": 64, "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": {**_mrope(mrope_interleaved=True), "partial_rotary_factor": 0.25},
    }  # fmt: skip
    return getattr(transformers, name)(
        **_IDS, tie_word_embeddings=False, text_config=text,
        vision_config={**_VISION, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 64},
    )  # fmt: skip


def _qwen35() -> Any:
    return _hybrid("Qwen3_5Config")


def _qwen35_moe() -> Any:
    return _hybrid("Qwen3_5MoeConfig", **_EXPERTS, shared_expert_intermediate_size=48)


def _grid_picture(rng: np.random.Generator, size: int) -> Picture:
    """Pictures of 4 x 6, 6 x 4 and 4 x 10 patches of 4 x 4 pixels, whose tokens are 2 x 2 patches."""
    height, width = ((4, 6), (6, 4), (4, 10))[size]
    tile = _tile(rng, 4 * height, 4 * width)
    return Picture((tile,), (1, height, width), (PLACEHOLDER,) * (height * width // 4))


def _patches(tile: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Flatten a picture into patches in the order of Qwen's image processors."""
    _, height, width = grid
    frames = np.stack([normalised(tile)] * 2)[None]
    cut = frames.reshape(1, 2, 3, height // 2, 2, 4, width // 2, 2, 4)
    return cut.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(height * width, -1)


def _grids(prompt: Prompt) -> dict[str, Any]:
    if not prompt.pictures:
        return {}
    patches = [_patches(picture.tiles[0], picture.grid) for picture in prompt.pictures]
    return {
        "pixel_values": torch.from_numpy(np.concatenate(patches)),
        "image_grid_thw": torch.tensor([picture.grid for picture in prompt.pictures]),
        "mm_token_type_ids": torch.from_numpy((prompt.ids == PLACEHOLDER).astype(np.int64))[None],
    }


def _gemma3() -> Any:
    text = {
        **TEXT, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    return transformers.Gemma3Config(
        image_token_id=PLACEHOLDER, boi_token_id=302, eoi_token_id=303, mm_tokens_per_image=16,
        vision_config={
            "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 8, "vision_use_head": False,
        },
        text_config=text,
    )  # fmt: skip


def _square_picture(rng: np.random.Generator, size: int) -> Picture:  # noqa: ARG001 (pictures are alike)
    return Picture((_tile(rng, 32, 32),), (1,), (PLACEHOLDER,) * 16)


def _squares(prompt: Prompt) -> dict[str, Any]:
    if not prompt.pictures:
        return {}
    tiles = np.stack([normalised(picture.tiles[0]) for picture in prompt.pictures])
    return {"pixel_values": torch.from_numpy(tiles)}


def _typed_squares(prompt: Prompt) -> dict[str, Any]:
    types = torch.from_numpy((prompt.ids == PLACEHOLDER).astype(np.int64))[None]
    return {**_squares(prompt), "token_type_ids": types} if prompt.pictures else {}


def _mistral3() -> Any:
    return transformers.Mistral3Config(
        image_token_index=PLACEHOLDER, spatial_merge_size=2, vision_feature_layer=-1, tie_word_embeddings=False,
        vision_config={
            "model_type": "pixtral", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 64, "patch_size": 4, "head_dim": 12,
        },
        text_config={"model_type": "mistral", **TEXT, "head_dim": 16, "sliding_window": None},
    )  # fmt: skip


def _broken_picture(rng: np.random.Generator, size: int) -> Picture:
    """A picture of rows of tokens, each of 8 x 8 pixels, with a break after each row but the last."""
    rows, columns = ((2, 3), (3, 2), (2, 5))[size]
    row = (PLACEHOLDER,) * columns + (301,)
    mask = (b"\1" * columns + b"\0") * rows
    return Picture((_tile(rng, 8 * rows, 8 * columns),), (rows, columns), (row * rows)[:-1], mask[:-1])


def _sized(prompt: Prompt) -> dict[str, Any]:
    if not prompt.pictures:
        return {}
    sizes = np.array([picture.tiles[0].shape[:2] for picture in prompt.pictures])
    pixels = np.zeros((len(sizes), 3, *sizes.max(0)), np.float32)
    for own, picture, (height, width) in zip(pixels, prompt.pictures, sizes, strict=True):
        own[:, :height, :width] = normalised(picture.tiles[0])
    return {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.from_numpy(sizes)}


def _clip(patch: int = 8) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "image_size": 32, "patch_size": patch,
    }  # fmt: skip


def _llava() -> Any:
    return transformers.LlavaConfig(
        image_token_index=PLACEHOLDER, vision_config=_clip(), text_config={"model_type": "llama", **TEXT}
    )


def _llava_mistral() -> Any:
    """Return a LLaVA with several hidden states of the tower, the first one included."""
    return transformers.LlavaConfig(
        image_token_index=PLACEHOLDER, vision_config=_clip(), vision_feature_layer=[0, -1],
        text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
    )  # fmt: skip


def _llava_pixtral() -> Any:
    return transformers.LlavaConfig(
        image_token_index=PLACEHOLDER, vision_feature_layer=-1, vision_feature_select_strategy="full",
        vision_config={**_mistral3().vision_config.to_dict(), "patch_size": 8},
        text_config={"model_type": "mistral", **TEXT, "head_dim": 16, "sliding_window": None},
    )  # fmt: skip


PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]


def _llava_next() -> Any:
    return transformers.LlavaNextConfig(
        image_token_index=PLACEHOLDER, vision_config=_clip(16), image_grid_pinpoints=PINPOINTS,
        text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
    )  # fmt: skip


def _llava_onevision() -> Any:
    """Return a LLaVA-OneVision that reduces images to two tiles' embeddings."""
    return transformers.LlavaOnevisionConfig(
        image_token_index=PLACEHOLDER, video_token_index=301, image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
        vision_config={**_clip(16), "model_type": "siglip_vision_model", "vision_use_head": False},
        text_config={"model_type": "qwen2", **TEXT},
    )  # fmt: skip


def _clip_picture(rng: np.random.Generator, size: int) -> Picture:  # noqa: ARG001 (pictures are alike)
    return Picture((_tile(rng, 32, 32),), (), (PLACEHOLDER,) * 16)


def _tiled_picture(counts: tuple[int, int, int]) -> Callable[[np.random.Generator, int], Picture]:
    """Pictures of 60 x 20, 41 x 64 and 64 x 64 pixels in tiles, with these embeddings. A tile alone has four."""

    def picture(rng: np.random.Generator, size: int) -> Picture:
        tiles = tuple(_tile(rng, 32, 32) for _ in range((3, 5, 5)[size]))
        return Picture(tiles, ((60, 20), (41, 64), (64, 64))[size], (PLACEHOLDER,) * (4 + counts[size]))

    return picture


def _in_tiles(prompt: Prompt) -> dict[str, Any]:
    if not prompt.pictures:
        return {}
    count = max(len(picture.tiles) for picture in prompt.pictures)
    pixels = np.zeros((len(prompt.pictures), count, 3, 32, 32), np.float32)
    for own, picture in zip(pixels, prompt.pictures, strict=True):
        own[: len(picture.tiles)] = [normalised(tile) for tile in picture.tiles]
    given = {"pixel_values": torch.from_numpy(pixels)}
    given["image_sizes"] = torch.tensor([picture.grid or (32, 32) for picture in prompt.pictures])
    if count == 1:
        given["batch_num_images"] = torch.tensor([len(prompt.pictures)])
    return given


KINDS = {
    kind.name: kind
    for kind in (
        Kind("idefics3", _idefics3, _split_picture, _stacked),
        Kind("smolvlm", _smolvlm, _split_picture, _stacked),
        Kind("qwen2-vl", _qwen2_vl, _grid_picture, _grids),
        Kind("qwen2.5-vl", _qwen25_vl, _grid_picture, _grids),
        Kind("qwen3-vl", _qwen3_vl, _grid_picture, _grids),
        Kind("qwen3-vl-moe", _qwen3_vl_moe, _grid_picture, _grids),
        Kind("qwen3.5", _qwen35, _grid_picture, _grids),
        Kind("qwen3.5-moe", _qwen35_moe, _grid_picture, _grids),
        Kind("gemma3", _gemma3, _square_picture, _typed_squares),
        Kind("mistral3", _mistral3, _broken_picture, _sized),
        Kind("llava", _llava, _clip_picture, _squares),
        Kind("llava-mistral", _llava_mistral, _clip_picture, _squares),
        Kind("llava-pixtral", _llava_pixtral, _broken_picture, _sized),
        Kind("llava-next", _llava_next, _tiled_picture((12, 10, 20)), _in_tiles),
        Kind("llava-onevision", _llava_onevision, _tiled_picture((12, 10, 6)), _in_tiles),
    )
}


def _widened(config: Any) -> Any:
    """Return the configuration with sizes that GPU kernels need."""
    text = config.get_text_config()
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    for name, value in {**sizes, "head_dim": 64}.items():
        setattr(text, name, value)
    if hasattr(text, "moe_intermediate_size"):
        text.moe_intermediate_size = 128
        text.num_experts_per_tok = text.num_experts  # 16 bits may choose another of two experts with equal scores
    if "mrope_section" in (text.rope_parameters or {}):
        text.rope_parameters["mrope_section"] = [8, 12, 12]
    if config.model_type == "qwen2_5_vl":
        config.vision_config.hidden_size = 64  # heads of 16
    for name in ("out_hidden_size", "hidden_size" if config.model_type == "qwen2_vl" else ""):
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, 512)
    return config


def write_checkpoint(kind: str, path: Path, *, wide: bool = False) -> Path:
    """Write a random checkpoint whose answers depend on its pictures. wide: with sizes for GPUs."""
    config = _widened(KINDS[kind].config()) if wide else KINDS[kind].config()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.05 if wide else 0.15)
        # An answer with the id of a placeholder would be one more image to the oracle.
        model.get_output_embeddings().weight.data[PLACEHOLDER : PLACEHOLDER + 4] = 0
    model.save_pretrained(path)
    preprocessor = {"image_mean": MEAN, "image_std": STD, "rescale_factor": 1 / 255}
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return path


@cache
def _reference(path: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def oracle_logits(path: Path, kind: str, prompt: Prompt, answer: Sequence[int]) -> torch.Tensor:
    """Return `[len(answer), V]`: the logits of each token of an answer, given those before it."""
    ids = torch.from_numpy(np.concatenate((prompt.ids, answer)).astype(np.int64))[None]
    given = KINDS[kind].inputs(prompt)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in given:
            given[name] = torch.nn.functional.pad(given[name], (0, len(answer)))
    with torch.inference_mode():
        logits: torch.Tensor = _reference(path)(input_ids=ids, use_cache=False, **given).logits
    return logits[0, len(prompt.ids) - 1 : -1]
