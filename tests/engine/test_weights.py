"""Weights: finite, all of them used, and the server's own once they are loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, save_tiny

import weft.engine.runner.start.load as model_load
from weft.engine.config import EngineConfig
from weft.engine.demo import MODEL_PATH
from weft.engine.engine import Engine
from weft.engine.errors import ModelError, OutOfMemory
from weft.engine.memory.model_id import model_id
from weft.engine.model.directory import read_spec
from weft.engine.model.shapes import ShapesOnly
from weft.engine.model.weights import Weights, load_weights

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 132\n"


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama2"), tmp_path / "model"))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """The demo model, whose weights are one file in bfloat16."""
    return Path(shutil.copytree(MODEL_PATH, tmp_path / "whole"))


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(ModelError) as error:
        Engine(EngineConfig(model=str(path), num_pages=8, **options))
    assert "\n" not in str(error.value)
    return str(error.value)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a model of one file."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_is_named(whole: Path, value: float, dtype: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][5, 7] = value

    rewrite(whole, spoil)
    assert name in refusal(whole, dtype=dtype)


def test_a_value_too_large_for_the_dtype_is_not_finite(whole: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = 70000.0

    rewrite(whole, enlarge)
    options = {"device": torch.device("cpu"), "max_positions": 8}
    with pytest.raises(ModelError, match=r"as float16.*model\.norm\.weight"):
        load_weights(read_spec(whole), whole, dtype=torch.float16, **options)
    load_weights(read_spec(whole), whole, dtype=torch.bfloat16, **options)


def test_layers_beyond_the_config_are_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] - 1}))
    message = refusal(model)
    assert f"model.layers.{config['num_hidden_layers'] - 1}" in message
    assert "num_hidden_layers" in message


def test_missing_layers_are_named(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    assert f"model.layers.{config['num_hidden_layers']}." in refusal(model)


def test_other_surplus_tensors_are_reported_in_one_line(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(4)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    rewrite(whole, add)
    Engine(EngineConfig(model=str(whole), num_pages=8)).close()
    (line,) = capfd.readouterr().err.splitlines()
    assert "1 tensor(s)" in line
    assert line.endswith("model.layers.0.self_attn.q_proj.bias")
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 8}
    for rank, lines in ((0, 1), (1, 0)):  # of several ranks only one reports it
        load_weights(read_spec(whole).shard(rank, 2), whole, **options)
        assert capfd.readouterr().err.count("tensor(s)") == lines


def test_a_missing_or_wrong_tensor_is_named_before_any_is_read(whole: Path) -> None:
    reported: list[int] = []
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 8}

    def load() -> None:
        load_weights(read_spec(whole), whole, progress=lambda *report: reported.append(report[1]), **options)

    rewrite(whole, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(3,\)"):
        load()
    rewrite(whole, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"no tensor model\.norm\.weight"):
        load()
    assert reported == []


def test_staging_gives_the_same_weights(tiny_model: Callable[[str], Path]) -> None:
    """Loads them as a GPU does."""
    options = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "max_positions": 8}
    for family in ("gpt-oss", "gpt2", "gemma3"):
        path = tiny_model(family)
        spec = read_spec(path)
        for part in (spec, spec.shard(1, 2)) if not spec.placement.after else (spec,):
            weights = [load_weights(part, path, staged=staged, **options) for staged in (False, True)]
            plain, staged = ([w.embedding, w.norm, *_products(w)] for w in weights)
            assert all(torch.equal(a, b) for a, b in zip(plain, staged, strict=True))


def _products(weights: Weights) -> list[torch.Tensor]:
    return [t for layer in weights.layers for product in layer.values() for t in product.tensors() if t is not None]


def test_packing_shapes_needs_no_compiler(tiny_model: Callable[[str], Path]) -> None:
    """torch imports it for arithmetic on the meta device: a second, and a hundred MiB for good."""
    script = f"""
import sys, torch
from pathlib import Path
from weft.engine.model.directory import read_spec
from weft.engine.model.shapes import ShapesOnly
from weft.engine.model.weights import load_weights
for path in {[str(tiny_model(family)) for family in FAMILIES]!r}:
    spec = read_spec(Path(path))
    for part in (spec, spec.shard(1, 2)):
        for seed in (None, 1):
            load_weights(part, Path(path), device=torch.device("cpu"), dtype=torch.bfloat16, max_positions=8,
                         dummy_seed=seed, progress=lambda *_: None)
    assert "torch._dynamo" not in sys.modules, path
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr


