"""Families: the spec of a config, the content of its shards, and operations that a device does not support."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, LATENT, RECURRENT, make_tiny, save_tiny

from weft.autosearch.cost_model import Usage, operation_costs
from weft.engine.config import PRESETS, EngineConfig
from weft.engine.errors import ConfigError, ModelError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model import parts
from weft.engine.model.directory import read_spec
from weft.engine.model.implementation import choose_spec
from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights, load_weights
from weft.engine.runner.cpu import cpu_executor
from weft.engine.runner.device.launchers import launchers_for
from weft.engine.runner.options import gpu_limits
from weft.engine.runner.options.resolve import resolve
from weft.kernels.reference import layer as reference


def _weights(spec: ModelSpec, path: Path, seed: int | None = None) -> Weights:
    return load_weights(
        spec, path, device=torch.device("cpu"), dtype=torch.float32, max_positions=64, dummy_seed=seed
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "biases", "norms"),
    [("llama2", (False, False), ""), ("qwen2", (True, False), ""), ("qwen3", (False, False), "head")],
)
def test_a_config_becomes_the_parts_of_its_family(
    tiny_model: Callable[[str], Path], family: str, biases: tuple[bool, bool], norms: str
) -> None:
    spec = read_spec(tiny_model(family))
    assert (spec.qkv_bias, spec.o_bias) == biases
    assert spec.qk_norm == norms


@pytest.mark.parametrize(("used", "windows"), [(True, (None, 64, 64)), (False, (None, None, None))])
def test_a_window_counts_only_if_the_config_of_a_qwen_enables_it(
    tmp_path: Path, used: bool, windows: tuple[int | None, ...]
) -> None:
    path = save_tiny("qwen2", tmp_path)
    config = json.loads((path / "config.json").read_text())
    window = {"sliding_window": 64, "max_window_layers": 1, "layer_types": None}
    (path / "config.json").write_text(json.dumps({**config, **window, "use_sliding_window": used}))
    assert read_spec(path).windows == windows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_hold_the_whole_model_between_them(tiny_model: Callable[[str], Path], family: str, ranks: int) -> None:
    path = tiny_model(family)
    spec = read_spec(path)
    layer = next(i for i in (1, *range(spec.num_layers)) if spec.layer(i).attention)
    whole = _weights(spec, path).layers[layer]
    shards = [spec.shard(rank, ranks) for rank in range(ranks)]
    parts = [_weights(s, path).layers[layer] for s in shards]
    cut = {"o": 1, "down": 1, "gate_up": 0, "up": 0, "experts_gate_up": 1, "experts_down": 2, "shared_down": 1}
    for name, dim in cut.items():
        if name in whole:
            assert torch.equal(torch.cat([p[name].weight for p in parts], dim), whole[name].weight), name
    assert [p["o"].bias is not None for p in parts] == [whole["o"].bias is not None] + [False] * (ranks - 1)
    if spec.latent is not None:
        for name in ("latent_queries", "latent_values"):
            assert torch.equal(torch.cat([p[name].weight for p in parts]), whole[name].weight)
        for part in parts:  # every rank has the latents
            rows = spec.latent.width
            assert torch.equal(part["latent_in"].weight[-rows:], whole["latent_in"].weight[-rows:])
        return
    queries, d = spec.num_heads * spec.head_dim, spec.head_dim
    own = shards[0].num_heads * d
    assert torch.equal(torch.cat([p["qkv"].weight[:own] for p in parts]), whole["qkv"].weight[:queries])
    for rank, (shard, part) in enumerate(zip(shards, parts, strict=True)):
        # a rank has the KV heads that its query heads read
        first = rank * shard.num_heads // spec.heads_per_kv * d
        keys = part["qkv"].weight[own : own + shard.num_kv_heads * d]
        want = whole["qkv"].weight[queries + first : queries + first + shard.num_kv_heads * d]
        assert torch.equal(keys, want)
        if whole["qkv"].q_norm is not None:
            norm = whole["qkv"].q_norm
            assert torch.equal(part["qkv"].q_norm, norm if spec.qk_norm == "head" else norm.chunk(ranks)[rank])


def test_made_up_weights_are_cut_from_one_model(tiny_model: Callable[[str], Path]) -> None:
    spec = read_spec(tiny_model("llama2"))
    whole = _weights(spec, Path(), 3)
    parts = [_weights(spec.shard(rank, 2), Path(), 3) for rank in range(2)]
    assert torch.equal(torch.cat([p.layers[2]["down"].weight for p in parts], 1), whole.layers[2]["down"].weight)
    assert torch.equal(torch.cat([p.lm_head for p in parts]), whole.lm_head)


def test_a_shard_has_collectives_after_partial_sums(tiny_model: Callable[[str], Path]) -> None:
    spec = read_spec(tiny_model("llama2"))
    assert spec.shard(0, 1) is spec
    assert not any(o.role is Role.NETWORK for o in spec.layer_operations())
    operations = {o.name: o for o in spec.shard(1, 2).layer_operations()}
    assert [o.name for o in operations.values() if o.role is Role.NETWORK] == ["o_reduce", "down_reduce"]
    assert operations["gate_up"].parents == ("o_reduce",)
    assert operations["o"].parameters * 2 == {o.name: o for o in spec.layer_operations()}["o"].parameters


@pytest.mark.parametrize(
    ("change", "ranks", "word"),
    [({"num_heads": 6, "num_kv_heads": 6}, 4, "heads"), ({"intermediate_size": 33}, 2, "columns"), ({}, 3, "heads")],
)
def test_a_model_that_cannot_be_cut_is_refused(
    tiny_model: Callable[[str], Path], change: dict[str, int], ranks: int, word: str
) -> None:
    spec = replace(read_spec(tiny_model("llama2")), **change)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=word):
        spec.shard(0, ranks)
    with pytest.raises(ModelError, match="not one of"):
        spec.shard(2, 2)


def test_an_operation_missing_from_the_table_is_an_error_at_load(tiny_model: Callable[[str], Path]) -> None:
    spec = read_spec(tiny_model("llama2"))
    assert set(launchers_for(spec, cpu_executor.TABLE, "the CPU")) == {o.name for o in spec.layer_operations()}
    fewer = {name: launch for name, launch in cpu_executor.TABLE.items() if name != "all_reduce"}
    with pytest.raises(ModelError, match=r"the CPU cannot launch the operation o_reduce \(all_reduce\)"):
        launchers_for(spec.shard(0, 2), fewer, "the CPU")


def test_activations_of_a_config_are_those_of_the_references() -> None:
    assert set(parts.ACTIVATIONS) == set(reference.ACTIVATIONS)


def _agrees(path: Path, model: Any, **options: Any) -> None:
    """Greedy tokens of the engine are the argmax of the model's logits at their positions."""
    harness = Harness(path, **{"page_size": 4, "num_pages": 60, **options})
    prompts = [np.random.default_rng(n).integers(3, 199, n) for n in (9, 61)]
    for prompt in prompts:
        harness.add(prompt, max_tokens=12, **GREEDY)
    harness.run()
    for handle, prompt in enumerate(prompts):
        tokens = harness.tokens[handle]
        with torch.inference_mode():
            logits = model(torch.from_numpy(np.concatenate((prompt, tokens)))[None]).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


