"""Engines on a GPU over random checkpoints of each dense family, against `transformers`; a few families interpreted.

On a GPU: logits in bfloat16 compared with float32, and what graphs generate. Windows end within the prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tiny import FAMILIES, LATENT, make_tiny

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")
from interpreted_engine import check_interpreted  # noqa: E402

HERE = torch.cuda.is_available()
DENSE = [name for name in FAMILIES if "moe" not in name and name not in ("mixtral", "gpt-oss", *LATENT)]

WIDE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "initializer_range": 0.03,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama2": {"num_key_value_heads": 8},
    "mistral": {"head_dim": 128},
    "qwen3": {"head_dim": 128},
    "gemma": {"initializer_range": 0.02, "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 256},
    "gemma3": {
        "initializer_range": 0.02,
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 16384,
    },
    "phi": {"num_key_value_heads": 8, "hidden_size": 640},
    "phi3": {"hidden_size": 768, "num_key_value_heads": 8},
    "phi4": {"hidden_size": 768, "num_key_value_heads": 8},
    "olmo2": {"num_key_value_heads": 8},
    "glm4-9b": {"head_dim": 128},
    "glm4": {"head_dim": 128},
    "opt": {"ffn_dim": 1408, "word_embed_proj_dim": 512, "init_std": 0.03},
    "gpt2": {"n_embd": 512, "n_head": 8},
}
"""differences from WIDE: head sizes as the family's models have them"""
FROM_HIDDEN = ("phi", "phi3", "phi4", "olmo2", "granite", "smollm3", "starcoder2", "opt", "gpt2", "llama2")
"""families without a `head_dim` of their own"""


def _checkpoint(family: str, path: Path) -> Path:
    sizes = {**WIDE, **SHAPES.get(family, {})}
    if family in FROM_HIDDEN:
        del sizes["head_dim"]
    if family in ("opt", "gpt2"):
        sizes.pop("num_key_value_heads")
        sizes = {k: v for k, v in sizes.items() if family == "opt" or k.startswith("n_")}
        sizes.pop("intermediate_size", None)
    if family == "phi4":
        dims = sizes["hidden_size"] // sizes["num_attention_heads"] * 3 // 4 // 2
        rope = FAMILIES["phi4"][1]["rope_parameters"]
        sizes["rope_parameters"] = {**rope, "short_factor": [1.0] * dims, "long_factor": [2.0] * dims}
    make_tiny(family, **sizes).to(torch.bfloat16).save_pretrained(path)
    return path


def _prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(3, 199, n) for n in (5, 37, 130)]


def _oracle(path: Path) -> Any:
    """Eager: torch's fused attention has no soft-cap, and some versions of transformers omit it silently."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.cuda()


def _exact(model: Any, prompt: np.ndarray, answer: list[int]) -> torch.Tensor:
    """`[answer, V]` float32: the oracle's logits after the prompt and after each token of the answer but the last."""
    with torch.inference_mode():
        ids = torch.from_numpy(np.concatenate((prompt, answer))).cuda()[None]
        return model(ids).logits[0, len(prompt) - 1 : -1].float()


def _as_good_as_the_best(exact: torch.Tensor, answer: list[int]) -> int:
    """How many tokens are. Rounding decides between two that are equally good."""
    chosen = exact.gather(1, torch.tensor(answer, device=exact.device)[:, None])[:, 0]
    return int((exact.max(-1).values - chosen <= 4e-2 * exact.std(-1)).sum())


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
@pytest.mark.parametrize("family", DENSE)
def test_logits_of_each_family_are_near_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = _checkpoint(family, tmp_path)
    harness = Harness(
        path, device="cuda", dtype="bfloat16", page_size=16, max_num_seqs=8, max_num_batched_tokens=32, num_pages=80,
        tuning_seconds=0, prefix_caching=False,
    )  # fmt: skip
    harness.poison_pages()
    prompts = _prompts()
    handles, rows = [], []
    for prompt in prompts:  # one at a time, so that the first row of the logits is this prompt's
        handles.append(harness.add(prompt, max_tokens=1, **GREEDY))
        harness.run()
        rows.append(harness.engine.runner._executor.logits[0].clone())
    more = [harness.add(prompt, max_tokens=24, ignore_eos=True, **GREEDY) for prompt in prompts]
    harness.run()  # together: chunks with decodes, and contexts that outgrow windows while they decode
    model = _oracle(path)
    worst, good, total = 0.0, 0, 0
    for prompt, mine, first, handle in zip(prompts, rows, handles, more, strict=True):
        answer = harness.tokens[handle]
        exact = _exact(model, prompt, answer)
        worst = max(worst, float((mine - exact[0]).norm() / exact[0].norm()))
        good, total = good + _as_good_as_the_best(exact, answer), total + len(answer)
        assert harness.tokens[first][0] == int(mine.argmax())
    print(f"{family}: worst relative difference of logits {worst:.2e}, {good} of {total} tokens as good as the best")
    assert worst < 2e-2
    assert good >= 0.97 * total


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
@pytest.mark.parametrize(("family", "pages"), [("mistral", 16), ("gemma3", 60)])
def test_windows_that_end_within_their_contexts(family: str, pages: int, tiny_model: Callable[[str], Path]) -> None:
    """Windows of 24. Where all layers have one, pages are given back and used: the pool could not hold the contexts."""
    harness = Harness(
        tiny_model(family), device="cuda", dtype="float16", page_size=16, max_num_seqs=4, max_num_batched_tokens=32,
        tuning_seconds=0, prefix_caching=False, num_pages=pages,
    )  # fmt: skip
    harness.poison_pages()
    handles = [harness.add(p, max_tokens=40, ignore_eos=True, **GREEDY) for p in _prompts()]
    harness.run()
    model = _oracle(tiny_model(family))
    for prompt, handle in zip(_prompts(), handles, strict=True):
        assert _as_good_as_the_best(_exact(model, prompt, harness.tokens[handle]), harness.tokens[handle]) == 40
    if family == "mistral":
        assert harness.engine.spec.kv_window == 24
        assert pages * harness.engine.config.page_size < sum(len(p) + 40 for p in _prompts())


@pytest.mark.skipif(HERE, reason="a GPU runs all of them")
@pytest.mark.parametrize(
    "family",
    ["opt", "gpt-oss", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma3", "olmo2", "glm4-moe"))],
)
def test_an_interpreted_engine_gives_transformers_tokens(
    family: str, device: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms in every position, activations, learned positions, biases, windows that end, experts: a whole iteration."""
    assert device == "cpu"
    check_interpreted(tiny_model(family), _prompts()[:2], monkeypatch, 0.03, model_options={})
