"""Model directories: unsupported ones are refused with one line that gives the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tiny import FAMILIES, save_tiny
from transformers import AutoModelForCausalLM

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError, ModelError, OutOfMemory, RequestError, WeftError
from weft.engine.model.checkpoint import Checkpoint
from weft.engine.model.directory import read_spec
from weft.engine.model.hub import damaged, missing


@pytest.fixture
def broken(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama2"), tmp_path / "model"))


def _edit(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def _refusal(path: Path | str, kind: type[WeftError] = ModelError, **options: object) -> str:
    with pytest.raises(kind) as error:
        Engine(EngineConfig(model=str(path), **options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_directory() -> None:
    assert "no model directory" in _refusal("/nowhere")


def test_unsupported_architecture_names_the_supported_ones(broken: Path) -> None:
    _edit(broken, architectures=["RwkvForCausalLM"])
    message = _refusal(broken)
    assert "RwkvForCausalLM" in message
    assert "LlamaForCausalLM" in message


def test_missing_shard_is_named(broken: Path) -> None:
    shard = sorted(broken.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in _refusal(broken)


def test_truncated_shard(broken: Path) -> None:
    shard = sorted(broken.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    assert shard.name in _refusal(broken)


def test_shape_that_does_not_fit_the_config(broken: Path) -> None:
    _edit(broken, intermediate_size=96)
    message = _refusal(broken)
    assert "gate_proj" in message
    assert "(96, 64)" in message


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "mrope"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "1 factors for 8"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"hidden_size": "many"}, "wrong kind"),
        ({"text_config": "many"}, "wrong kind"),
        ({"num_hidden_layers": float("inf")}, "wrong kind"),
        ({"architectures": 5}, "wrong kind"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"vocab_size": 1}, "config.json requires (1, 64)"),
    ],
)
def test_configs_that_cannot_be_served(broken: Path, changes: dict, word: str) -> None:
    _edit(broken, **changes)
    assert word in _refusal(broken)


def test_null_means_absent_except_where_it_means_none(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    for family, key, value in (("llama2", "rms_norm_eps", 1e-6), ("gemma2", "tie_word_embeddings", True)):
        path = Path(shutil.copytree(tiny_model(family), tmp_path / family))
        _edit(path, **{key: value})
        want = read_spec(path)
        _edit(path, **{key: None})
        assert read_spec(path) == want
    _edit(path, sliding_window=None, final_logit_softcapping=None)
    spec = read_spec(path)
    assert (set(spec.windows), spec.logits_softcap) == ({None}, 0.0)


def test_config_that_is_not_json(broken: Path) -> None:
    (broken / "config.json").write_text("{")
    assert "config.json" in _refusal(broken)


def test_too_little_memory_names_the_option_to_change(tiny_model: Callable[[str], Path], broken: Path) -> None:
    assert "--kv-cache-gib" in _refusal(tiny_model("yi"), OutOfMemory, kv_cache_gib=1e-6)
    _edit(broken, hidden_size=2**16, intermediate_size=2**20, num_attention_heads=512, num_key_value_heads=512)
    assert "the machine has" in _refusal(broken, OutOfMemory, load_format="dummy")


def test_context_longer_than_the_model(tiny_model: Callable[[str], Path]) -> None:
    assert "256" in _refusal(tiny_model("yi"), ConfigError, max_model_len=257)


def test_a_pool_smaller_than_the_context_lowers_the_limit(tiny_model: Callable[[str], Path]) -> None:
    harness = Harness(tiny_model("yi"), page_size=8, num_pages=5)
    assert harness.engine.resolved.max_model_len == 32
    with pytest.raises(RequestError, match="at most 32 fit"):
        harness.add(range(3, 35))
    with pytest.raises(RequestError) as error:
        harness.add(range(3, 23), max_tokens=13)
    assert error.value.param == "max_tokens"
    harness.add(range(3, 23), max_tokens=12, ignore_eos=True, **GREEDY)
    harness.run()
    assert len(harness.tokens[0]) == 12


def test_dummy_weights_need_only_a_config(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(tiny_model("llama2") / "config.json", tmp_path)
    outputs = []
    for seed in (1, 1, 2):
        harness = Harness(tmp_path, load_format="dummy", seed=seed, page_size=8, num_pages=32)
        harness.add(range(3, 20), max_tokens=8, ignore_eos=True, **GREEDY)
        harness.run()
        outputs.append(harness.tokens[0])
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_count_equals_that_of_transformers(tiny_model: Callable[[str], Path], family: str) -> None:
    spec = read_spec(tiny_model(family))
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    biases = sum(p.numel() for n, p in model.named_parameters() if n.endswith(("bias", "sinks")))
    assert spec.num_parameters == sum(p.numel() for p in model.parameters()) - biases


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ],
)
def test_rotary_scalings_equal_those_of_transformers(tmp_path: Path, rope: dict) -> None:
    path = save_tiny("llama2", tmp_path, rope_parameters=rope)
    model = AutoModelForCausalLM.from_pretrained(path)
    ((inv_freq, scale),) = read_spec(path).rotary(256)
    rotary = model.model.rotary_emb
    assert torch.allclose(inv_freq, rotary.inv_freq.float(), rtol=1e-5)
    assert scale == pytest.approx(rotary.attention_scaling)


def test_prompts_with_foreign_tokens_are_refused(tiny_model: Callable[[str], Path]) -> None:
    harness = Harness(tiny_model("yi"), num_pages=8)
    for prompt in ([], [199], np.array([-1])):
        with pytest.raises(RequestError) as error:
            harness.add(prompt)
        assert error.value.param == "prompt"
    with pytest.raises(RequestError):
        harness.add([5], stop_token_ids=(199,))
    with pytest.raises(RequestError):
        harness.add([5], logit_bias={199: 1.0})


def _as_pickled(path: Path, out: Path) -> Path:
    """The checkpoint in PyTorch's old format, in two shards."""
    out.mkdir()
    shutil.copy(path / "config.json", out)
    state = AutoModelForCausalLM.from_pretrained(path).state_dict()
    names = sorted(state)
    files = {n: f"pytorch_model-0000{1 + (i % 2)}-of-00002.bin" for i, n in enumerate(names)}
    for file in set(files.values()):
        torch.save({n: state[n].clone() for n in names if files[n] == file}, out / file)
    (out / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return out


@pytest.mark.parametrize(
    "index", [b'{"weight_map": {"a": 5}}', b'{"weight_map": ["a"]}', b"[1]", b"{}", b"{", b'{"\xff": 1}']
)
def test_an_invalid_index_is_a_one_line_error(index: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with ExitStack() as stack, pytest.raises(ModelError, match="cannot read the weights in") as caught:
        Checkpoint(tmp_path, stack)
    assert "\n" not in str(caught.value)
    assert missing(tmp_path) == damaged(tmp_path) == []  # the reader of the weights reports the error


def test_a_directory_of_pytorch_files_is_served(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiny_model("opt")
    outputs = []
    for each in (path, _as_pickled(path, tmp_path / "pickled")):
        harness = Harness(each, num_pages=8)
        harness.add(range(3, 30), max_tokens=8, ignore_eos=True, **GREEDY)
        harness.run()
        outputs.append(harness.tokens[0])
    assert outputs[0] == outputs[1]
    assert missing(tmp_path / "pickled") == []


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("code of a checkpoint ran",))


def test_a_pytorch_file_that_holds_more_than_tensors_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(tiny_model("opt") / "config.json", tmp_path)
    torch.save({"weight": torch.zeros(2), "more": _Evil()}, tmp_path / "pytorch_model.bin")
    assert "not a PyTorch file with only tensors" in _refusal(tmp_path)
    assert "ran" not in capsys.readouterr().out
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK not really")
    assert "not a PyTorch file with only tensors" in _refusal(tmp_path)
