"""Models that `transformers`' own code computes with weft's attention."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, save_tiny

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError, ModelError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.implementation import check_known, choose_spec
from weft.engine.runner.device import transformers_attention
from weft.engine.runner.start.inspect_command import inspect

Made = Callable[[str], Path]
OPTIONS: dict[str, Any] = {"model_impl": "transformers", "page_size": 4, "max_num_seqs": 8, "num_pages": 80}


def _changed(path: Path, to: Path, **changes: Any) -> Path:
    """The same model with other values in its `config.json`."""
    to.mkdir(exist_ok=True)
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def test_both_implementations_give_the_same_tokens(tiny_model: Made) -> None:
    prompts = [np.random.default_rng(i).integers(3, 199, n) for i, n in enumerate((3, 19, 50))]
    tokens = []
    for impl in ("native", "transformers"):
        harness = Harness(tiny_model("llama3.1"), **{**OPTIONS, "model_impl": impl, "max_num_batched_tokens": 7})
        for prompt in prompts:
            harness.add(prompt, max_tokens=12, **GREEDY)
        harness.run()
        tokens.append(harness.tokens)
    assert tokens[0] == tokens[1]


def test_a_long_neighbour_changes_no_angles(tmp_path: Path) -> None:
    """`transformers` chooses the factors of longrope by the longest position of a batch."""
    rope = {**FAMILIES["phi4"][1]["rope_parameters"], "original_max_position_embeddings": 32}
    path = save_tiny("phi4", tmp_path, rope_parameters=rope, original_max_position_embeddings=32)
    short, long = (np.random.default_rng(i).integers(3, 199, n) for i, n in enumerate((9, 60)))
    reported = []
    for impl, prompts in (("transformers", [short]), ("transformers", [long, short]), ("native", [short])):
        harness = Harness(path, **{**OPTIONS, "model_impl": impl})
        handles = [harness.add(prompt, max_tokens=8, logprobs=0, **GREEDY) for prompt in prompts]
        harness.run()
        reported.append([float(entry.values[0]) for entry in harness.logprobs[handles[-1]]])
    np.testing.assert_allclose(reported[0], reported[1], atol=1e-4)
    np.testing.assert_allclose(reported[0], reported[2], atol=1e-3)


def test_prompt_logprobs_are_those_of_the_native_path(tiny_model: Made) -> None:
    prompt = np.random.default_rng(3).integers(3, 199, 40)
    values = []
    for impl in ("native", "transformers"):
        harness = Harness(tiny_model("yi"), **{**OPTIONS, "model_impl": impl, "max_num_batched_tokens": 16})
        handle = harness.add(prompt, max_tokens=3, prompt_logprobs=2, logprobs=2, **GREEDY)
        harness.run()
        entries = [*harness.prompt_logprobs[handle], *harness.logprobs[handle]]
        values.append(np.concatenate([np.asarray(entry.values) for entry in entries]))
    np.testing.assert_allclose(values[0], values[1], atol=2e-4)


def test_a_line_reports_what_computes_the_model(tiny_model: Made, capsys: pytest.CaptureFixture[str]) -> None:
    Harness(tiny_model("yi"), **OPTIONS)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "transformers' code" in line]
    assert line.startswith("weft: LlamaForCausalLM: ")
    assert "--model-impl" in line


def test_weights_made_up_for_a_shape(tiny_model: Made) -> None:
    harness = Harness(tiny_model("yi"), **OPTIONS, load_format="dummy")
    harness.add([5, 6, 7], max_tokens=4, **GREEDY)
    harness.run()
    assert len(harness.tokens[0]) == 4


def test_a_model_that_differs_from_generate_is_refused(tiny_model: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    call = transformers_attention.PagedCalls.__call__

    def wrong(self: Any, module: Any, q: Any, k: Any, v: Any, given: Any) -> Any:
        return call(self, module, q, k, v * 1.1, given)

    monkeypatch.setattr(transformers_attention.PagedCalls, "__call__", wrong)
    with pytest.raises(ModelError, match=r"logits differ by .* answers would be wrong"):
        Engine(EngineConfig(model=str(tiny_model("yi")), **OPTIONS))


def test_pages_of_the_two_implementations_have_different_identities(tiny_model: Made) -> None:
    layouts = []
    for impl in ("native", "transformers"):
        spec, _ = choose_spec(EngineConfig(model=str(tiny_model("yi")), model_impl=impl))
        layouts.append(KvLayout.of(spec, 4, torch.float32))
    assert layouts[0].page_bytes == layouts[1].page_bytes
    assert layouts[0].id != layouts[1].id


def test_layers_of_several_shapes_lie_side_by_side_in_a_page() -> None:
    layout = KvLayout(3, 2, 4, 2, 24, torch.float32, ((2, 16), (1, 24), (2, 16)))
    pool = torch.zeros(layout.shape(3))
    for layer in range(3):
        view, at = layout.layer(pool, layer)
        assert view.shape[2:] == (2, 4, *layout.heads(layer))
        view[:, at] += layer + 1
    counts = [int((pool == value).sum()) for value in (1, 2, 3)]
    assert counts == [3 * 2 * 4 * heads * width for heads, width in layout.mixed]
    assert layout.pages_in(pool.nbytes) == 3


def test_missing_weights_are_named(tiny_model: Made, tmp_path: Path) -> None:
    path = _changed(tiny_model("yi"), tmp_path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({n: t for n, t in tensors.items() if "layers.1.mlp" not in n}, file, {"format": "pt"})
    index = path / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"] = {n: f for n, f in known["weight_map"].items() if "layers.1.mlp" not in n}
    index.write_text(json.dumps(known))
    with pytest.raises(ModelError, match=r"has no tensor model\.layers\.1\.mlp\.down_proj"):
        Engine(EngineConfig(model=str(path), **OPTIONS))


def test_non_finite_weights_are_named(tiny_model: Made, tmp_path: Path) -> None:
    path = _changed(tiny_model("yi"), tmp_path)
    file = next(f for f in sorted(path.glob("*.safetensors")) if "model.norm.weight" in load_file(f))
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"not finite.*model\.norm\.weight"):
        Engine(EngineConfig(model=str(path), **OPTIONS))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_undeclared_quantised_weights_are_named(tiny_model: Made, tmp_path: Path, kind: torch.dtype) -> None:
    path = _changed(tiny_model("yi"), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    file = next(f for f in sorted(path.glob("*.safetensors")) if name in load_file(f))
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(kind)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{re.escape(name)} is {str(kind)[6:]}, but config.json has no quantization"):
        Engine(EngineConfig(model=str(path), **OPTIONS))


def test_modelopts_own_file_is_read(tiny_model: Made, tmp_path: Path) -> None:
    path = _changed(tiny_model("yi"), tmp_path, architectures=["OlmoForCausalLM"], model_type="olmo")
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    for refuse in (lambda: choose_spec(EngineConfig(model=str(path))), lambda: check_known(path)):
        with pytest.raises(ModelError, match=r"quantized \(modelopt\)"):
            refuse()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "encoder-decoder"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "does not generate text"),
        ({"architectures": ["NewForCausalLM"], "model_type": "new"}, "has no decoder of model_type new"),
        (
            {
                "architectures": ["NewForCausalLM"],
                "model_type": "new",
                "auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"},
            },
            "--trust-remote-code",
        ),
        ({"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "quantization_config": {"quant_method": "awq"}},
         r"quantized \(awq\)"),
        ({"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "quantization_config": {"bits": 4}},
         r"quantized \(no quant_method\)"),
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "takes no cache"),
        ({"architectures": ["XLMWithLMHeadModel"], "model_type": "xlm"}, "takes no cache"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused_with_one_line(
    tiny_model: Made, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = _changed(tiny_model("yi"), tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as raised:
        choose_spec(EngineConfig(model=str(path)))
    assert "\n" not in str(raised.value)


def test_code_of_a_checkpoint_never_runs_without_the_flag(tiny_model: Made, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    path = _changed(
        tiny_model("yi"), tmp_path / "model", architectures=["NewForCausalLM"], model_type="new",
        auto_map={"AutoConfig": "code.NewConfig", "AutoModelForCausalLM": "code.NewForCausalLM"},
    )  # fmt: skip
    (path / "code.py").write_text(
        f"open({str(ran)!r}, 'w')\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class NewConfig(LlamaConfig):\n    model_type = 'new'\n"
        "class NewForCausalLM(LlamaForCausalLM):\n    config_class = NewConfig\n"
    )
    with pytest.raises(ModelError, match=r"--trust-remote-code"):
        Engine(EngineConfig(model=str(path), **{**OPTIONS, "model_impl": "auto"}))
    assert not ran.exists()
    harness = Harness(path, **{**OPTIONS, "model_impl": "auto", "trust_remote_code": True})
    assert ran.exists()
    harness.add([5, 6, 7], max_tokens=2, **GREEDY)
    harness.run()


def test_batch_invariance_needs_native_layers(tiny_model: Made) -> None:
    with pytest.raises(ConfigError, match="batch-invariant"):
        Engine(EngineConfig(model=str(tiny_model("yi")), **OPTIONS, batch_invariant=True))


def test_inspect_reports_transformers_models(tiny_model: Made) -> None:
    reported = inspect(EngineConfig(model=str(tiny_model("yi")), model_impl="transformers", load_format="dummy"))
    assert "transformers" in reported["implementation"]
    assert reported["devices"]["cpu"]["served"]


def test_a_preset_runs_on_either() -> None:
    specs = [
        choose_spec(EngineConfig(model_preset="llama-3-8b", load_format="dummy", model_impl=impl))[0]
        for impl in ("native", "transformers")
    ]
    assert specs[0].num_parameters == specs[1].num_parameters
    assert specs[0].kv_heads == specs[1].kv_heads


def test_known_facts_are_reported_without_loading_torch(tiny_model: Made, tmp_path: Path) -> None:
    check_known(_changed(tiny_model("yi"), tmp_path, architectures=["OlmoForCausalLM"], model_type="olmo"))
    with pytest.raises(ModelError, match="not supported"):
        check_known(_changed(tiny_model("yi"), tmp_path, architectures=["OlmoForCausalLM"]), "native")
