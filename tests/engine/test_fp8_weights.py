"""FP8 weights: checkpoints are read as they are, 16 bits are quantised while loading, and missing tensors are named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp8_files import FORMATS, INPUT_SCALE, unrounded, write_fp8
from harness import Harness
from refusal import Refusal
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from weft.engine.config import EngineConfig
from weft.engine.demo import MODEL_PATH
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError, ModelError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.memory.model_id import model_id
from weft.engine.model.description import describe
from weft.engine.model.directory import read_spec
from weft.engine.model.implementation import choose_spec
from weft.engine.model.quantization import read_quantization
from weft.engine.model.quantize import quantize
from weft.engine.model.weights import load_weights
from weft.engine.runner.options.resolve import resolve
from weft.kernels.formats import fp8, fp8_matrix
from weft.tools.kernels.fp8_operands import row_values

__all__ = ["unrounded"]
Made = Callable[[str], Path]
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}


def scores(path: Path, prompt: np.ndarray, **options: Any) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens but the first, from the engine."""
    harness = Harness(path, **{"page_size": 8, "num_pages": 16, **options})
    handle = harness.add(prompt, max_tokens=0, prompt_logprobs=1)
    harness.run()
    return torch.tensor([entry.values[0] for entry in harness.prompt_logprobs[handle]])


def reference(path: Path, prompt: np.ndarray, change: Callable[[Any], None] = lambda _: None) -> torch.Tensor:
    """The same by `transformers`, which `change` may alter."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    change(model)
    ids = torch.from_numpy(prompt.astype(np.int64))
    with torch.inference_mode():
        return model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


PROMPT = np.random.default_rng(5).integers(3, 199, 40)
WIDE: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 144, "num_attention_heads": 4, "head_dim": 64}
"""matrices with several blocks, the last of them not full; rotary pairs and gate-up rows mix rows of several"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import save_tiny

    return save_tiny("llama2", tmp_path_factory.mktemp("wide"), **WIDE, num_hidden_layers=2, initializer_range=0.1)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_the_values_of_its_writer(wide: Path, tmp_path: Path, form: str) -> None:
    there, meant = write_fp8(wide, tmp_path, form)
    torch.testing.assert_close(scores(there, PROMPT), reference(meant, PROMPT), atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("family", ["mixtral", "qwen2", "phi3", "gemma2", "olmo2", "granite", "qwen2-moe", "opt"])
def test_every_kind_of_layer_is_read(tiny_model: Made, tmp_path: Path, family: str) -> None:
    form = "compressed-tensors, channel, dynamic" if family != "phi3" else "fp8, block"
    there, meant = write_fp8(tiny_model(family), tmp_path, form)
    torch.testing.assert_close(scores(there, PROMPT), reference(meant, PROMPT), atol=5e-4, rtol=1e-3)
    (layer, *_) = load_weights(read_spec(there), there, **CPU).layers
    assert {name for name, w in layer.items() if w.fp8 is None} <= {"router"}


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("form", ["fp8, block", "compressed-tensors, channel, dynamic"])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "nemotron-h", "lfm2-moe", "deepseek-v2", "deepseek-v3"])
def test_recurrences_and_latent_attention_are_read(tiny_model: Made, tmp_path: Path, family: str, form: str) -> None:
    """As published: projections to one number a head, and routers, are not quantised."""
    keep = r"in_proj_(b|a|ba)\.|shared_expert_gate|(mlp|mixer|feed_forward)\.gate\."
    there, meant = write_fp8(tiny_model(family), tmp_path, form, keep)
    torch.testing.assert_close(scores(there, PROMPT, num_pages=200), reference(meant, PROMPT), atol=2e-3, rtol=2e-3)


