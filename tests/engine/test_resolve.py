"""`resolve`: the limit for a requested context."""

from __future__ import annotations

import pytest
import torch

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.model.directory import read_spec
from weft.engine.runner.options import resolve as resolving
from weft.engine.runner.options.resolve import resolve


def context(max_model_len: int | None) -> int:
    config = EngineConfig(device="cpu", max_model_len=max_model_len, num_pages=100)
    return resolve(config, read_spec(config.model_path)).max_model_len


def test_a_context_is_the_models_unless_a_shorter_one_is_requested() -> None:
    assert (context(None), context(64)) == (2048, 64)
    with pytest.raises(ConfigError, match="--max-model-len 2049 is more than the model's 2048 positions"):
        context(2049)


def test_a_context_whose_tables_do_not_fit_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def little(_: torch.device) -> int:
        return 2**20

    monkeypatch.setattr(resolving, "memory_bytes", little)
    with pytest.raises(OutOfMemory, match="lower --max-model-len"):
        context(None)
