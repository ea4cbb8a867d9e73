"""FP8 weights of experts: read, made and written for every family, compared with models of their dequantised values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp8_files import INPUT_SCALE, unrounded, write_fp8
from harness import GREEDY, Harness
from refusal import Refusal
from safetensors.torch import load_file, save_file
from tiny import make_tiny, reference_tokens, save_tiny
from transformers import AutoModelForCausalLM, DynamicCache

from weft.engine.config import EngineConfig
from weft.engine.errors import ModelError
from weft.engine.model.directory import read_spec
from weft.engine.model.implementation import choose_spec
from weft.engine.model.quantize import by_layer, quantize
from weft.engine.model.weights import Weights, load_weights
from weft.kernels.formats import fp8
from weft.kernels.formats.fp8_matrix import Fp8Matrix
from weft.kernels.reference import experts as experts_reference
from weft.tools.kernels.fp8_operands import row_values

__all__ = ["unrounded"]
Made = Callable[[str], Path]
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}
PROMPT = np.random.default_rng(5).integers(3, 199, 24)
WIDE = {"hidden_size": 160, "moe_intermediate_size": 144, "num_hidden_layers": 2}
"""matrices of several blocks, the last of them not full"""


def greedy(path: Path, tokens: int = 8, **options: Any) -> list[int]:
    harness = Harness(path, page_size=8, num_pages=16, **options)
    handle = harness.add(PROMPT, max_tokens=tokens, ignore_eos=True, **GREEDY)
    harness.run()
    return harness.tokens[handle]


def scores(path: Path, **options: Any) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens but the first, from the engine."""
    harness = Harness(path, page_size=8, num_pages=16, **options)
    handle = harness.add(PROMPT, max_tokens=0, prompt_logprobs=1)
    harness.run()
    return torch.tensor([entry.values[0] for entry in harness.prompt_logprobs[handle]])


def reference(model: Any, **options: Any) -> torch.Tensor:
    """The same by `transformers`."""
    ids = torch.from_numpy(PROMPT.astype(np.int64))
    with torch.inference_mode():
        return model(ids[None], **options).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


def loaded(path: Path, **options: Any) -> Weights:
    spec, _ = choose_spec(EngineConfig(model=str(path), **options))
    return load_weights(spec, path, **CPU)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


def values(matrix: Fp8Matrix | None) -> torch.Tensor:
    """The values of all experts' matrices."""
    assert matrix is not None
    return torch.stack([fp8.weight_values(matrix[i].weight) for i in range(len(matrix))])


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("mixtral", "modelopt"),
        pytest.param("mixtral", "compressed-tensors, tensor, static", marks=pytest.mark.nightly),
        ("qwen2-moe", "fbgemm_fp8"),
        ("qwen3-moe", "fp8, block"),
        ("glm4-moe", "compressed-tensors, channel, dynamic"),
        ("granite-moe", "compressed-tensors, channel, dynamic"),
        pytest.param("granite-moe", "compressed-tensors, block", marks=pytest.mark.nightly),
    ],
)
def test_greedy_tokens_are_those_of_the_dequantised_checkpoint(
    family: str, form: str, tiny_model: Made, tmp_path: Path
) -> None:
    source = save_tiny(family, tmp_path / "wide", **WIDE) if family == "qwen3-moe" else tiny_model(family)
    there, meant = write_fp8(source, tmp_path, form)
    model = AutoModelForCausalLM.from_pretrained(meant, dtype=torch.float32)
    assert greedy(there) == reference_tokens(model, PROMPT, 8)
    torch.testing.assert_close(scores(there), reference(model), atol=5e-4, rtol=1e-3)
    for layer in load_weights(read_spec(there), there, **CPU).layers:
        assert {name for name, w in layer.items() if w.fp8 is None} <= {"router"}


@pytest.mark.parametrize("family", ["granite-moe", "gpt-oss"])
def test_experts_in_one_tensor_are_written_separately_and_serve_like_quantising_while_loading(
    family: str, tiny_model: Made, tmp_path: Path
) -> None:
    source = tiny_model(family)
    made = quantize(source, tmp_path / "new", keep=(r"layers\.1\.self_attn",))
    spec = read_spec(source)
    assert spec.experts is not None
    assert len(made.errors) == spec.num_layers * (3 * spec.experts.count + 4) - 4
    assert all(0.005 < error.error < 0.05 for error in made.errors)
    assert [row[0] for row in by_layer(made.errors)] == list(range(spec.num_layers))
    small, now = loaded(made.path), loaded(source, quantization="fp8")
    for i, (ours, theirs) in enumerate(zip(small.layers, now.layers, strict=True)):
        for name, product in ours.items():
            if i == 1 and name in ("qkv", "o"):
                assert product.fp8 is None
                continue
            for mine, other in zip(product.tensors(), theirs[name].tensors(), strict=True):
                assert torch.equal(*(t.view(torch.uint8) if t.dtype == fp8.E4M3 else t for t in (mine, other)))
    names = tensors_of(made.path)
    config = json.loads((made.path / "config.json").read_text())["quantization_config"]
    assert any(re.search(r"experts\.3\.gate_proj\.weight_scale$", name) for name in names)
    assert ("model.layers.0.mlp.experts.3.up_proj.bias" in names) == (family == "gpt-oss")
    assert not any(re.search(r"experts\.\d+\.", name) for name in config["ignore"])
    assert "model.layers.1.self_attn.q_proj" in config["ignore"]


