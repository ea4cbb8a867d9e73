"""LoRA adapters of models that take images: answers equal those of the model with the adapter merged in."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import GREEDY
from lora_files import merged, save_adapter
from test_vision import TOLERANCE, Served
from transformers import AutoModelForImageTextToText
from vision_models import KINDS, prompt_of, write_checkpoint

from weft.engine.model.adapter import adapter_digest
from weft.engine.wire.pixels import PixelShelf

TEXT = "language_model"
"""Adapters of these models may change the modules under this name."""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2-vl", "qwen3-vl", "llava", "gemma3", "mistral3"])
def test_a_request_with_an_image_and_an_adapter_answers_as_the_merged_model(tmp_path: Path, kind: str) -> None:
    path = write_checkpoint(kind, tmp_path / "base")
    base = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    adapter = save_adapter(tmp_path / "one", base, seed=1, within=TEXT)
    changed = shutil.copytree(path, tmp_path / "merged")
    merged(base, [adapter])[0].save_pretrained(changed)
    (tmp_path / "shelf").mkdir()
    shelf = PixelShelf(tmp_path / "shelf")
    served = Served(kind, path, shelf, lora_modules=[f"one={adapter}"])
    picture = KINDS[kind].picture(np.random.default_rng(0), 2)
    prompts = [prompt_of(shelf, [list(range(5, 15)), picture, list(range(20, 26))]) for _ in range(2)]
    handles = [
        served.harness.add(prompt.ids, images=prompt.images, adapter=digest, max_tokens=8, logprobs=0, **GREEDY)
        for prompt, digest in zip(prompts, ("", adapter_digest(adapter)), strict=True)
    ]
    served.harness.run()
    served.check(prompts[0], handles[0])
    assert served.difference(prompts[1], handles[1]) > 1
    served.path = changed
    assert served.difference(prompts[1], handles[1]) < TOLERANCE
    served.harness.engine.close()
