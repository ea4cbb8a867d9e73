"""Recurrent models compute the same bits for a prompt in one piece, in chunks, and after a saved state of any tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import GREEDY, Harness

PROMPT = np.random.default_rng(0).integers(3, 199, 200)


def answer(harness: Harness) -> tuple[int, list[int], list[tuple[float, ...]]]:
    """Return the cached tokens of the prompt, and the answer's tokens and log-probabilities."""
    handle = harness.add(PROMPT, max_tokens=6, logprobs=3, ignore_eos=True, **GREEDY)
    harness.run()
    return harness.cached[handle], harness.tokens[handle], [entry.values for entry in harness.logprobs[handle]]


@pytest.mark.parametrize(("family", "invariant", "cached"), [("qwen3.5", False, 192), ("nemotron-h", True, 128)])
def test_bits_do_not_depend_on_chunks_hits_or_tiers(
    tiny_model: Callable[[str], Path], tmp_path: Path, family: str, invariant: bool, cached: int
) -> None:
    options: dict[str, Any] = {
        "page_size": 64, "num_pages": 300, "max_num_seqs": 4, "dtype": "bfloat16", "batch_invariant": invariant,
        "max_num_batched_tokens": 512, "host_kv_gib": 0.05, "ssd_kv_path": str(tmp_path), "ssd_kv_gib": 0.1,
    }  # fmt: skip
    chunked = Harness(tiny_model(family), **{**options, "max_num_batched_tokens": 128, "ssd_kv_path": None})
    expected = answer(chunked)
    whole = Harness(tiny_model(family), **options)
    assert answer(whole) == expected
    assert answer(whole) == (cached, *expected[1:])
    assert whole.engine.tiers is not None
    whole.engine.tiers.flush(60)
    whole.engine.scheduler.pool.evict_all()
    whole.poison_pages()
    assert answer(whole) == (cached, *expected[1:]), "from the host"
    whole.engine.close()
    restarted = Harness(tiny_model(family), **options)
    restarted.poison_pages()
    assert answer(restarted) == (cached, *expected[1:]), "from the SSD"
    restarted.engine.close()