def test_mxfp4_experts_are_unpacked_when_they_load(tmp_path: Path) -> None:
    """Checks blocks and scales by their definition: two values a byte, the low half first, 32 values an exponent."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    model = make_tiny("gpt-oss", **sizes)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    digits = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    generator = torch.Generator().manual_seed(3)
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = state[name].shape
        codes = torch.randint(0, 16, (experts, out, inner // 32, 32), generator=generator)
        scales = torch.randint(122, 126, (experts, out, inner // 32), generator=generator)
        values = digits[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (scales[..., None] - 127)
        del state[name]
        dict(model.named_parameters())[name].data = values.flatten(2).transpose(1, 2).contiguous()
        state[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        state[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(state, tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    _agrees(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "aqlm"}}))
    with pytest.raises(ModelError, match="quantized"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("family", "here", "there"),
    [
        ("gemma3", "model.", "language_model.model."),
        ("gemma3", "model.", "model.language_model."),
        ("gpt2", "transformer.", ""),
        ("opt", "model.decoder.", "decoder."),
    ],
)
def test_names_under_another_prefix_are_found(tmp_path: Path, family: str, here: str, there: str) -> None:
    model = make_tiny(family)
    model.save_pretrained(tmp_path)
    state = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if k != "lm_head.weight"}
    save_file({k.replace(here, there, 1): v for k, v in state.items()}, tmp_path / "model.safetensors")
    if family == "gemma3":  # a model for text and images
        config = json.loads((tmp_path / "config.json").read_text())
        whole = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": 1, "text_config": config}
        (tmp_path / "config.json").write_text(json.dumps(whole))
    _agrees(tmp_path, model)


@pytest.mark.parametrize(("limit", "kind"), [(32, "short_factor"), (128, "long_factor")])
def test_longrope_is_pinned_by_the_context_limit(tmp_path: Path, limit: int, kind: str) -> None:
    """`transformers` chooses by the longest position in a batch; here the engine's limit chooses for all."""
    model = make_tiny("phi4")
    rope = {**model.config.rope_parameters, "original_max_position_embeddings": 40, "factor": 3.2}
    model.config.rope_parameters = rope
    model.config.original_max_position_embeddings = 40
    model.save_pretrained(tmp_path)
    ((inv, scale),) = read_spec(tmp_path).rotary(limit)
    plain = 1.0 / 1e4 ** (torch.arange(0, 12, 2).float() / 12)
    assert torch.allclose(inv, plain / torch.tensor(rope[kind]))
    assert scale == pytest.approx((1 + math.log(3.2) / math.log(40)) ** 0.5)


