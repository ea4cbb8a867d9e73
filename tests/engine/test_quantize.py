"""`weft quantize`: writes what `--quantization fp8` serves, completely or not at all, and reports the error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import Harness
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import make_tiny, save_tiny

import weft.engine.model.quantize as quantize_module
from weft.engine.demo import MODEL_PATH
from weft.engine.errors import ConfigError, ModelError, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.model.quantize import PARTIAL, quantize
from weft.server.daemon.cli import main

Made = Callable[[str], Path]
PROMPT = np.random.default_rng(3).integers(3, 199, 24)


def scores(path: Path, prompt: np.ndarray = PROMPT, **options: Any) -> list[float]:
    harness = Harness(path, page_size=8, num_pages=16, **options)
    handle = harness.add(prompt, max_tokens=0, prompt_logprobs=1)
    harness.run()
    return [entry.values[0] for entry in harness.prompt_logprobs[handle]]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny("qwen2-moe", tmp_path_factory.mktemp("sharded"))
    assert len(list(path.glob("*.safetensors"))) > 3
    (path / "tokenizer.json").write_text("{}")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text("{}")
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


def test_the_output_serves_like_quantising_while_loading(sharded: Path, tmp_path: Path) -> None:
    made = quantize(sharded, tmp_path / "new")
    assert scores(made.path) == scores(sharded, quantization="fp8")
    assert scores(made.path) != scores(sharded)
    assert {p.name for p in made.path.iterdir()} >= {"tokenizer.json", "1_Pooling", "config.json"}
    assert not list(tmp_path.glob(f"*{PARTIAL}"))


def test_its_config_and_tensors_are_those_of_compressed_tensors(sharded: Path, tmp_path: Path) -> None:
    made = quantize(sharded, tmp_path / "new")
    before, after = tensors_of(sharded), tensors_of(made.path)
    config = json.loads((made.path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"} <= set(config["ignore"])
    index = json.loads((made.path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(after)
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" not in after:
            assert torch.equal(after[name], tensor)
            continue
        assert module not in config["ignore"]
        values, scale = after[name], after[f"{module}.weight_scale"]
        assert (values.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float32, (len(values), 1))
        # half a step of three bits after the point, at most; below the normal numbers half of the smallest
        apart, bound = (values.float() * scale - tensor).abs(), torch.maximum(tensor.abs() / 16, scale * 2.0**-10)
        assert (apart <= bound * 1.001).all()
    expected = {n for n in before if n.endswith("_proj.weight")}
    assert {n for n, t in after.items() if t.dtype == torch.float8_e4m3fn} == expected


def test_the_reported_error_is_that_of_the_numbers(sharded: Path, tmp_path: Path) -> None:
    made = quantize(sharded, tmp_path / "new", keep=(r"layers\.1\.mlp",))
    before, after = tensors_of(sharded), tensors_of(made.path)
    for error in made.errors:
        was, scale = before[f"{error.name}.weight"], after[f"{error.name}.weight_scale"]
        now = after[f"{error.name}.weight"].float() * scale
        assert error.error == pytest.approx(float((now - was).norm() / was.norm()), rel=1e-4)
    assert not any(error.layer == 1 and "mlp" in error.name for error in made.errors)
    assert "model.layers.1.mlp.down_proj" in made.kept


def test_matrices_that_share_memory_in_a_pytorch_file_are_each_written(tmp_path: Path) -> None:
    model = make_tiny("llama3.1")
    model.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    torch.save(state, tmp_path / "pytorch_model.bin")
    made = quantize(tmp_path, tmp_path / "new")
    assert scores(made.path) == scores(tmp_path, quantization="fp8")
    assert set(tensors_of(made.path)) >= set(state)


def test_a_full_disk_is_a_one_line_error_and_the_rest_follows(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size_of(path: Path) -> int:
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    whole = quantize(sharded, tmp_path / "whole")
    saved, calls = quantize_module.save_file, iter(range(100))

    def save(*given: Any) -> None:
        if next(calls) == 2:
            raise SafetensorError("I/O error: No space left on device")
        saved(*given)

    monkeypatch.setattr(quantize_module, "save_file", save)
    target, partial = tmp_path / "new", tmp_path / f"new{PARTIAL}"
    with pytest.raises(ConfigError, match=r"cannot write .*new\.partial: .*No space left.* resumes") as error:
        quantize(sharded, target)
    assert "\n" not in str(error.value)
    # files already written need no space
    free = size_of(whole.path) - size_of(partial)
    monkeypatch.setattr(quantize_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(ConfigError, match="GiB left"):
        quantize(sharded, tmp_path / "other")
    assert quantize(sharded, target).resumed == 2
    assert tensors_of(target).keys() == tensors_of(whole.path).keys()


class Stopped(Exception):
    pass


def test_an_interrupted_run_resumes_with_the_same_result(sharded: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(sharded, tmp_path / "source"))
    whole = quantize(source, tmp_path / "whole")

    def stop(_phase: str, done: int, total: int) -> None:
        if done > total * 0.6:
            raise Stopped

    target = tmp_path / "new"
    with pytest.raises(Stopped):
        quantize(source, target, progress=stop)
    assert not target.exists()
    made = quantize(source, target)
    assert 0 < made.resumed < len(list(source.glob("*.safetensors")))
    assert made.errors == whole.errors
    for file in whole.path.rglob("*.*"):
        if file.is_file():
            assert (target / file.relative_to(whole.path)).read_bytes() == file.read_bytes()

    with pytest.raises(Stopped):
        quantize(source, tmp_path / "other", progress=stop)
    some = next(iter(source.glob("*.safetensors")))
    some.write_bytes(some.read_bytes())  # another time of change: another checkpoint, by all that is visible
    assert quantize(source, tmp_path / "other").resumed == 0


def test_an_output_that_cannot_be_written_is_refused_in_one_line(
    tiny_model: Made, sharded: Path, tmp_path: Path
) -> None:
    made = quantize(sharded, tmp_path / "new")
    refused: list[tuple[Path, dict[str, Any], type[WeftError], str]] = [
        (sharded, {"target": made.path}, ConfigError, "exists already"),
        (made.path, {}, ModelError, "quantized already"),
        (tiny_model("gpt2"), {}, ModelError, "--quantization fp8 instead"),
        (sharded, {"keep": ("nothing_such",)}, ConfigError, "matches no module"),
        (sharded, {"keep": ("(",)}, ConfigError, "not a regular expression"),
    ]
    for source, options, kind, words in refused:
        with pytest.raises(kind) as error:
            quantize(source, **{"target": tmp_path / "other", **options})
        assert words in str(error.value)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "other").exists()


def test_the_command_shows_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "demo", str(tmp_path / "one")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "matrices", "error", "worst"]
    assert len(lines) == read_spec(MODEL_PATH).num_layers + 3
    assert main(["quantize", "demo", str(tmp_path / "two"), "--json", "--keep", "layers.0"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in reported["layers"]] == [1, 2, 3, 4, 5, 6]
    assert reported["bytes_after"] < 0.7 * reported["bytes_before"]
    assert main(["quantize", "demo", str(tmp_path / "one")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "two"), "--json"]) == 0
    assert "as compressed-tensors has them" in json.loads(capsys.readouterr().out)["parts"]["weights in FP8"]


def test_transformers_reads_it_the_same(tmp_path: Path) -> None:
    """Uses the package that it requires, which is no dependency of weft."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    made = quantize(MODEL_PATH, tmp_path / "new")
    model = AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32)
    prompt = np.arange(40, 104)
    ids = torch.from_numpy(prompt.astype(np.int64))
    with torch.inference_mode():
        want = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    got = torch.tensor(scores(made.path, prompt))
    # it scales activations by the token, weft by 128 columns of it
    assert (got - want).abs().mean() < 0.1 * want.std()
