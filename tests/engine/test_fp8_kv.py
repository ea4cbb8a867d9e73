"""K and V in FP8 (`--kv-cache-dtype fp8`): half the bytes, computed exactly from the pages, and isolated per
request."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from paged import LAYER, assert_attention, empty_out, iteration
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from tokenizers import Tokenizer

from weft.engine.config import EngineConfig
from weft.engine.demo import MODEL_PATH
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError, ModelError
from weft.engine.model.directory import read_spec
from weft.engine.model.implementation import choose_spec
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.model.weights import load_weights
from weft.engine.runner.options.resolve import resolve
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.torch_backend import TorchAttention
from weft.kernels.common.gpu import KNOWN, compiling_for
from weft.kernels.formats import fp8
from weft.tools.demo.corpus import prompt_ids
from weft.tools.demo.skills import held_out

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "page_size": 16, "num_pages": 24}
TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
QUESTION = held_out("recall", 1, 9, context_tokens=100)[0]
PROMPT = np.array(prompt_ids(TOKENIZER, QUESTION))
"""the model is sure of these: no rounding changes its answer"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (12, 6)])
def test_attention_uses_the_values_of_the_pages(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Compares bits: e4m3 is exact in 16 bits. Poisoned except for the requests' tokens."""
    it = iteration([1, 16, 90], [(0, 5), (20, 33)], heads, kv_heads, 16, 16, dtype)
    pages = fp8.saturated(it.kv.float())
    shape = AttentionShape(heads, kv_heads, 16, 16, dtype, it.kv.device, fp8.E4M3)
    small, large = TorchAttention(shape), TorchAttention(shape._replace(kv_dtype=dtype))
    got = small.attend(it.q, pages, LAYER, small.prepare(it.requests), out=empty_out(it))
    want = large.attend(it.q, pages.to(dtype), LAYER, large.prepare(it.requests), out=empty_out(it))
    assert torch.equal(got[: it.num_tokens], want[: it.num_tokens])


def test_scales_of_heads_multiply_the_page_values() -> None:
    it = iteration([1, 16, 90], [(0, 5), (20, 33)], 4, 2, 16, 16)
    scale = torch.tensor([[0.5, 3.0], [2.0, 0.1]])
    pages = fp8.saturated(it.kv.float())
    meant = pages.float() * scale[:, None, :, None]
    small = TorchAttention(AttentionShape(4, 2, 16, 16, torch.float32, it.kv.device, fp8.E4M3))
    step, out = small.prepare(it.requests), empty_out(it)
    small.decode(it.q, pages, LAYER, step, out=out, kv_scale=scale)
    small.prefill(it.q, pages, LAYER, step, out=out, kv_scale=scale)
    assert_attention(out, it._replace(kv=meant), 1e-5)


def with_scales(folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    path = Path(shutil.copytree(MODEL_PATH, folder))
    save_file({**load_file(path / "model.safetensors"), **scales}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("names", "scale"),
    [
        (("self_attn.k_scale", "self_attn.v_scale"), torch.tensor([0.05])),
        (("self_attn.k_scale", "self_attn.v_scale"), torch.tensor([0.02, 0.11])),
        (("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"), torch.tensor(0.07)),
        (("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"), torch.tensor([0.07])),
        (("self_attn.attn.k_scale", "self_attn.attn.v_scale"), torch.tensor(0.05)),
    ],
)
def test_pages_hold_keys_and_values_divided_by_the_checkpoints_scales(
    tmp_path: Path, names: tuple[str, str], scale: torch.Tensor
) -> None:
    every = {f"model.layers.{i}.{name}": scale.clone() for i in range(7) for name in names}
    small, plain = Harness(with_scales(tmp_path / "m", every), **FP8), Harness(MODEL_PATH, page_size=16, num_pages=24)
    for harness in (small, plain):
        harness.add(PROMPT[:16], max_tokens=1, **GREEDY)
        harness.run()
    # the first layer reads the same in both: its output differs only by its rounding
    (page,) = (plain.engine.runner.kv[:, 0].flatten(1).abs().amax(1) > 0).nonzero()[1:2, 0].tolist() or [1]
    got = small.engine.runner.kv[page, 0].float() * scale.view(-1, 1)
    want = plain.engine.runner.kv[page, 0]
    assert small.engine.runner.kv.dtype == fp8.E4M3
    assert ((got - want).abs() <= want.abs() / 16 + scale.max() * 2.0**-10).all()


def test_scales_next_to_a_projection_of_q_k_and_v_are_read(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.qkv_proj.{plane}_scale" for i in range(3) for plane in "kv"]
    path = save_tiny("phi3", tmp_path)
    shard = path / "more.safetensors"
    save_file({name: torch.tensor(0.5 + i) for i, name in enumerate(names)}, shard, {"format": "pt"})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"].update(dict.fromkeys(names, shard.name))
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    cpu = torch.device("cpu")
    scales = load_weights(read_spec(path), path, device=cpu, dtype=torch.float32, max_positions=64).kv_scales
    assert scales is not None
    assert scales.tolist() == [[[0.5 + 2 * i] * 2, [1.5 + 2 * i] * 2] for i in range(3)]


@pytest.mark.parametrize(
    "quantization",
    [
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"type": "float", "num_bits": 8},
        },
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_checkpoint_may_have_only_scales_of_k_and_v(tmp_path: Path, quantization: dict[str, Any]) -> None:
    names = [f"model.layers.{i}.self_attn.{plane}_scale" for i in range(7) for plane in "kv"]
    path = with_scales(tmp_path / "m", {name: torch.tensor(0.1) for name in names})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    assert read_spec(path) == read_spec(MODEL_PATH)
    harness = Harness(path, **FP8)
    handle = harness.add(PROMPT, max_tokens=12, **GREEDY)
    harness.run()
    assert TOKENIZER.decode(harness.tokens[handle], skip_special_tokens=True) == QUESTION.answer


def test_scales_under_unknown_names_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = with_scales(tmp_path / "m", {"model.layers.2.self_attn.kv_cache.k_scale": torch.tensor(0.5)})
    Engine(EngineConfig(model=str(path), **FP8))
    assert "1 tensor(s) of the checkpoint are not used" in (message := capfd.readouterr().err)
    assert "model.layers.2.self_attn.kv_cache.k_scale" in message


def test_invalid_scales_are_named(tmp_path: Path) -> None:
    wrong = [(torch.ones(3), "shape"), *((torch.tensor(x), "not above zero") for x in (0.0, 1e-42, float("nan")))]
    for number, (scale, words) in enumerate(wrong):
        path = with_scales(tmp_path / str(number), {"model.layers.2.self_attn.v_scale": scale})
        with pytest.raises(ModelError, match=rf"layers\.2\.self_attn\.v_scale.*{words}"):
            Engine(EngineConfig(model=str(path), **FP8))


def test_answers_do_not_depend_on_chunks_neighbours_or_the_cache() -> None:
    def answer(**options: Any) -> tuple[list[int], Harness]:
        harness = Harness(MODEL_PATH, **{**FP8, **options})
        harness.poison_pages()
        handle = harness.add(PROMPT, max_tokens=12, **GREEDY)
        if options.get("max_num_batched_tokens") == 40:
            harness.add(PROMPT[::-1], max_tokens=12, **GREEDY)
        harness.run()
        return harness.tokens[handle], harness

    once, harness = answer()
    assert TOKENIZER.decode(once, skip_special_tokens=True) == QUESTION.answer
    assert answer(max_num_batched_tokens=40)[0] == once
    again = harness.add(PROMPT, max_tokens=12, **GREEDY)
    harness.run()
    assert harness.cached[again] == (len(PROMPT) - 1) // 16 * 16
    assert harness.tokens[again] == once
    invariant = answer(batch_invariant=True, max_num_batched_tokens=128)[0]
    assert len(invariant) == len(once)


def test_a_page_takes_half_the_bytes_of_16_bits() -> None:
    spec, _ = choose_spec(EngineConfig())
    sizes = {"kv_cache_gib": 0.01, "device": "cpu", "dtype": "bfloat16", "page_size": 64}
    whole = resolve(EngineConfig(**sizes), spec)
    half = resolve(EngineConfig(**sizes, kv_cache_dtype="fp8"), spec)
    assert 2 * half.kv.page_bytes == whole.kv.page_bytes
    assert whole.num_pages is not None
    assert half.num_pages in (2 * whole.num_pages, 2 * whole.num_pages + 1)


def test_a_store_of_pages_in_another_format_is_not_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Goes through both tiers: FP8 pages return as FP8 and give the same answer; bf16 pages do not."""
    tiers = {"host_kv_gib": 0.01, "ssd_kv_path": str(tmp_path / "kv"), "ssd_kv_gib": 0.01, "dtype": "bfloat16"}

    def answer(kind: str) -> tuple[list[int], int, str]:
        harness = Harness(MODEL_PATH, **{**FP8, **tiers, "kv_cache_dtype": kind})
        pages = harness.engine.tiers
        assert pages is not None
        pages.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
        handle = harness.add(PROMPT, max_tokens=8, **GREEDY)
        harness.run()
        pages.sink(60)
        harness.engine.close()
        return harness.tokens[handle], harness.cached[handle], capfd.readouterr().err

    _, cached, _ = answer("auto")
    assert cached == 0
    first, cached, message = answer("fp8")
    assert cached == 0
    assert "was reset" in message
    second, cached, message = answer("fp8")
    assert (second, cached) == (first, (len(PROMPT) - 1) // 16 * 16)
    assert "was reset" not in message


def test_models_that_cannot_use_it_are_refused_in_one_line() -> None:
    spec, _ = choose_spec(EngineConfig())
    spec_of_transformers = TransformersSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)})
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 needs weft's own layers"):
        resolve(EngineConfig(kv_cache_dtype="fp8", device="cpu"), spec_of_transformers)
    with compiling_for(KNOWN["a100"]), pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8: .*A100.* no FP8"):
        resolve(EngineConfig(kv_cache_dtype="fp8"), spec)
    with compiling_for(KNOWN["h200"]):
        assert resolve(EngineConfig(kv_cache_dtype="fp8"), spec).kv.dtype == fp8.E4M3
        with pytest.raises(ConfigError, match="pages of the queries' dtype"):
            resolve(EngineConfig(kv_cache_dtype="fp8", attention_backend="flash-attn"), spec)
