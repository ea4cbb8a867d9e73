"""A whole engine with interpreted kernels, compared with `transformers` in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness import GREEDY, Harness
from interpreted import interpreted_gpu


def check_interpreted(
    path: Path, prompts: list[np.ndarray], monkeypatch: pytest.MonkeyPatch, within: float, *,
    model_options: dict[str, Any], **options: Any,
) -> None:  # fmt: skip
    """The two tokens of each prompt are the likeliest, and their log-probabilities are `within` of the exact ones."""
    with interpreted_gpu(monkeypatch):
        harness = Harness(
            path, **{
                "device": "cuda", "page_size": 16, "num_pages": 12, "max_num_seqs": 2, "max_num_batched_tokens": 32,
                "dtype": "float16", "prefix_caching": False, **options,
            },
        )  # fmt: skip
        harness.poison_pages()
        handles = [harness.add(p, max_tokens=2, ignore_eos=True, logprobs=1, **GREEDY) for p in prompts]
        harness.run()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **model_options)
    for prompt, handle in zip(prompts, handles, strict=True):
        answer = harness.tokens[handle]
        with torch.inference_mode():
            ids = torch.from_numpy(np.concatenate((prompt, answer)))[None]
            exact = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert exact.argmax(-1).tolist() == answer
        for row, entry in zip(exact, harness.logprobs[handle], strict=True):
            assert float(entry.values[0]) == pytest.approx(float(row[int(entry.ids[0])]), abs=within)
