"""Architectures without native layers: some of each kind; `make architectures` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest
from architecture_parity import Parity
from architectures import save_architecture

BY_DAY = ("bart", "cohere2", "deepseek_v3", "diffllama", "gemma3n_text", "mimo_v2_flash", "stablelm")
"""its own positions (bart), windows (cohere2), latent attention (deepseek), two calls a layer (diffllama), shared keys
and values (gemma3n), layers of several shapes and sinks (mimo), partial rotation (stablelm)"""
BY_NIGHT = ("biogpt", "gpt_neox", "olmo3")


@pytest.mark.parametrize("kind", [*BY_DAY, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in BY_NIGHT)])
def test_its_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    Parity(save_architecture(kind, tmp_path)).chunks_and_reuse()
