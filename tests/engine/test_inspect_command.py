"""`weft inspect` says of a CPU what the engine resolves, without importing torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import Kind, write_gguf
from tiny import FAMILIES, save_tiny

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.model.hub import find_model
from weft.engine.model.implementation import choose_spec
from weft.engine.runner.options import machine
from weft.engine.runner.options.cards import on_cards
from weft.engine.runner.start import inspect_command
from weft.kernels.native import library


def _both(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the facts of the CPU without torch and with it."""
    spec, _ = choose_spec(config)
    own = spec.shard(0, config.tensor_parallel_size)
    quick = inspect_command._on_cpu(config, own)
    monkeypatch.setattr(inspect_command, "gpus", lambda: ["0"])
    return quick, inspect_command._devices(config, own)["cpu"]


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_those_of_the_engine(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny(family, tmp_path)
    for options in ({}, {"max_model_len": 40}):
        quick, resolved = _both(EngineConfig(model=str(path), load_format="dummy", **options), monkeypatch)
        assert quick is None or quick == resolved


@pytest.mark.parametrize("preset", ["llama-3-8b", "llama-3-70b", "opt-1.3b"])
@pytest.mark.parametrize("memory", [2**34, 2**38, 2**40])
def test_a_model_that_does_not_fit_is_left_to_the_engine(
    preset: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "machine_memory", lambda: memory)
    monkeypatch.setattr("weft.engine.runner.options.footprint.machine_memory", lambda: memory)
    quick, resolved = _both(EngineConfig(model_preset=preset, load_format="dummy"), monkeypatch)
    assert quick == (resolved if resolved["served"] else None)


def _cards(preset: str, **options: Any) -> dict[str, Any]:
    config = EngineConfig(model_preset=preset, load_format="dummy", **options)
    spec, _ = choose_spec(config)
    return on_cards(spec.shard(0, config.tensor_parallel_size))


def test_a_card_is_bounded_by_the_bytes_that_a_token_reads() -> None:
    found = _cards("llama-3-8b")
    layers = 32 * (4096 * (6144 + 4096 + 3 * 14336) + 2 * 4096) + 4096  # products and norms
    head = 128256 * 4096  # the embedding's other rows are not read
    assert found["H200"]["bfloat16"]["bytes_per_token"] == 2 * (layers + head)
    assert found["H200"]["bfloat16"]["weight_bytes"] == 2 * (layers + 2 * head)
    assert found["H200"]["bfloat16"]["tokens_per_second_bound"] == round(4.8e12 / (2 * (layers + head)))
    in_fp8 = found["H200"]["fp8"]
    assert in_fp8["bytes_per_token"] == 2 * (layers + head) - 32 * 4096 * (6144 + 4096 + 3 * 14336)
    assert found["A100 80 GB"]["fp8"] == {"fits": False, "why_not": "no FP8"}
    room = int(22.5 * 2**30 * 0.9) - found["L4"]["bfloat16"]["weight_bytes"]
    assert found["L4"]["bfloat16"]["kv_tokens"] == room // (65536 * 2)


def test_a_card_without_room_or_kernels_says_so() -> None:
    found = _cards("mixtral-8x7b")
    assert found["L40S"]["bfloat16"]["fits"] is False
    assert "87.0 GiB of weights" in found["L40S"]["bfloat16"]["why_not"]
    spec, _ = choose_spec(EngineConfig(model_preset="mixtral-8x7b", load_format="dummy"))
    head = 32000 * 4096
    assert found["H200"]["bfloat16"]["bytes_per_token"] == 2 * (spec.active_parameters - head)
    two = _cards("mixtral-8x7b", tensor_parallel_size=2)["L40S"]
    assert two["bfloat16"]["fits"] is False
    assert two["fp8"]["why_not"] == "FP8 does not support several ranks yet"


def test_recurrent_layers_have_no_card(tmp_path: Path) -> None:
    spec, _ = choose_spec(EngineConfig(model=str(save_tiny("qwen3-next", tmp_path)), load_format="dummy"))
    for formats in on_cards(spec).values():
        assert all("recurrent states" in facts["why_not"] for facts in formats.values())
        assert inspect_command._card_text(formats).startswith("does not serve it: ")


def test_the_cpus_bound_follows_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_bandwidth", lambda: 10e9)
    config = EngineConfig(model_preset="opt-1.3b", load_format="dummy")
    cpu = inspect_command.inspect(config)["devices"]["cpu"]
    assert cpu["tokens_per_second_bound"] == round(10e9 / cpu["bytes_per_token"], 1)
    assert 0.9 < cpu["bytes_per_token"] / cpu["weight_bytes"] <= 1  # a tied embedding is read as the head
    assert "at most at the 10 GB/s measured" in inspect_command._device_text(cpu, "")
    assert "tokens_per_second_bound" not in inspect_command.inspect(EngineConfig(load_format="dummy"))["devices"]["cpu"]


def test_the_processor_multiplies_bfloat16_where_torch_says_so() -> None:
    assert machine.has_bfloat16() == (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def test_a_context_that_is_too_long_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model_preset="opt-1.3b", load_format="dummy", max_model_len=5000)
    quick, resolved = _both(config, monkeypatch)
    assert quick is None
    assert resolved["served"] is False
    assert "positions" in resolved["why_not"]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory of a GGUF file in several types."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = save_tiny("qwen2", tmp_path / "checkpoint")
    kinds = {f"blk.{i}.attn_{name}.weight": Kind.Q4_0 for i in range(2) for name in "qkv"}
    kinds["token_embd.weight"] = Kind.Q8_0
    return find_model(str(write_gguf(path, tmp_path / "it.gguf", "qwen2", kind=Kind.F16, kinds=kinds)))


@pytest.mark.parametrize("why_not", [None, "no compiler"])
def test_weights_of_a_gguf_file_stay_packed(
    why_not: str | None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "usable", lambda: why_not is None)
    monkeypatch.setattr("weft.engine.runner.options.resolve.start_native", lambda _: why_not)
    quick, resolved = _both(EngineConfig(model=str(directory), load_format="dummy"), monkeypatch)
    assert quick == resolved
    assert ("weight_format" in quick) == (why_not is None)


@pytest.mark.parametrize("model", ["gguf", "preset"])
def test_a_model_is_inspected_without_torch(model: str, directory: Path) -> None:
    which = f"model={str(directory)!r}" if model == "gguf" else "model_preset='opt-1.3b'"
    code = (
        "import sys; from weft.engine.runner.start import inspect_command as c; c.gpus = list;"
        "from weft.engine.config import EngineConfig;"
        f"print(c.inspect(EngineConfig({which}, load_format='dummy'))['devices']['cpu']['served']);"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "[]"]


def test_options_outside_their_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="max-model-len must be 2 or more"):
        inspect_command._config(_arguments(max_model_len=1))


def _arguments(**options: Any) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    inspect_command.add_inspect_flags(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **options})
