"""A vision-language model's files: without weights, for servers with a stub engine, or with random ones. Images to
send."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import vocabularies
from PIL import Image
from tokenizers import AddedToken

from weft.server.text.tokenizer import Tokenizer

MARKS = ("<image>", "<fake_token_around_image>", "<global-img>")
ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
PARTS = (
    "<|bos|>{% for message in messages %}{{ '<|' + message.role + '|>' }}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRINGS = (
    "<|bos|>{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PREPROCESSOR = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
TOKENS_OF_A_TILE = 4


def write(folder: Path) -> Path:
    """Write the configuration of an Idefics3 with tiles of 32 × 32 pixels and four embeddings."""
    folder.mkdir(exist_ok=True)
    vision = {"image_size": 32, "patch_size": 8}
    config = {"model_type": "idefics3", "scale_factor": 2, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def write_preprocessor(folder: Path) -> None:
    """Add the sizes to the preprocessor of a checkpoint."""
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **PREPROCESSOR}))


def write_checkpoint(path: Path) -> Path:
    """Write such a model with random weights and a tokenizer, whose answers depend on its images."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
    import vision_models

    made = tokenizer()
    marker = made.token_id("<image>")
    assert marker is not None
    before, vision_models.PLACEHOLDER = vision_models.PLACEHOLDER, marker
    try:
        vision_models.write_checkpoint("idefics3", path)
    finally:
        vision_models.PLACEHOLDER = before
    write_preprocessor(path)
    made._hf.save_pretrained(path)
    return path


def tokenizer(template: str = PARTS) -> Tokenizer:
    backend = vocabularies.byte_level()
    backend.add_special_tokens([AddedToken(name, special=True) for name in (*MARKS, *ROWS)])
    return Tokenizer(vocabularies.wrapped(backend, chat_template=template))


def picture(width: int = 20, height: int = 10, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes, **more: Any) -> dict[str, Any]:
    """A content part of OpenAI's chat."""
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}
