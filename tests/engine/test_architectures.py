"""Ten architectures that weft has no layers for, on the broad path; `make architectures` runs all there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from architecture_parity import Parity
from architectures import save_architecture

TEN = (
    "bart", "biogpt", "cohere2", "deepseek_v3", "diffllama", "gemma3n_text", "gpt_neox", "mimo_v2_flash", "olmo3",
    "stablelm",
)  # fmt: skip
"""positions of their own (bart), latent attention (deepseek), two calls a layer (diffllama), layers of several shapes
and sinks (mimo), shared keys and values (gemma3n), windows (cohere2, olmo3), partial rotation (gpt_neox, stablelm)"""


@pytest.mark.parametrize("kind", TEN)
def test_its_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    Parity(save_architecture(kind, tmp_path)).chunks_and_reuse()
