"""Models of known shapes against `transformers` on the GPU in bf16, including models with experts: logits and
tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _make_confident(model: torch.nn.Module) -> None:
    """Make the last token favour its successor: random layers still disturb it, but the best token stands out, as in
    trained models. With random output rows, the two best of 128,256 logits are closer than bf16 resolves at one
    position in twenty."""
    embedding, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    embedding.normal_()
    head[torch.randperm(head.shape[0], device=head.device)] += 0.0125 * embedding


LLAMA = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {**LLAMA, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16}


@pytest.fixture(
    scope="module", params=["Llama random", "Llama confident", "Qwen2 confident", "Qwen3 confident"], ids=str
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, kind = request.param.split()
    sizes = LLAMA if family == "Llama" else QWEN
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.1)
        elif family != "Llama" and "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    if kind == "confident":
        _make_confident(model)
    path = tmp_path_factory.mktemp(kind)
    model.save_pretrained(path)
    return path


def test_logits_and_tokens_agree_on_64_prompts(checkpoint: Path) -> None:
    rng, config = np.random.default_rng(0), transformers.AutoConfig.from_pretrained(checkpoint)
    vocabulary = config.vocab_size
    prompts = [rng.integers(0, vocabulary, int(n)).astype(np.int32) for n in rng.integers(16, 512, 64)]
    harness = Harness(
        checkpoint, device="cuda", dtype="bfloat16", max_num_seqs=64, max_num_batched_tokens=2048, num_pages=1000
    )
    runner, last = harness.engine.runner, []
    handles = []
    for prompt in prompts:  # one at a time, so that the rows of the logits are this prompt's
        handles.append(harness.add(prompt, max_tokens=1, prompt_logprobs=1, **GREEDY))
        harness.run()
        last.append(runner._executor.logits[0].clone())
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).cuda()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    worst, agree, total = np.zeros(3), np.zeros(3), 0
    for handle, prompt, ours in zip(handles, prompts, last, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64)).cuda()[None]
        with torch.inference_mode():
            exact, theirs = (model(ids).logits[0].float() for model in models)
        # column 0 is the prompt's own token, column 1 the best
        mine = [int(column.ids[1]) for column in harness.prompt_logprobs[handle]] + [int(harness.tokens[handle][0])]
        best = [np.array(mine), theirs.argmax(-1).cpu().numpy(), exact.argmax(-1).cpu().numpy()]
        pairs = ((ours, exact[-1], 0, 2), (theirs[-1], exact[-1], 1, 2), (ours, theirs[-1], 0, 1))
        for i, (a, b, left, right) in enumerate(pairs):
            worst[i] = max(worst[i], float((a - b).norm() / b.norm()))
            agree[i] += (best[left] == best[right]).sum()
        total += len(mine)
    for name, difference, share in zip(
        ("weft bf16 and float32", "transformers bf16 and float32", "weft and transformers, both bf16"),
        worst, agree / total, strict=True,
    ):  # fmt: skip
        print(
            f"{name}: worst relative difference of logits {difference:.2e}, the same argmax at {share:.2%} of {total}"
        )
    assert worst[0] < 2e-2
    # random weights have near ties everywhere: bf16 itself, in either program, changes some of them
    assert agree[0] >= agree[1] - 0.005 * total
    if checkpoint.name.startswith("confident"):
        assert agree[2] >= 0.995 * total


SMALL = {
    "vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 64,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
OF_EXPERTS = {
    "Mixtral": {"intermediate_size": 1792, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen3Moe": {
        "intermediate_size": 2048, "moe_intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "head_dim": 128, "num_attention_heads": 8,
    },
    "Qwen2Moe": {
        "intermediate_size": 2048, "moe_intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 768, "mlp_only_layers": [1],
    },
    "GptOss": {
        "intermediate_size": 1024, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("family", OF_EXPERTS)
def test_logits_of_models_with_experts_agree(family: str, tmp_path: Path) -> None:
    """Compares the median of 48 prompts: if two experts are near a tie, rounding chooses, in any program."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = getattr(transformers, f"{family}Config")(**{**SMALL, **OF_EXPERTS[family]})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.normal_(0, 0.3 if "bias" in name or "sinks" in name else 0.03)
    _make_confident(model)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 32000, int(n)).astype(np.int32) for n in rng.integers(16, 400, 48)]
    options = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 512}
    harness = Harness(tmp_path, **options, num_pages=600, prefix_caching=False)
    runner, ours = harness.engine.runner, []
    for prompt in prompts:  # one at a time, so that the rows of the logits are this prompt's
        harness.add(prompt, max_tokens=1, **GREEDY)
        harness.run()
        ours.append(runner._executor.logits[0].clone())
    alone = [harness.tokens[handle] for handle in range(len(prompts))]
    together = [harness.add(prompt, max_tokens=1, **GREEDY) for prompt in prompts]
    harness.run()
    apart = []
    for dtype in (torch.float32, torch.bfloat16):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).cuda()
        with torch.inference_mode():
            ids = (torch.from_numpy(prompt.astype(np.int64)).cuda()[None] for prompt in prompts)
            apart.append([theirs(each).logits[0, -1].float() for each in ids])
    exact, rounded = apart
    own, other = (
        [float((a - b).norm() / b.norm()) for a, b in zip(logits, exact, strict=True)] for logits in (ours, rounded)
    )
    agree = np.mean([int(a.argmax()) == int(b.argmax()) for a, b in zip(ours, exact, strict=True)])
    print(
        f"{family}: relative difference of logits from float32, median and worst: weft {np.median(own):.2e} "
        f"{max(own):.2e}, transformers {np.median(other):.2e} {max(other):.2e}; the same argmax at {agree:.1%}"
    )
    assert np.median(own) < max(2e-2, np.median(other))
    assert max(own) < max(4e-2, 1.5 * max(other))
    assert np.mean([harness.tokens[h] == tokens for h, tokens in zip(together, alone, strict=True)]) > 0.9


SIZES = OF_EXPERTS | {"Qwen3": {"intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 8}}
"""and a dense model with norms of heads"""


@pytest.mark.parametrize(
    ("family", "formats"),
    [
        ("Mixtral", {}), ("Qwen3Moe", {}), ("Qwen3", {}), ("Qwen3", {"quantization": "fp8"}),
        ("Qwen3", {"quantization": "fp8", "kv_cache_dtype": "fp8"}), ("Qwen3Moe", {"quantization": "fp8"}),
        ("Mixtral", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ],
    ids=str,
)  # fmt: skip
def test_models_are_batch_invariant(family: str, formats: dict[str, str], tmp_path: Path) -> None:
    """The same tokens and log-probabilities, to the bit, alone and in a batch, in graphs of other sizes."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = getattr(transformers, f"{family}Config")(**{**SMALL, **SIZES[family]})
        getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 32000, int(n)).astype(np.int32) for n in rng.integers(5, 300, 24)]
    options = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 32, "max_num_batched_tokens": 512}
    harness = Harness(tmp_path, **options, num_pages=600, prefix_caching=False, batch_invariant=True, **formats)
    requested = {"max_tokens": 12, "logprobs": 2, "ignore_eos": True, **GREEDY}
    alone = []
    for prompt in prompts[:6]:
        alone.append(harness.add(prompt, **requested))
        harness.run()
    together = [harness.add(prompt, **requested) for prompt in prompts]
    harness.run()
    for a, b in zip(alone, together[:6], strict=True):
        assert harness.tokens[a] == harness.tokens[b]
        for one, other in zip(harness.logprobs[a], harness.logprobs[b], strict=True):
            assert np.array_equal(one.values, other.values)