def test_the_gpu_names_the_part_that_it_does_not_support(tiny_model: Callable[[str], Path]) -> None:
    spec = read_spec(tiny_model("qwen2-moe"))
    for lacks, word in (
        (replace(spec, placement=parts.Placement.POST), "experts with norms placed post"),
        (replace(spec, norm=replace(spec.norm, centred=True)), "experts with LayerNorm"),
        (replace(spec, activation="gelu"), "activation gelu of experts"),
        (replace(spec, activation="swiglu_oai"), "activation swiglu_oai outside experts"),
    ):
        with pytest.raises(ConfigError, match=f"the GPU kernels do not support {word}"):
            gpu_limits.check_kernels(lacks)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_no_part_that_a_gpu_does_not_support(tiny_model: Callable[[str], Path], family: str) -> None:
    if family in (*RECURRENT, *LATENT):
        lacking = "recurrent states" if family in RECURRENT else "latent attention"
        with pytest.raises(ConfigError, match=f"do not support {lacking} yet; use --device cpu"):
            gpu_limits.check_kernels(read_spec(tiny_model(family)))
        return
    gpu_limits.check_kernels(read_spec(tiny_model(family)))


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_skewed_routers_send_most_tokens_to_few_experts(tiny_model: Callable[[str], Path], family: str) -> None:
    spec = read_spec(tiny_model(family))
    made = [
        load_weights(
            spec,
            Path(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_positions=64,
            dummy_seed=0,
            dummy_skew=skew,
        ).layers[0]["router"]
        for skew in (0.0, 5.0)
    ]
    assert torch.equal(made[0].weight, made[1].weight)
    before = torch.zeros(4) if made[0].bias is None else made[0].bias
    assert made[1].bias is not None
    assert (made[1].bias - before).tolist() == pytest.approx([5.0, 0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="dummy_skew needs load_format dummy"):
        EngineConfig(model=str(tiny_model(family)), dummy_skew=2.0)


def test_costs_count_the_experts_of_a_token(tiny_model: Callable[[str], Path]) -> None:
    spec = read_spec(tiny_model("qwen2-moe"))
    idle = 2 * 4 * (3 * 64 * 40)  # two of three layers, four of six experts
    assert spec.num_parameters - spec.active_parameters == idle
    assert [o.name for o in spec.layer_operations(1)][-2:] == ["gate_up", "down"]
    experts = {o.name: o for o in spec.layer_operations(0) if o.role is Role.EXPERTS}
    assert set(experts) == {"experts_gate_up", "experts_down"}
    assert experts["experts_down"].flops == 2 * 2 * 64 * 40
    rows = {c.name for c in operation_costs(spec, Usage(64, 10, 10))}
    assert {"router", "experts_gate_up", "experts_down", "shared_down", "down"} <= rows


def test_a_gpu_without_kernels_for_latents_leaves_them_to_transformers(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny_model("deepseek-v2")))
    assert choose_spec(config)[1] == "weft's own layers"
    monkeypatch.setattr("weft.kernels.common.gpu.gpu", lambda: object())
    spec, why = choose_spec(config)
    assert not spec.native
    assert "weft's layers of latent attention run on a CPU only so far" in why
    assert choose_spec(config.model_copy(update={"device": "cpu"}))[0].native
    assert choose_spec(config.model_copy(update={"model_impl": "native"}))[0].native
    with pytest.raises(ConfigError, match="latents are kept in 16 or 32 bits"):
        resolve(config.model_copy(update={"device": "cpu", "kv_cache_dtype": "fp8"}), read_spec(config.model_path))


def test_a_page_of_latents_is_small() -> None:
    """DeepSeek-V2-Lite keeps 576 numbers a token and layer, its 16 heads' keys and values would be 5,120."""
    layout = KvLayout.of(read_spec(PRESETS / "deepseek-v2-lite"), 16, torch.bfloat16)
    assert layout.token_bytes == 27 * 576 * 2
    assert layout.planes == 1