@pytest.mark.usefixtures("unrounded")
def test_16_bit_matrices_of_the_checkpoint_are_unchanged(wide: Path, tmp_path: Path) -> None:
    """Covers whole matrices, and a part of one that is packed with quantised parts."""
    keep = r"layers\.0\.(self_attn|mlp\.down)|layers\.1\.(self_attn\.k_proj|mlp\.up)"
    there, meant = write_fp8(wide, tmp_path, "compressed-tensors, channel, dynamic", keep)
    torch.testing.assert_close(scores(there, PROMPT), reference(meant, PROMPT), atol=2e-4, rtol=1e-4)
    first, second = load_weights(read_spec(there), there, **CPU).layers
    assert {name for name, w in first.items() if w.fp8} == {"gate_up"}
    assert {name for name, w in second.items() if w.fp8} == {"o", "down"}


@pytest.mark.parametrize("form", ["compressed-tensors, tensor, static", "modelopt"])
def test_static_activations_are_rounded_with_the_scale_of_the_checkpoint(wide: Path, tmp_path: Path, form: str) -> None:
    there, meant = write_fp8(wide, tmp_path, form)

    def round_inputs(model: Any) -> None:
        def rounded(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return ((inputs[0] / INPUT_SCALE).clamp(-448, 448).to(fp8.E4M3).float() * INPUT_SCALE,)

        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(rounded)

    want = reference(meant, PROMPT, round_inputs)
    got = scores(there, PROMPT)
    # a value at a tie may fall to the other side
    assert (got - want).abs().median() < 0.02
    assert (got - want).abs().max() < 0.5 * (want - reference(meant, PROMPT)).abs().max() + 0.1


@pytest.mark.usefixtures("unrounded")
def test_groups_may_have_scales_of_other_kinds(wide: Path, tmp_path: Path) -> None:
    """The files decide: config_groups give channel scales for some modules and tensor scales for the others."""
    of_channels, of_tensors = (f"compressed-tensors, {kind}" for kind in ("channel, dynamic", "tensor, static"))
    there, meant = write_fp8(wide, tmp_path / "a", of_channels, keep="mlp")
    others, others_meant = write_fp8(wide, tmp_path / "b", of_tensors, keep="self_attn")
    for path, other in ((there, others), (meant, others_meant)):
        mlp = {n: t for n, t in load_file(other / "model.safetensors").items() if ".mlp." in n}
        rest = {n: t for n, t in load_file(path / "model.safetensors").items() if ".mlp." not in n}
        save_file({**rest, **mlp}, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((there / "config.json").read_text())
    group = raw["quantization_config"]["config_groups"]["group_0"]
    more = {**group, "weights": {**group["weights"], "strategy": "tensor"}, "targets": ["re:.*mlp.*"]}
    raw["quantization_config"]["config_groups"]["group_1"] = more
    raw["quantization_config"]["transform_config"] = {
        "config_groups": {"u": {"apply": [{"location": "weight_output"}]}}
    }
    (there / "config.json").write_text(json.dumps(raw))
    assert "a scale for each output channel or tensor" in dict(describe(read_spec(there)))["weights in FP8"]
    torch.testing.assert_close(scores(there, PROMPT), reference(meant, PROMPT), atol=2e-4, rtol=1e-4)


def test_dynamic_activations_lose_little(wide: Path, tmp_path: Path) -> None:
    there, meant = write_fp8(wide, tmp_path, "fbgemm_fp8")
    got, want = scores(there, PROMPT), reference(meant, PROMPT)
    assert 0 < (got - want).abs().mean() < 0.1 * want.std()


def test_the_reference_multiplies_rounded_values_and_norms_afterwards() -> None:
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 200, generator=generator) for n in (5, 24))
    norm, bias = torch.rand(200, generator=generator), torch.randn(24, generator=generator)
    weight = fp8.quantize_weight(w)
    row_scale = torch.rand(5, generator=generator)
    got = fp8_matrix.linear(x, row_scale, fp8_matrix.Fp8Matrix(weight, norm=norm), bias)
    want = row_values(fp8.quantize_rows(x * norm)) @ fp8.weight_values(weight).T * row_scale[:, None] + bias
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_norm_with_mean_and_bias_comes_before_the_rounding() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 48, generator=generator) + 3
    weight = fp8.quantize_weight(torch.randn(8, 48, generator=generator))
    norm, shift = torch.rand(48, generator=generator), torch.randn(48, generator=generator)
    centred = x - x.mean(-1, keepdim=True)
    row_scale = torch.rsqrt(centred.square().mean(-1) + 1e-5)
    got = fp8_matrix.linear(x, row_scale, fp8_matrix.Fp8Matrix(weight, norm=norm, norm_bias=shift, centred=True))
    whole = torch.nn.functional.layer_norm(x, (48,), norm, shift)
    want = row_values(fp8.quantize_rows(whole)) @ fp8.weight_values(weight).T
    assert (got - want).abs().max() < 0.1 * want.std()


