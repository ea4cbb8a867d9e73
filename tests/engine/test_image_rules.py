"""Image rules against the processors of `transformers`: sizes, tiles, grids and placeholder tokens."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from weft.engine.images.plan import ImagePlan, ImageSizeError
from weft.engine.images.rules import FAMILIES, rule_of

SIZES = [
    (1, 1), (1, 3), (3, 1), (7, 5), (28, 28), (30, 41), (64, 64), (65, 64), (64, 65), (100, 20), (20, 100), (127, 129),
    (199, 1), (1, 199), (200, 300), (301, 173), (640, 480), (33, 512), (1000, 6),
]  # fmt: skip
"""(width, height)."""
rng = np.random.default_rng(48)
SIZES += [tuple(int(n) for n in rng.integers(1, 700, 2)) for _ in range(30)]  # type: ignore[misc]


def tokenizer(*special: str, **named: str) -> Any:
    """One token for each byte, and special tokens."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([*special, *named.values()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=named)


def encode(tokenizer: Any) -> Any:
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def noise(width: int, height: int) -> Any:
    return np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)


def ids_of(plan: ImagePlan) -> list[int]:
    return [run.token_id for run in plan.placeholder for _ in range(run.length)]


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("longest", [64, 128, 200])
def test_idefics3_cuts_and_writes_images_as_its_processor(splits: bool, longest: int) -> None:
    settings = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": splits}
    config = {"model_type": "idefics3", "scale_factor": 2, "vision_config": {"image_size": 32, "patch_size": 8}}
    rows = (f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))  # larger ones are text
    text = tokenizer("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *rows)
    images = Idefics3ImageProcessorPil(**settings)
    processor = Idefics3Processor(images, text, image_seq_len=4)
    rule = rule_of(config, settings, encode(text))
    assert rule is not None
    for width, height in SIZES:
        plan = rule.plan(width, height)
        made = processor(
            images=noise(width, height), text="<image>", input_data_format="channels_last", return_tensors="np"
        )
        assert ids_of(plan) == made["input_ids"][0].tolist(), (width, height)
        assert made["pixel_values"].shape[1] == len(plan.tiles), (width, height)
        assert made["pixel_values"].shape[-2:] == plan.shapes[0] == (32, 32)
        assert plan.num_embeddings == 4 * len(plan.tiles)


@pytest.mark.parametrize(
    ("patch", "least", "most"), [(14, 56 * 56, 28 * 28 * 20), (16, 65536, 1 << 18), (14, 784, 10**7)]
)
def test_qwen_rounds_images_as_its_processor(patch: int, least: int, most: int) -> None:
    settings = {"patch_size": patch, "size": {"shortest_edge": least, "longest_edge": most}, "merge_size": 2}
    config = {"model_type": "qwen3_vl", "image_token_id": 9, "vision_config": {"patch_size": patch}}
    rule = rule_of(config, settings, list)  # type: ignore[arg-type]
    assert rule is not None
    processor = Qwen2VLImageProcessorPil(**settings)
    for width, height in SIZES:
        plan = rule.plan(width, height)
        made = processor(noise(width, height), input_data_format="channels_last", return_tensors="np")
        assert list(plan.grid) == made["image_grid_thw"][0].tolist(), (width, height)
        assert plan.num_embeddings == plan.num_tokens == made["image_grid_thw"][0].prod() // 4
        assert plan.shapes == ((plan.grid[1] * patch, plan.grid[2] * patch),)


def test_qwen_refuses_extreme_shapes_and_shrinks_at_low_detail() -> None:
    settings = {"patch_size": 14, "min_pixels": 3136, "max_pixels": 10**7}  # the older names
    config = {"model_type": "qwen2_5_vl", "image_token_id": 9, "vision_config": {"patch_size": 14}}
    rule = rule_of(config, settings, list)  # type: ignore[arg-type]
    assert rule is not None
    with pytest.raises(ImageSizeError, match="200 times"):
        rule.plan(201, 1)
    low = rule.plan(2000, 1500, "low")
    assert low.num_pixels <= 512**2 < rule.plan(2000, 1500, "high").num_pixels
    assert rule.plan(300, 200, "low") == rule.plan(300, 200)


@pytest.mark.parametrize("merge", [1, 2])
def test_pixtral_writes_breaks_as_its_processor(merge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The processor's file imports a function from the file that needs torchvision.
    name = "transformers.models.pixtral.image_processing_pixtral"
    monkeypatch.setitem(sys.modules, name, image_processing_pil_pixtral)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    text = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    images = PixtralImageProcessorPil(size={"longest_edge": 140}, patch_size=14)
    processor = PixtralProcessor(images, text, patch_size=14, spatial_merge_size=merge)
    config = {"model_type": "mistral3", "spatial_merge_size": merge, "vision_config": {"patch_size": 14}}
    rule = rule_of(config, {"size": {"longest_edge": 140}, "patch_size": 14}, encode(text))
    assert rule is not None
    for width, height in SIZES:
        if max(width, height) > 100 * min(width, height):
            continue  # the processor makes images without pixels of some
        plan = rule.plan(width, height)
        made = processor(
            images=noise(width, height), text="[IMG]", input_data_format="channels_last", return_tensors="np"
        )
        assert ids_of(plan) == made["input_ids"][0].tolist(), (width, height)
        assert made["pixel_values"].shape[-2:] == plan.shapes[0]
    with pytest.raises(ImageSizeError):
        rule.plan(16384, 1)


def test_gemma3_writes_one_square_as_its_processor() -> None:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    text = tokenizer(**named)
    settings = {"size": {"height": 28, "width": 28}}
    processor = Gemma3Processor(Gemma3ImageProcessorPil(**settings), text, image_seq_length=4)
    config = {
        "model_type": "gemma3", "mm_tokens_per_image": 4, "vision_config": {"image_size": 28},
        "boi_token_index": text.boi_token_id, "eoi_token_index": text.eoi_token_id,
        "image_token_index": text.image_token_id,
    }  # fmt: skip
    rule = rule_of(config, settings, encode(text))
    assert rule is not None
    for width, height in SIZES:
        plan = rule.plan(width, height)
        made = processor(images=noise(width, height), text="a<start_of_image>b", input_data_format="channels_last")
        before, after = (encode(text)(part) for part in rule.around)
        expected = [*encode(text)("a"), *before, *ids_of(plan), *after, *encode(text)("b")]
        assert made["input_ids"][0] == expected
        assert np.array(made["pixel_values"]).shape[-2:] == plan.shapes[0] == (28, 28)


CLIP = {"image_size": 28, "patch_size": 7}
PINPOINTS = [[28 * a, 28 * b] for a in range(1, 5) for b in range(1, 5)]


@pytest.fixture
def llava(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processors' files import others that need torchvision."""
    for name in ("llava", "llava_next", "llava_onevision"):
        pil = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
        monkeypatch.setitem(sys.modules, f"transformers.models.{name}.image_processing_{name}", pil)
        module = importlib.import_module(f"transformers.models.{name}.processing_{name}")
    monkeypatch.setattr(module.ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    return sys.modules


LLAVAS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {},
    ),
    "llava_next": (
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_grid_pinpoints": PINPOINTS},
    ),
    "llava_onevision": (
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_4"},
        {"image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_4"},
    ),
}
"""settings of the image processor, of the processor, and of the model"""


@pytest.mark.parametrize("family", LLAVAS)
def test_llava_cuts_and_writes_images_as_its_processor(family: str, llava: Any) -> None:
    settings, further, about = LLAVAS[family]
    text = tokenizer("<image>", "<video>")
    name = {"llava": "Llava", "llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision"}[family]
    images = getattr(llava[f"transformers.models.{family}.image_processing_pil_{family}"], f"{name}ImageProcessorPil")
    processor = getattr(llava[f"transformers.models.{family}.processing_{family}"], f"{name}Processor")
    config = {"model_type": family, "vision_config": CLIP, **about}
    made_by = processor(images(**settings), text, **further)
    rule = rule_of(config, settings, encode(text))
    assert rule is not None
    for width, height in SIZES:
        if family != "llava" and max(width, height) > 3 * min(width, height):
            continue  # with tiles of 4 x 4 embeddings the processor leaves none of some
        for several in (False, True)[: 2 if rule.low_if_several else 1]:
            plan = rule.plan(width, height, "low" if several else "auto")
            pictures = [[noise(width, height)] * 2] if several else noise(width, height)
            made = made_by(
                images=pictures, text="<image>" * (1 + several), input_data_format="channels_last",
                return_tensors="np",
            )  # fmt: skip
            assert ids_of(plan) * (1 + several) == made["input_ids"][0].tolist(), (width, height)
            shape = made["pixel_values"].shape
            assert (shape[-4] if family != "llava" else 1) == len(plan.tiles), (width, height, several)
            assert shape[-2:] == plan.shapes[0]


def test_models_without_a_rule_or_with_odd_files() -> None:
    assert rule_of({"model_type": "llama"}, None, list) is None  # type: ignore[arg-type]
    assert rule_of({"model_type": "gemma3"}, {}, list) is None  # type: ignore[arg-type]
    for family in FAMILIES:
        with pytest.raises(ValueError, match="preprocessor_config"):
            rule_of({"model_type": family, "vision_config": {}}, None, list)  # type: ignore[arg-type]
    config = {"model_type": "qwen3_vl", "image_token_id": 9, "vision_config": {"patch_size": 16}}
    with pytest.raises(ValueError, match="patches"):
        rule_of(config, {"patch_size": 14}, list)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lacks"):
        rule_of({"model_type": "smolvlm", "image_token_id": 1, "vision_config": {}}, {}, list)  # type: ignore[arg-type]
    square = {"model_type": "llava", "image_token_id": 1, "vision_config": {"image_size": 28, "patch_size": 14}}
    older = rule_of(square, {"crop_size": 28, "size": 28}, list)  # type: ignore[arg-type]
    assert older is not None
    assert older.plan(40, 50).num_tokens == 4
    for damage in ("a word", {"image_size": 28, "patch_size": 0}):
        with pytest.raises(ValueError, match="of another type"):
            rule_of({**square, "vision_config": damage}, {"size": 28}, list)  # type: ignore[arg-type]
