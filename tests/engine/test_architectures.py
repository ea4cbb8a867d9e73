"""Architectures without native layers: some of each kind; `make architectures` runs all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from architecture_parity import Parity, prompts
from architectures import save_architecture

from weft.engine.wire.messages import TokenLogprobs

BY_DAY = (
    "bart", "bloom", "cohere2", "deepseek_v3", "diffllama", "gemma3n_text", "lfm2", "mamba", "mimo_v2_flash",
    "nemotron_h", "qwen3_next", "stablelm",
)  # fmt: skip
"""its own positions (bart), one request at a time (bloom), windows (cohere2), latent attention (deepseek), two calls a
layer (diffllama), shared keys and values (gemma3n), short convolutions (lfm2), a scan that goes token by token (mamba),
layers of several shapes and sinks (mimo), Mamba-2 (nemotron), delta rule (qwen3_next), partial rotation (stablelm)"""
BY_NIGHT = ("biogpt", "deepseek_v32", "falcon_h1", "gpt_neox", "inkling_text", "kimi_linear", "olmo3", "zamba", "zaya")


@pytest.mark.parametrize("kind", [*BY_DAY, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in BY_NIGHT)])
def test_its_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    Parity(save_architecture(kind, tmp_path)).chunks_and_reuse()


def entries(tokens: list[int], rows: torch.Tensor) -> list[TokenLogprobs]:
    return [TokenLogprobs(1, (t,), (float(row[t]),)) for t, row in zip(tokens, rows, strict=True)]


@pytest.fixture
def parity(tmp_path: Path) -> Parity:
    return Parity(save_architecture("llama", tmp_path))


@pytest.mark.parametrize("fault", ["token", "log-probability"])
def test_a_difference_that_is_no_tie_fails(parity: Parity, fault: str) -> None:
    (prompt,) = prompts(3, 9)
    tokens, rows = parity.alone(prompt, 4)
    if fault == "token":
        tokens[2] = int(rows[2].argsort()[-2])
    given = entries(tokens, rows if fault == "token" else rows - torch.tensor([[0], [0], [0.01], [0]]))
    with pytest.raises(AssertionError, match="token 2 of 4 is wrong"):
        parity.compare(tokens, given, prompt, 4)


def test_either_of_two_equally_likely_tokens_is_accepted_and_what_follows_is_compared(parity: Parity) -> None:
    (prompt,) = prompts(3, 9)
    tokens, _ = parity.alone(prompt, 4)
    output = parity.model.get_output_embeddings().weight
    twin = max(set(range(3, 199)) - set(tokens))
    with torch.no_grad():
        output[twin] = output[tokens[1]]
    chosen = [tokens[0], twin + tokens[1] - parity.alone(prompt, 4)[0][1]]  # whichever `generate` does not take
    rest, _ = parity.alone(np.concatenate((prompt, chosen)), 2)
    got = chosen + rest
    rows = torch.cat([parity.alone(np.concatenate((prompt, got[:i])), 1)[1] for i in range(4)])
    parity.compare(got, entries(got, rows), prompt, 4)
    assert parity.ties == 1
    with pytest.raises(AssertionError, match="token 3 of 4 is wrong"):
        parity.compare(got, entries(got, rows - torch.tensor([[0], [0], [0], [0.01]])), prompt, 4)