@pytest.mark.parametrize("family", ["llama3.1", "gpt-oss", "mixtral", "opt", "glm4-moe", "gpt2"])
def test_any_family_is_quantised_while_it_loads(tiny_model: Made, family: str) -> None:
    path = tiny_model(family)
    spec, _ = choose_spec(EngineConfig(model=str(path), quantization="fp8"))
    plain, small = load_weights(read_spec(path), path, **CPU), load_weights(spec, path, **CPU)
    for layer in small.layers:
        for name, product in layer.items():
            assert (product.fp8 is None) == (name == "router")
            assert product.weight.dtype == (torch.float32 if name == "router" else fp8.E4M3)
    for here, there in ((small.embedding, plain.embedding), (small.lm_head, plain.lm_head), (small.norm, plain.norm)):
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    assert small.num_bytes < 0.75 * plain.num_bytes
    harness = Harness(path, page_size=8, num_pages=16, quantization="fp8")
    harness.add(PROMPT[:9], max_tokens=4)
    harness.run()


@pytest.mark.parametrize("ranks", [2])
def test_ranks_have_shards_of_the_same_matrices(wide: Path, tmp_path: Path, ranks: int) -> None:
    """Covers blocks too, whose rows may begin inside a rank's shard."""
    for form in ("compressed-tensors, channel, dynamic", "fp8, block"):
        there, _ = write_fp8(wide, tmp_path / form, form)
        spec = read_spec(there)
        whole = load_weights(spec, there, **CPU).layers
        if form == "fp8, block":
            with pytest.raises(ModelError, match=r"o_proj|down_proj.*blocks of 128 columns.*fewer ranks"):
                load_weights(spec.shard(1, 4), there, **CPU)
            continue
        parts = [load_weights(spec.shard(rank, ranks), there, **CPU).layers for rank in range(ranks)]
        for layer in range(spec.num_layers):
            own = [part[layer]["gate_up"].fp8 for part in parts]
            together = torch.cat([fp8.weight_values(m.weight) for m in own])
            assert torch.equal(together, fp8.weight_values(whole[layer]["gate_up"].fp8.weight))


def test_missing_and_invalid_tensors_are_named(wide: Path, tmp_path: Path) -> None:
    there, _ = write_fp8(wide, tmp_path, "compressed-tensors, tensor, static")
    name = "model.layers.1.mlp.down_proj"
    refusal = Refusal(there, name)
    assert f"{name}.weight is in 8 bits" in (message := refusal(weight_scale=None))
    assert message.endswith(f"no {name}.weight_scale")
    assert f"{name}.input_scale" in refusal(input_scale=None)
    assert f"{name}.weight_scale has shape (3,)" in refusal(weight_scale=torch.ones(3))
    assert "not above zero" in refusal(weight_scale=torch.tensor(0.0))
    assert "not above zero" in refusal(input_scale=torch.tensor(1e-42))  # its inverse is infinite
    assert "not finite" in refusal(weight_scale=torch.tensor(float("inf")))
    assert f"{name}.weight_scale" in refusal(weight_scale=torch.tensor(float("nan")))
    assert "is bfloat16, but the checkpoint has a scale" in refusal(weight=torch.zeros(160, 144, dtype=torch.bfloat16))
    spoilt = refusal.tensors[f"{name}.weight"].clone()
    spoilt.view(torch.uint8)[3, 4] = 0x7F
    assert f"{name}.weight" in refusal(weight=spoilt)
    assert "float8_e5m2" in refusal(weight=torch.zeros(160, 144).to(torch.float8_e5m2))
    # an exponent's bits are no scale
    assert "weight_scale is uint8" in refusal(weight_scale=torch.tensor([127], dtype=torch.uint8))


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.bool, torch.float8_e5m2])
def test_other_number_formats_are_not_read_as_weights(wide: Path, tmp_path: Path, kind: torch.dtype) -> None:
    """As in checkpoints that a tool has quantised without an entry in the config."""
    tensors = {n: t for file in wide.glob("*.safetensors") for n, t in load_file(file).items()}
    shutil.copy(wide / "config.json", tmp_path / "config.json")
    for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        changed = {**tensors, name: tensors[name].to(kind)}
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        named = f"{name} is {str(kind).removeprefix('torch.')}, which is not read here"
        with pytest.raises(ModelError, match=re.escape(named)):
            load_weights(read_spec(tmp_path), tmp_path, **CPU)
        with pytest.raises(ModelError, match=re.escape(named)):
            quantize(tmp_path, tmp_path / "new")