def test_an_excluded_expert_stays_in_16_bits_under_its_own_name(tiny_model: Made, tmp_path: Path) -> None:
    kept = "model.layers.0.block_sparse_moe.experts.2.up_proj"
    made = quantize(tiny_model("granite-moe"), tmp_path / "new", keep=(re.escape(kept),))
    assert kept in made.kept
    tensors, whole = tensors_of(made.path), tensors_of(tiny_model("granite-moe"))
    both = whole["model.layers.0.block_sparse_moe.input_linear.weight"]
    assert torch.equal(tensors[f"{kept}.weight"], both[2].chunk(2)[1])


def test_four_bit_experts_are_unchanged_by_fp8(tmp_path: Path) -> None:
    model = make_tiny("gpt-oss", hidden_size=64, intermediate_size=96)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    for name in [n for n in state if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, out = state.pop(name).shape
        shape = (experts, out, inner // 32)
        state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        state[f"{name}_scales"] = torch.randint(116, 126, shape, generator=generator).to(torch.uint8)
    save_file(state, tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    wide, small = loaded(tmp_path), loaded(tmp_path, quantization="fp8")
    for before, after in zip(wide.layers, small.layers, strict=True):
        assert torch.equal(values(after["experts_down"].fp8), before["experts_down"].weight)
        made = after["experts_gate_up"].fp8
        assert made is not None
        assert made.norm is not None
        torch.testing.assert_close(values(made) * made.norm, before["experts_gate_up"].weight, rtol=1e-6, atol=0)
    with pytest.raises(ModelError, match="quantized already"):
        quantize(tmp_path, tmp_path / "new")


def test_static_scales_are_per_expert(tiny_model: Made, tmp_path: Path) -> None:
    there, _ = write_fp8(tiny_model("granite-moe"), tmp_path, "compressed-tensors, tensor, static")
    tensors = load_file(there / "model.safetensors")
    for name in [n for n in tensors if n.endswith("input_linear.input_scale")]:
        tensors[name] = torch.arange(1.0, 5.0)
    save_file(tensors, there / "model.safetensors", {"format": "pt"})
    (layer, *_) = load_weights(read_spec(there), there, **CPU).layers
    gate_up, down = layer["experts_gate_up"].fp8, layer["experts_down"].fp8
    assert gate_up is not None
    assert down is not None
    assert gate_up.input_scale is not None
    assert gate_up.input_scale.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert down.input_scale is not None
    assert down.input_scale.tolist() == pytest.approx([INPUT_SCALE] * 4)


def test_missing_tensors_of_experts_in_one_tensor_are_named(tiny_model: Made, tmp_path: Path) -> None:
    there, plain = write_fp8(tiny_model("granite-moe"), tmp_path, "compressed-tensors, tensor, static")
    name = "model.layers.1.block_sparse_moe.input_linear"
    refusal = Refusal(there, name)
    assert f"{name}.weight is in 8 bits" in refusal(weight_scale=None)
    assert "first dimension must be the 4 experts" in refusal(weight_scale=torch.ones(3))
    assert "has shape (7,)" in refusal(weight_scale=torch.ones(4, 7))
    assert "not above zero" in refusal(weight_scale=torch.zeros(4))
    assert f"{name}.input_scale" in refusal(input_scale=None)
    assert "one scale, or one per expert (4)" in refusal(input_scale=torch.ones(3))
    refusal(weight_scale=torch.zeros(4))
    (there / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(ModelError, match="no quantization_config"):
        load_weights(read_spec(there), there, **CPU)


def test_a_router_in_fp8_is_computed_in_float32(tiny_model: Made, tmp_path: Path) -> None:
    there, _ = write_fp8(tiny_model("mixtral"), tmp_path, "compressed-tensors, channel, dynamic")
    tensors = load_file(there / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.gate"
    made = fp8.quantize_weight(tensors[f"{name}.weight"])
    tensors |= {f"{name}.weight": made.values, f"{name}.weight_scale": made.scale[:, None]}
    save_file(tensors, there / "model.safetensors", {"format": "pt"})
    router = load_weights(read_spec(there), there, **CPU).layers[0]["router"].weight
    norm = tensors["model.layers.0.post_attention_layernorm.weight"]
    assert router.dtype == torch.float32
    torch.testing.assert_close(router, fp8.weight_values(made) * norm)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("granite-moe", "compressed-tensors, channel, dynamic"),
        ("granite-moe", "compressed-tensors, tensor, static"),
        ("granite-moe", "while loading"),
        ("gpt-oss", "while loading"),
    ],
)
def test_ranks_have_parts_of_experts_in_one_tensor(family: str, form: str, tiny_model: Made, tmp_path: Path) -> None:
    """Uses scales of whole rows."""
    there = tiny_model(family)
    if form == "while loading":
        spec, _ = choose_spec(EngineConfig(model=str(there), quantization="fp8"))
    else:
        there, _ = write_fp8(there, tmp_path, form)
        spec = read_spec(there)
    whole = load_weights(spec, there, **CPU).layers[0]
    parts = [load_weights(spec.shard(rank, 2), there, **CPU).layers[0] for rank in range(2)]
    joined = torch.cat([values(part["experts_gate_up"].fp8) for part in parts], 1)
    assert torch.equal(joined, values(whole["experts_gate_up"].fp8))
    joined = torch.cat([values(part["experts_down"].fp8) for part in parts], 2)
    assert torch.equal(joined, values(whole["experts_down"].fp8))


def test_the_references_round_the_input_of_each_expert() -> None:
    """Compares with a loop over tokens and their experts, with the dequantised rows and matrices."""
    generator = torch.Generator().manual_seed(4)
    tokens, hidden, inter, count, top = 7, 200, 144, 4, 2
    x = torch.randn(tokens, hidden, generator=generator)
    norm = torch.rand(hidden, generator=generator) + 0.5
    router = torch.randn(count, hidden, generator=generator)
    sumsq = x.square().sum(-1)

    def matrices(out: int, inner: int, **parts: Any) -> Fp8Matrix:
        made = [fp8.quantize_weight(torch.randn(out, inner, generator=generator)) for _ in range(count)]
        weight = fp8.Fp8Weight(torch.stack([m.values for m in made]), torch.stack([m.scale for m in made]))
        return Fp8Matrix(weight, **parts)

    gate_up, down = matrices(2 * inter, hidden, norm=norm), matrices(hidden, inter)
    routing = experts_reference.route(x, sumsq, router * norm, 1e-5, kind="softmax", top=top, normalise=True)
    h = experts_reference.experts_gate_up(x, sumsq, routing, gate_up, 1e-5)
    got, _ = experts_reference.experts_residual(h, routing, down, x)
    rows = row_values(fp8.quantize_rows(x * norm)) * torch.rsqrt(sumsq / hidden + 1e-5)[:, None]
    want = x.clone()
    for token in range(tokens):
        for k in range(top):
            e = int(routing.experts[token, k])
            y = fp8.weight_values(gate_up[e].weight) @ rows[token]
            hidden_part = torch.nn.functional.silu(y[0::2]) * y[1::2]
            hidden_part = row_values(fp8.quantize_rows(hidden_part[None]))[0]
            want[token] += routing.weights[token, k] * (fp8.weight_values(down[e].weight) @ hidden_part)
    # sums in another order: an activation at a tie may fall to the other side
    assert (got - want).norm() < 5e-3 * (want - x).norm()


class RoundedCache(DynamicCache):
    """Keys and values in e4m3, as in FP8 pages."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return super().update(*(fp8.saturated(t).float() for t in (key, value)), *rest, **more)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("family", [pytest.param("mixtral", marks=pytest.mark.nightly), "qwen3-moe"])
def test_keys_and_values_in_fp8_go_with_experts_in_fp8(family: str, tiny_model: Made, tmp_path: Path) -> None:
    there, meant = write_fp8(tiny_model(family), tmp_path, "compressed-tensors, channel, dynamic")
    model = AutoModelForCausalLM.from_pretrained(meant, dtype=torch.float32)
    want = reference(model, past_key_values=RoundedCache(config=model.config))
    got = scores(there, kv_cache_dtype="fp8")
    # a key at a tie may fall to the other side, and another expert may follow from that
    assert (got - want).abs().median() < 2e-3
    assert (got - want).abs().median() < 0.2 * (reference(model) - want).abs().median()