def test_shapes_alone_equal_those_of_the_numbers() -> None:
    def some(device: str) -> list[torch.Tensor]:
        a, b = torch.ones(2, 4, 6, device=device), torch.ones(6, device=device, dtype=torch.bfloat16)
        bits = torch.ones(4, 6, device=device, dtype=torch.uint8)
        return [
            a * b, b * a, 2.0 * b, b + 1, 1 - b, a / b, -b, bits & 15, bits >> 4, torch.ldexp(a, bits.int()),
            a.mean(-1, keepdim=True), a.sum(1), b.exp(), torch.stack((a, a)), a @ b.float(), a[0] @ a[1].t(),
            torch.stack((a, a), dim=-2), torch.cat((a, a), 1), torch.cat((bits, bits)), b[bits.int()], a[:, 1:],
        ]  # fmt: skip

    with ShapesOnly():
        made = [(t.shape, t.dtype) for t in some("meta")]
    assert made == [(t.shape, t.dtype) for t in some("cpu")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_complete_checkpoint_logs_nothing(
    tiny_model: Callable[[str], Path], family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Engine(EngineConfig(model=str(tiny_model(family)), num_pages=8)).close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_pointer_in_place_of_a_file_is_reported(whole: Path, file: str) -> None:
    (whole / file).write_text(POINTER)
    message = refusal(whole)
    assert "Git LFS pointer" in message
    assert file in message


def test_a_pointer_in_place_of_a_shard_is_reported(model: Path) -> None:
    shard = sorted(model.glob("model-*.safetensors"))[-1]
    shard.write_text(POINTER)
    message = refusal(model)
    assert "Git LFS pointer" in message
    assert shard.name in message


@pytest.mark.parametrize("left", [0, 4, 1000, -1])
def test_a_truncated_file_is_named(whole: Path, left: int) -> None:
    file = whole / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    assert "not a complete safetensors file" in refusal(whole)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_a_checkpoint_that_is_overwritten_or_truncated_changes_nothing(whole: Path, dtype: str) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from harness import GREEDY, Harness
harness = Harness({str(whole)!r}, num_pages=20, prefix_caching=False, dtype={dtype!r})
def answer():
    handle = harness.add(range(10, 60), max_tokens=24, ignore_eos=True, **GREEDY)
    harness.run()
    return harness.tokens[handle]
first = answer()
file = {str(whole / "model.safetensors")!r}
size = os.path.getsize(file)
with open(file, "r+b") as f:  # in place, as `rsync --inplace` does
    f.seek(size // 2)
    f.write(os.urandom(size // 2))
assert answer() == first
os.truncate(file, 100)
assert answer() == first
os._exit(0)
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, (run.returncode, run.stderr)


def test_a_checkpoint_that_changes_while_it_loads_is_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = model_load.load_weights

    def slow_load(*args: object, **kwargs: object) -> object:
        weights = load(*args, **kwargs)  # type: ignore[arg-type]
        os.utime(whole / "model.safetensors", (1, 1))
        return weights

    monkeypatch.setattr(model_load, "load_weights", slow_load)
    assert "changed while it was being loaded" in refusal(whole)


def test_pages_have_the_name_of_the_weights_that_made_them(whole: Path) -> None:
    """The served weights keep their name when the file changes; an engine that loads the new file has another one."""
    harness = Harness(whole, num_pages=20)
    engine, resolved = harness.engine, harness.engine.resolved
    of = (engine.config, resolved.kv, engine.spec, resolved.compute_dtype, resolved.max_model_len)
    before = model_id(*of)
    os.utime(whole / "model.safetensors", (1, 1))
    harness.add(range(10, 200), max_tokens=2, **GREEDY)
    harness.run()
    index = harness.engine.scheduler.pool.index
    assert index.model_id == before != model_id(*of)


def test_a_context_beyond_the_pages_is_cut_to_what_they_can_hold(tmp_path: Path) -> None:
    path = save_tiny("llama2", tmp_path, max_position_embeddings=2**20)
    for options, limit in (({}, 19 * 8), ({"max_model_len": 100}, 100)):
        engine = Engine(EngineConfig(model=str(path), page_size=8, num_pages=20, **options))
        assert engine.resolved.max_model_len == limit
        assert {len(table) for table in engine.runner._executor.weights.rotary} == {limit}
        engine.close()


def test_a_context_beyond_all_memory_needs_a_limit(tmp_path: Path) -> None:
    path = save_tiny("llama2", tmp_path, max_position_embeddings=2**40)
    with pytest.raises(OutOfMemory, match="lower --max-model-len"):
        Engine(EngineConfig(model=str(path)))
    engine = Engine(EngineConfig(model=str(path), max_model_len=100, num_pages=20))
    assert {len(table) for table in engine.runner._executor.weights.rotary} == {100}
    engine.close()