def test_scales_may_be_powers_of_two_in_their_own_format(wide: Path, tmp_path: Path) -> None:
    there, _ = write_fp8(wide, tmp_path, "fp8, block")
    tensors = load_file(there / "model.safetensors")
    scales = {n: t.log2().round().exp2() for n, t in tensors.items() if n.endswith("scale_inv")}
    logprobs = []
    for kind in (torch.float32, torch.float8_e8m0fnu):
        made = {**tensors, **{n: t.to(kind) for n, t in scales.items()}}
        save_file(made, there / "model.safetensors", {"format": "pt"})
        logprobs.append(scores(there, PROMPT))
    assert torch.equal(*logprobs)


def test_fp8_without_a_config_entry_is_refused(wide: Path, tmp_path: Path) -> None:
    there, plain = write_fp8(wide, tmp_path, "fbgemm_fp8")
    shutil.copy(plain / "config.json", there / "config.json")
    with pytest.raises(ModelError, match="quantization_config"):
        load_weights(read_spec(there), there, **CPU)


def test_modelopt_may_use_a_separate_file(wide: Path, tmp_path: Path) -> None:
    there, plain = write_fp8(wide, tmp_path, "modelopt")
    shutil.copy(plain / "config.json", there / "config.json")
    hf_quant_config = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (there / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
    spec = read_spec(there)
    assert spec.quantization is not None
    assert (spec.quantization.method, spec.quantization.activations) == ("modelopt", "static")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ([1], "is not an object"),
        ("fp8", "is not an object"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "none that are objects"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": [1]}},
         "g of its config_groups is not an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": [1]}},
         "g of its config_groups is not an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": "fp8"}}},
         "weights of g are not an object"),
        ({**FORMATS["compressed-tensors, block"][2], "transform_config": {"config_groups": {"R4": {
            "type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"},
                                          {"targets": ["re:.*down_proj$"], "location": "weight_input"}]}}}},
         r"rotates activations \(input\)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\]"),
        ({"quant_method": "fp8", "activation_scheme": "magic"}, "magic"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "int", "num_bits": 8}}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {
            "weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "group"}}}}, "strategy group"),
    ],
)  # fmt: skip
def test_other_quantization_is_named(wide: Path, tmp_path: Path, config: dict[str, Any], named: str) -> None:
    raw = json.loads((wide / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    with pytest.raises(ModelError, match=named) as error:
        read_spec(tmp_path)
    assert "\n" not in str(error.value)


def test_pages_of_quantised_weights_have_another_identity() -> None:
    configs = [EngineConfig(quantization=q) for q in (None, "fp8")]
    spec = read_spec(MODEL_PATH)
    layout = KvLayout.of(spec, 16, torch.float32)
    assert len({model_id(config, layout, spec, torch.float32, 64) for config in configs}) == 2


def test_transformers_code_refuses_the_option(tiny_model: Made) -> None:
    with pytest.raises(ModelError, match=r"--quantization fp8 needs weft's own layers"):
        Engine(EngineConfig(model=str(tiny_model("llama2")), model_impl="transformers", quantization="fp8"))


@pytest.mark.parametrize("form", ["compressed-tensors, tensor, static", "modelopt"])
def test_static_activations_are_no_reason_for_a_gpu_to_refuse(form: str) -> None:
    """Their scales are ignored there: `cuda_fp8`."""
    pytest.importorskip("triton")
    from weft.engine.runner.options.gpu_limits import unsupported_fp8

    made = read_quantization(FORMATS[form][2])
    assert unsupported_fp8(replace(read_spec(MODEL_PATH), quantization=made)) is None


@pytest.mark.parametrize("family", ["opt", "gpt2", "phi", "starcoder2", "gemma", "gemma2", "olmo2", "glm4", "llama2"])
def test_a_gpu_serves_dense_families_with_any_norms_and_heads(tiny_model: Made, family: str) -> None:
    pytest.importorskip("triton")
    from weft.engine.runner.options.gpu_limits import unsupported_fp8

    spec, _ = choose_spec(EngineConfig(model=str(tiny_model(family)), quantization="fp8"))
    assert unsupported_fp8(spec) is None
    assert unsupported_fp8(replace(spec, intermediate_size=120)) is not None
    assert unsupported_fp8(spec.shard(0, 2)) == "several ranks"


def test_a_gpu_refuses_experts_with_heads_of_other_sizes(tiny_model: Made) -> None:
    pytest.importorskip("triton")
    from weft.engine.runner.options.gpu_limits import unsupported_fp8

    spec, _ = choose_spec(EngineConfig(model=str(tiny_model("qwen3-moe")), quantization="fp8"))
    spec = replace(spec, experts=replace(spec.experts, intermediate_size=48))
    assert "experts together with heads" in (unsupported_fp8(spec) or "")
    assert unsupported_fp8(replace(spec, head_dim=64)) is None


@pytest.mark.parametrize("family", ["llama2", "granite-moe", "mixtral"])
def test_weight_only_fp8_is_dequantised_on_a_gpu(
    family: str, tiny_model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Covers experts in one tensor, and each in its own; a rank's shard of them too."""
    import weft.engine.runner.options.resolve as resolve_module
    from weft.kernels.common.gpu import KNOWN

    there, meant = write_fp8(tiny_model(family), tmp_path, "compressed-tensors, weights alone")
    chosen = read_spec(there)
    assert resolve_module.served_as(chosen, EngineConfig(model=str(there), device="cpu")) is chosen
    monkeypatch.setattr(resolve_module, "gpu", lambda: KNOWN["a100"])
    spec = resolve_module.served_as(chosen, EngineConfig(model=str(there)))
    for got, want in (
        (load_weights(spec, there, **CPU), load_weights(read_spec(meant), meant, **CPU)),
        (load_weights(spec.shard(1, 2), there, **CPU), load_weights(read_spec(meant).shard(1, 2), meant, **CPU)),
    ):
        for ours, theirs in zip(got.layers, want.layers, strict=True):
            assert ours.keys() == theirs.keys()
            for name, product in ours.items():
                for mine, other in zip(product.tensors(), theirs[name].tensors(), strict=True):
                    assert torch.equal(mine, other)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "became 16 bits" in line]  # of rank 0 only
    assert "the weights now take 0.00 GiB" in line


@pytest.mark.parametrize(("name", "options", "reason"), [("a100", {}, "A100.* does not multiply FP8")])
def test_a_gpu_that_cannot_serve_fp8_weights_refuses_in_one_line(
    name: str, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weft.engine.runner.options.resolve as resolve_module
    from weft.kernels.common.gpu import KNOWN

    monkeypatch.setattr(resolve_module, "gpu", lambda: KNOWN[name])
    config = EngineConfig(quantization="fp8", **options)
    spec, _ = choose_spec(config)
    with pytest.raises(ConfigError, match=rf"--quantization fp8: .*{reason}.*--device cpu"):
        resolve(config, spec)
