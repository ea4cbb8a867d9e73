"""Images over HTTP with a real engine and a tiny random checkpoint. `transformers` is the oracle, file to token."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import image_model
import in_process
import numpy as np
import openai
import pytest
import torch
from image_model import PREPROCESSOR, data_url, file_of, part, picture
from test_metrics import SEEING
from transformers import AutoModelForImageTextToText, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from weft.engine.engine import Engine
from weft.engine.wire.pixels import PixelShelf

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import vision_models

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 8
PICTURES = [
    picture(width, height, seed=i) for i, (width, height) in enumerate([(20, 10), (40, 40), (12, 30), (64, 33)])
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_model.write_checkpoint(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def shelf() -> Iterator[PixelShelf]:
    made = PixelShelf.make()
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(checkpoint: Path, shelf: PixelShelf) -> Any:
    options: dict[str, Any] = {"page_size": 16, "max_num_batched_tokens": 24, "kv_cache_gib": 0.02}
    return in_process.start(checkpoint, share={"pixels": str(shelf.directory)}, dtype="float32", **options)


class Oracle:
    """`transformers`' processor and model."""

    def __init__(self, path: Path) -> None:
        hf = image_model.tokenizer()._hf
        self._processor = Idefics3Processor(Idefics3ImageProcessorPil(**PREPROCESSOR), hf, image_seq_len=4)
        normal = {"image_mean": vision_models.MEAN, "image_std": vision_models.STD}
        self._processor.image_processor = Idefics3ImageProcessorPil(**PREPROCESSOR, **normal)
        self._model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def answer(self, text: str, images: list[Any]) -> list[int]:
        """Greedy tokens after a rendered prompt with one `<image>` for each image."""
        pixels = [np.asarray(image) for image in images]
        given = self._processor(
            images=pixels or None, text=text, input_data_format="channels_last", return_tensors="pt",
            add_special_tokens=False,
        )  # fmt: skip
        with torch.inference_mode():
            made = self._model.generate(**given, max_new_tokens=TOKENS, do_sample=False)
        return made[0, given["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


def asked(*parts: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


async def tokens(http: Any, *parts: Any) -> list[int]:
    response = await http.post("/v1/chat/completions", json=asked(*parts))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


async def test_answers_equal_those_of_transformers(engine: Engine, oracle: Oracle, shelf: PixelShelf) -> None:
    async with in_process.serving({"tiny": engine}) as (http, _, _):
        for images in ([], PICTURES[:1], PICTURES[1:2], PICTURES[:3], [PICTURES[3], PICTURES[0], PICTURES[3]]):
            parts: list[Any] = [text("see ")]
            rendered = "<|bos|><|user|>see "
            for i, image in enumerate(images):
                parts += [part(file_of(image)), text(f" {i} ")]
                rendered += f"<image> {i} "
            expected = oracle.answer(f"{rendered}<|assistant|>", images)
            assert await tokens(http, *parts) == expected
            assert await tokens(http, *parts) == expected  # from the prefix cache
    assert not list(shelf.directory.iterdir())


async def test_the_same_text_with_other_images_mixes_nothing_up(engine: Engine, oracle: Oracle) -> None:
    images = [picture(30, 30, seed=seed) for seed in range(12)]
    answers = [oracle.answer("<|bos|><|user|>what?<image><|assistant|>", [image]) for image in images]
    assert len(set(map(tuple, answers))) > 1
    async with in_process.serving({"tiny": engine}) as (http, _, _):
        order = np.random.default_rng(0).permutation([*range(12), *range(12)]).tolist()
        found = await asyncio.gather(*(tokens(http, text("what?"), part(file_of(images[i]))) for i in order))
    assert found == [answers[i] for i in order]


async def test_clients_see_cached_images(engine: Engine) -> None:
    url = data_url(file_of(picture(64, 64, seed=99)))
    content: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "and what is it?"}]
    async with (
        in_process.serving({"tiny": engine}) as (http, _, _),
        openai.AsyncOpenAI(base_url=f"{str(http.base_url).rstrip('/')}/v1", api_key="none") as client,
    ):
        made = [
            await client.responses.create(
                model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=4
            )
            for _ in range(2)
        ]
        lines = (await http.get("/metrics")).text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    types = dict(line.split(" ")[2:4] for line in lines if line.startswith("# TYPE "))
    for name, kind in SEEING.items():
        assert types[f"{name}_total" if kind == "counter" else name] == kind
    assert float(figures["weft_encoder_tokens_total"]) >= 4 * float(figures["weft_encoder_images_total"]) > 0
    assert float(figures["weft_encoder_cache_queries_total"]) == float(figures["vllm:mm_cache_queries_total"]) > 0
    first, second = (answer.usage for answer in made)
    assert first is not None
    assert second is not None
    assert first.input_tokens == second.input_tokens
    assert first.input_tokens_details.cached_tokens == 0
    assert second.input_tokens_details.cached_tokens >= first.input_tokens // 16 * 16 - 16


async def test_a_missing_file_of_pixels_is_an_error_of_its_request(engine: Engine) -> None:
    async with in_process.serving({"tiny": engine}) as (http, service, _):
        await tokens(http, text("a"))
        media = service.media
        assert media is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(media.shelf, "put", lambda *_: f"1-{'0' * 32}")
            response = await http.post("/v1/chat/completions", json=asked(part(file_of(picture(31, 31, seed=5)))))
        assert response.status_code >= 400
        assert await tokens(http, text("a"))
