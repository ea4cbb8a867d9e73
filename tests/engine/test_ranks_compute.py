"""Computation on several ranks gives the tokens of one rank, for every family. Ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Harness
from threads import of_threads
from tiny import FAMILIES, save_tiny

from weft.engine.errors import ModelError
from weft.engine.model.checkpoint import WHOLE, Checkpoint, Part
from weft.engine.model.directory import read_spec
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import load_weights

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 120, n) for n in (3, 17, 40)]
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.3, "logit_bias": {5: 2.0, 100: 3.0}},
    {"temperature": 0.0, "logprobs": 1, "logprob_token_ids": (9, 150, 9)},
    {"temperature": 1.0, "seed": 1, "top_k": 5, "frequency_penalty": 0.5},
    {"temperature": 1.2, "seed": 2, "top_p": 0.8, "min_p": 0.05, "allowed_token_ids": tuple(range(10, 90))},
    {"temperature": 0.9, "seed": 3, "prompt_logprobs": 2},
)
OPTIONS = {"max_num_batched_tokens": 32, "cpu_threads": 1, "num_pages": 64, "page_size": 16}
"""chunks of prompts and decodes share iterations"""
EIGHT: dict[str, tuple[str, dict[str, int]]] = {
    "eight KV heads": ("llama2", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "two KV heads": ("llama2", {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8}),
    "four KV heads": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "experts": ("qwen3-moe", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "shared expert": ("qwen2-moe", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "sinks": ("gpt-oss", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "norms after GEMMs": ("gemma2", {"num_attention_heads": 8}),
    "norm over all heads": ("olmo2", {"num_attention_heads": 8}),
    "latent attention": ("deepseek-v3", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "states": ("qwen3.5", {"num_attention_heads": 8, "linear_num_key_heads": 8, "linear_num_value_heads": 16}),
}
"""Tiny models whose heads eight ranks can share, by what is special about them: family and sizes."""
BY_DAY = ("experts",)


def served(path: Path, ranks: int, **options: object) -> Harness:
    harness = of_threads(path, ranks, **{**OPTIONS, **options})
    for i, requested in enumerate(PARAMS):
        harness.add(PROMPTS[i % len(PROMPTS)], max_tokens=6, **requested)
    for pooling in ("last", "mean"):
        harness.add(PROMPTS[2], max_tokens=0, pooling=pooling)
    harness.run()
    harness.engine.close()
    return harness


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_one_rank(tiny_model: Callable[[str], Path], family: str) -> None:
    path = tiny_model(family)
    one = served(path, 1)
    for ranks in (2, 4) if family in ("llama2", "gpt-oss", "olmo2") else (2,):
        several = served(path, ranks)
        assert several.tokens == one.tokens
        assert len(one.pooled) == 2
        for handle, state in one.pooled.items():
            np.testing.assert_allclose(several.pooled[handle], state, atol=1e-4)
        for mine, others in ((several.logprobs, one.logprobs), (several.prompt_logprobs, one.prompt_logprobs)):
            for handle, entries in others.items():
                assert [(e.rank, e.ids) for e in mine[handle]] == [(e.rank, e.ids) for e in entries]
                values, want = ([v for e in found for v in e.values] for found in (mine[handle], entries))
                # sums are split into as many parts as there are ranks: the last bits differ
                np.testing.assert_allclose(values, want, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_four_ranks_give_the_tokens_of_one_or_report_what_cannot_be_cut(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    """Covers a vocabulary that four does not divide, and fewer KV heads than ranks."""
    path = tiny_model(family)
    spec = read_spec(path)
    assert spec.vocab_size % 4
    if spec.num_heads % 4 or (spec.num_kv_heads % 4 and 4 % spec.num_kv_heads):
        with pytest.raises(ModelError, match="cannot be split over 4 ranks"):
            spec.shard(3, 4)
        return
    assert served(path, 4).tokens == served(path, 1).tokens


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in BY_DAY else pytest.mark.nightly) for n in EIGHT])
def test_eight_ranks_give_the_tokens_of_one(tmp_path: Path, name: str) -> None:
    """Covers eight KV heads, fewer KV heads than ranks, experts, and a vocabulary that eight does not divide."""
    family, sizes = EIGHT[name]
    path = save_tiny(family, tmp_path, **sizes)
    assert read_spec(path).vocab_size % 8
    one, eight = served(path, 1), served(path, 8)
    assert eight.tokens == one.tokens
    for handle, entries in one.logprobs.items():
        assert [e.ids for e in eight.logprobs[handle]] == [e.ids for e in entries]


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"num_attention_heads": 12}, "12 attention heads"),
        ({"num_attention_heads": 24, "num_key_value_heads": 3, "head_dim": 8}, "3 KV heads"),
        ({"num_attention_heads": 8, "intermediate_size": 108}, "108"),
    ],
)
def test_what_eight_does_not_divide_is_named(tmp_path: Path, sizes: dict[str, int], what: str) -> None:
    spec = read_spec(save_tiny("mistral", tmp_path, **sizes))
    with pytest.raises(ModelError, match=f"{what}.*over 8 ranks"):
        spec.shard(7, 8)


def test_batch_invariance_holds_on_ranks(tiny_model: Callable[[str], Path]) -> None:
    path, options = tiny_model("llama2"), {"batch_invariant": True, "max_num_batched_tokens": 128}
    both = served(path, 2, **options)
    alone = of_threads(path, 2, **{**OPTIONS, **options})
    alone.add(PROMPTS[1], max_tokens=6, **PARAMS[1])
    alone.run()
    alone.engine.close()
    assert alone.logprobs[0] == both.logprobs[1]


@pytest.mark.parametrize("family", ["llama2", "phi3", "qwen2-moe", "gpt-oss", "gpt2", "granite-moe", "olmo2"])
def test_a_rank_reads_only_its_own_bytes(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    path, ranks = tiny_model(family), 2
    spec = read_spec(path)
    there = Checkpoint.__call__
    read: list[tuple[str, int, bool]] = []

    def count(self: Checkpoint, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> torch.Tensor:
        found = there(self, name, shape, part)
        read.append((name, int(np.prod(shape)), part.of > 1))
        return found

    monkeypatch.setattr(Checkpoint, "__call__", count)
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}
    load_weights(spec, path, **options)
    whole = {name: size for name, size, _ in read}
    mine: dict[str, int] = {}
    shared = set(whole)
    for rank in range(ranks):
        read.clear()
        load_weights(spec.shard(rank, ranks), path, **options)
        for name, size, cut in read:
            mine[name] = mine.get(name, 0) + size
            shared -= {name} if cut else set()
    # Every rank has norms, routers, tensors that are added once, and a KV head that all share. No other number is read
    # by two ranks, nor twice by one.
    assert {name for name in whole.keys() - shared if mine[name] != whole[name]} <= replicated(spec, whole)
    keys = {name for name in shared if "k_proj" in name or "v_proj" in name}
    assert bool(keys) <= (spec.num_kv_heads < ranks)
    assert sum(whole[name] for name in shared - keys) < 0.1 * sum(whole.values())


def replicated(spec: ModelSpec, names: dict[str, int]) -> set[str]:
    """Tensors that hold a KV head that ranks share, in addition to their own shards."""
    return {name for name in names if "qkv" in name and spec.num_kv_heads == 1}
