"""The quality tool scores what the engine computes: against `transformers`, on the demo model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from weft.engine.demo import MODEL_PATH
from weft.tools import quality

TEXT = "What is 12 + 30? The sum is 42.\nSort these words: pear, apple, fig. They are apple, fig and pear.\n" * 4


def test_scores_are_those_of_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    arguments = [str(MODEL_PATH), "--text", str(tmp_path / "text"), "--tokens", "60", "--window", "32"]
    assert quality.main([*arguments, "--formats", "bf16", "FP8 KV", "--json", str(tmp_path / "json")]) == 0
    figures = json.loads((tmp_path / "json").read_text())["formats"]
    assert list(figures) == ["float32", "bf16", "FP8 KV"]
    windows = quality.windows_of(MODEL_PATH, TEXT, 60, 32)
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    own = []
    for ids in windows:
        assert len(ids) <= 32
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        own += rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    assert figures["float32"]["perplexity"] == pytest.approx(math.exp(-np.mean(own)), rel=1e-4)
    assert (figures["float32"]["agreement"], figures["float32"]["difference"]) == (1.0, 0.0)
    for name in ("bf16", "FP8 KV"):
        assert 0.0 < figures[name]["difference"] < 0.3
        assert 0.8 < figures[name]["agreement"] <= 1.0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[-3:]] == ["| float32", "| bf16", "| FP8 KV"]


def test_a_format_that_cannot_be_served_is_a_row_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text(TEXT)
    monkeypatch.setitem(quality.FORMATS, "bf16", {"quantization": "fp8", "model_impl": "transformers"})
    arguments = [str(MODEL_PATH), "--text", str(tmp_path / "text"), "--tokens", "20", "--formats", "bf16"]
    assert quality.main(arguments) == 0
    assert "| bf16 | --quantization fp8 needs weft's own layers" in capsys.readouterr().out


def test_the_text_is_the_same_for_every_run() -> None:
    assert quality.documentation() == quality.documentation()
    assert len(quality.documentation()) > 100_000
