"""Recurrent states and latents of models that `transformers`' code computes, and models it computes one by one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architecture_parity import OPTIONS, prompts
from architectures import CLASSES, save_architecture, tiny_config
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, Qwen3_5ForConditionalGeneration
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from weft.engine.errors import ConfigError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.transformers_impl.reading import quiet, spec_of, torch_functions
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.runner.device.transformers_states import pieces_of
from weft.engine.runner.iteration.batch import Batch, StateRows
from weft.engine.runner.options.transformers_shapes import refuse_on_gpu


def _spec(kind: str, **changes: Any) -> TransformersSpec:
    with quiet():
        return spec_of(tiny_config(kind), CLASSES[kind], trusted=False, **changes)


def test_the_dry_run_finds_layers_that_keep_a_state() -> None:
    spec = _spec("qwen3_next")
    assert [mixer.path for mixer in spec.mixers] == ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
    (state, _) = spec.states
    assert state is not None
    assert [(t.name, t.shape, t.dtype) for t in state.tensors] == [
        ("conv conv0", (128, 4), spec.dtype), ("kept recurrent0", (4, 16, 16), "float32"),
    ]  # fmt: skip
    assert len(spec.kv_heads) == 2


@pytest.mark.parametrize(("kind", "stepwise"), [("mamba", True), ("mamba2", False), ("lfm2", False)])
def test_a_scan_that_ignores_an_earlier_state_is_recognised(kind: str, stepwise: bool) -> None:
    assert {mixer.stepwise for mixer in _spec(kind).mixers} == {stepwise}


def test_a_state_outside_of_the_cache_is_refused() -> None:
    with pytest.raises(Exception, match="keep their state outside of the cache"):
        _spec("recurrent_gemma")


def test_a_model_that_cannot_be_packed_runs_alone() -> None:
    spec = _spec("bloom")
    assert "attention interface" in spec.single
    assert [call.row for call in spec.calls] == [((4, 16), (4, 16))] * 4


def test_latents_take_an_eighth_of_expanded_pages() -> None:
    config = DeepseekV2Config(  # the shape of DeepSeek-V2-Lite, with fewer layers and experts
        hidden_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512,
        q_lora_rank=None, moe_intermediate_size=1408, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=4, num_experts_per_tok=2, vocab_size=199, n_group=1, topk_group=1,
    )  # fmt: skip
    with quiet():
        spec = spec_of(config, "DeepseekV2ForCausalLM", trusted=False)
    latent, expanded = (KvLayout.of(s, 64, torch.bfloat16).token_bytes for s in (spec, spec.expanded()))
    assert latent == 2 * 2 * (512 + 64)
    assert latent * 8 <= expanded


@pytest.mark.parametrize("kind", ["qwen3_next", "bloom"])
def test_states_and_single_requests_are_refused_on_a_gpu(kind: str) -> None:
    with pytest.raises(ConfigError, match="not supported on a GPU yet; use --device cpu"):
        refuse_on_gpu(_spec(kind), [], "auto")


def test_a_chunk_is_cut_at_its_checkpoints() -> None:
    none = np.zeros((3, 1), np.int32)
    states = StateRows(
        none, np.array([False, False, True]), none, np.array([1, 2, 2], np.int32), np.array([4, 4, 8], np.int32),
        np.zeros((3, 1), np.int32),
    )  # fmt: skip
    lengths = np.array([1, 6, 8], np.int32)
    batch = Batch(
        step=1, num_decodes=1, slots=none[:, 0], epochs=none[:, 0], query_len=lengths,
        kv_len=np.array([9, 10, 8], np.int32), token_ids=none[:, 0], positions=none[:, 0], slot_mapping=none[:, 0],
        page_table=none, sampled_rows=none[:, 0], sampling=None, count_resets=(), prompt_logprobs=(), states=states,
    )  # type: ignore[arg-type]  # fmt: skip
    assert [tuple(piece) for piece in pieces_of(batch)] == [
        (0, 0, 1, False, -1), (1, 1, 5, False, 0), (1, 5, 7, False, -1), (2, 7, 11, True, 1), (2, 11, 15, False, 2),
    ]  # fmt: skip


def test_a_request_that_starts_from_a_state_gives_the_tokens_of_a_cold_one(tmp_path: Path) -> None:
    path = save_architecture("qwen3_next", tmp_path)
    first, tail, other = prompts(3, 41, 6, 23)
    longer = np.concatenate((first, tail))
    tokens = []
    for warm in (True, False):
        harness = Harness(path, **OPTIONS, max_num_batched_tokens=64)
        harness.poison_pages()
        if warm:
            harness.add(first, max_tokens=3, **GREEDY)
            harness.run()
        handles = [harness.add(prompt, max_tokens=8, **GREEDY) for prompt in (longer, other)]
        harness.run()
        assert (harness.cached[handles[0]] == 40) is warm
        tokens.append([harness.tokens[handle] for handle in handles])
    assert tokens[0] == tokens[1]


def test_the_text_part_of_a_checkpoint_with_images_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    config = tiny_config("qwen3_5")
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    with quiet():
        Qwen3_5ForConditionalGeneration(config).float().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(64, 128)}, file, {"format": "pt"})
    for impl, refused in (("transformers", 1), ("auto", 0)):  # weft's own layers take the images
        harness = Harness(tmp_path, **{**OPTIONS, "model_impl": impl})
        harness.add([5, 6, 7], max_tokens=2, **GREEDY)
        harness.run()
        lines = capsys.readouterr().err.splitlines()
        assert len([line for line in lines if "requests with images or audio are refused" in line]) == refused
        assert not [line for line in lines if "not used" in line]


def test_installed_gpu_kernels_do_not_take_over_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "causal_conv1d.py").write_text("def causal_conv1d_fn(): raise RuntimeError('a GPU kernel')\n")
    monkeypatch.syspath_prepend(tmp_path)
    decorate = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
    try:
        for _ in range(2):  # the library may have been imported before
            with torch_functions():
                assert decorate(lambda: "torch")() == "torch"
            with pytest.raises(RuntimeError, match="a GPU kernel"):
                decorate(lambda: "torch")()
    finally:
        sys.modules.pop("causal_conv1d", None)
