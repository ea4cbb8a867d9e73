"""Weights that stay in 4 and 8 bits on a CPU: the values of the widened model after joining, moving and cutting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Kind, ggml_tensors, write_gguf
from integer_files import FORMS, Form, write_integers
from tiny import save_tiny

from weft.engine.config import EngineConfig
from weft.engine.errors import ModelError
from weft.engine.memory.model_id import model_id
from weft.engine.model.directory import read_spec
from weft.engine.model.gguf import blocks, packing
from weft.engine.model.gguf.forms import form_of
from weft.engine.model.hub import find_model
from weft.engine.model.layer_weights import ProjectionWeights
from weft.engine.model.packed import packed_as
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import load_weights
from weft.engine.runner.options.resolve import resolve, served_as
from weft.kernels.formats.packed_matrix import PackedMatrix
from weft.kernels.formats.packed_rows import PackedRows
from weft.kernels.native.tiles import values

CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    "vocab_size": 256,
}  # fmt: skip
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""the types whose scales are float16"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", PACKED)
def test_blocks_keep_their_values(kind: str) -> None:
    """K types round the products that are their scales and lows to float16."""
    per_block, size = blocks.block_of(kind)
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (6, 2, size), dtype=np.uint8)
    places = {"Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,), "Q4_1": (1, 3), "Q5_1": (1, 3)}
    for place in places.get(kind, (1, 3) if kind in ("Q4_K", "Q5_K") else (1,)):
        raw[..., place] = rng.integers(0x20, 0x30, raw.shape[:2])
    raw = raw.reshape(6, -1)
    want = torch.from_numpy(gguf.dequantize(raw, Kind[kind]))
    form = form_of(kind)
    assert form is not None
    for columns in (slice(0, 2 * per_block), slice(32 % per_block, 2 * per_block - 32 % per_block)):
        data = packing.pack(torch.from_numpy(raw), kind, columns)
        got = PackedRows(data, form, columns.stop - columns.start).values(torch.float32)
        if kind in EXACT:
            assert torch.equal(got, want[:, columns])
        else:  # a scale and a low are each rounded by 2^-11 at most
            assert (got - want[:, columns]).abs().max() < 2**-11 * 2 * want.abs().max()


def widened(weights: ProjectionWeights) -> torch.Tensor:
    """A projection's matrix as one in 32 bits is laid out, with the norm folded in."""
    if weights.packed is None:
        return weights.weight
    own = weights.packed
    made = values(own.tiles)
    if own.order is not None:
        made = made[:, own.order.argsort()]
    return made if own.norm is None else made * own.norm


def compare(packed: ModelSpec, path: Path, *, tolerance: float = 0.0) -> dict[str, bool]:
    """Compare a packed model with the widened one; returns which operations are packed. tolerance: relative to the
    largest value."""
    assert packed.packed is not None
    own, plain = (load_weights(spec, path, **CPU) for spec in (packed, replace(packed, packed=None)))
    found: dict[str, bool] = {}
    for layer, other in zip(own.layers, plain.layers, strict=True):
        for name, weights in layer.items():
            got, want = widened(weights), other[name].weight
            if "gate_up" in name and weights.packed is not None:
                half = len(got) // 2
                got = torch.stack((got[:half], got[half:]), 1).flatten(0, 1)
            found[name] = weights.packed is not None
            assert (got - want).abs().max() <= tolerance * want.abs().max(), name
    for name, table, other in (("embedding", own.table, plain.embedding), ("head", own.head, plain.lm_head)):
        found[name] = isinstance(table, PackedMatrix)
        got = values(table.tiles) if isinstance(table, PackedMatrix) else table
        assert (got - other).abs().max() <= tolerance * other.abs().max(), name
    return found


def packed_in(found: dict[str, bool]) -> set[str]:
    return {name for name, packed in found.items() if packed}


def gguf_of(folder: Path, family: str, kinds: dict[str, str], **changes: Any) -> Path:
    path = save_tiny(family, folder / "source", **{**SIZES, **changes})
    arch = {"llama2": "llama"}.get(family, family)
    every = ggml_tensors(path, arch)
    chosen = {
        name: Kind[kind]
        for name, tensor in every.items()
        if tensor.ndim == 2
        for part, kind in kinds.items()
        if part in name
    }
    return find_model(str(write_gguf(path, folder / "it.gguf", arch, kinds=chosen)))


MIXED = {
    "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "Q5_1", "ffn_gate": "Q4_1", "ffn_up": "Q4_1",
    "ffn_down": "Q5_0", "token_embd": "Q8_0",
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama2", "qwen2", "gemma3"])
def test_a_file_of_several_types_keeps_its_values(tmp_path: Path, family: str) -> None:
    """q, k and v of different types are joined; q's and k's rows are reordered; Gemma ties its head."""
    path = gguf_of(tmp_path, family, MIXED)
    found = compare(packed_as(read_spec(path), path), path, tolerance=1e-6 if family == "gemma3" else 0.0)
    assert all(value for name, value in found.items() if name != "head" or family == "gemma3")


def test_what_is_not_packed_is_widened_with_the_rest_of_its_product(tmp_path: Path) -> None:
    path = gguf_of(tmp_path, "llama2", {**MIXED, "attn_v": "F16", "ffn_up": "F32", "token_embd": "F16"})
    found = compare(packed_as(read_spec(path), path), path)
    assert packed_in(found) == {"o", "down"}


def test_widths_that_are_no_multiple_of_32_are_widened(tmp_path: Path) -> None:
    there, _ = write_integers(save_tiny("llama2", tmp_path / "made", **SIZES), tmp_path, Form("awq", 4, 16))
    found = compare(packed_as(read_spec(there), there), there)
    assert not any(found.values())


@pytest.mark.parametrize("form", [*FORMS, "group of 96"])
def test_integer_checkpoints_keep_their_values(tmp_path: Path, form: str) -> None:
    """Zeros times scales are rounded to float16. Groups of 16 are widened; act-order sorts columns by group."""
    own = Form("gptq", 4, 96, act_order=True) if form == "group of 96" else FORMS[form]
    there, _ = write_integers(save_tiny("llama2", tmp_path / "made", **SIZES), tmp_path, own)
    spec = packed_as(read_spec(there), there)
    found = compare(spec, there, tolerance=2**-11)
    if form == "gptq, 2 bits":
        assert not any(found.values())
    elif form == "group of 96":  # 128 columns are a group of 96 and one of 32
        assert found["down"]
    elif own.act_order:  # each matrix of this writer has its own order, so joined ones are widened
        assert packed_in(found) == {"o", "down"}
    else:
        assert packed_in(found) == {"qkv", "gate_up", "o", "down"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_its_part(tmp_path: Path, ranks: int) -> None:
    path = gguf_of(tmp_path, "llama2", MIXED)
    spec = packed_as(read_spec(path), path)
    for rank in range(ranks):
        found = compare(spec.shard(rank, ranks), path)
        assert packed_in(found) >= {"qkv", "gate_up", "o", "embedding"}
        assert found["down"] == (192 // ranks % 32 == 0)
    there, _ = write_integers(save_tiny("llama2", tmp_path / "made", **SIZES), tmp_path, FORMS["awq"])
    spec = packed_as(read_spec(there), there)
    for rank in range(ranks):
        assert compare(spec.shard(rank, ranks), there, tolerance=2**-11)["o"]


def test_experts_are_widened(tmp_path: Path) -> None:
    path = save_tiny("mixtral", tmp_path / "plain", **SIZES)
    directory = find_model(str(write_gguf(path, tmp_path / "it.gguf", "llama", kind=Kind.Q8_0)))
    found = compare(packed_as(read_spec(directory), directory), directory)
    assert packed_in(found) == {"qkv", "o", "embedding", "head"}


def test_a_damaged_scale_is_named(tmp_path: Path) -> None:
    directory = gguf_of(tmp_path, "llama2", MIXED)
    file = tmp_path / "it.gguf"
    reader = gguf.GGUFReader(file)
    (tensor,) = [t for t in reader.tensors if t.name == "blk.1.ffn_down.weight"]
    raw = bytearray(file.read_bytes())
    at = int(tensor.data_offset) + 22 * 3
    raw[at : at + 2] = np.float16("nan").tobytes()
    file.write_bytes(raw)
    spec = packed_as(read_spec(directory), directory)
    with pytest.raises(ModelError, match=r"not finite .*layers\.1\.mlp\.down_proj\.weight"):
        load_weights(spec, directory, **CPU)


def test_the_footprint_is_that_of_the_loaded_weights(tmp_path: Path) -> None:
    for name, path in (
        ("gguf", gguf_of(tmp_path, "llama2", MIXED)),
        ("awq", write_integers(tmp_path / "source", tmp_path, FORMS["awq"])[0]),
    ):
        spec = packed_as(read_spec(path), path)
        weights = load_weights(spec, path, **CPU)
        tables = sum(table.nbytes for table in weights.rotary)
        assert spec.weight_bytes(4) == pytest.approx(weights.num_bytes - tables, rel=0.02), name
        assert spec.weight_bytes(4) < replace(spec, packed=None).weight_bytes(4)


def test_pages_of_packed_and_widened_models_are_different_pages(tmp_path: Path) -> None:
    path = gguf_of(tmp_path, "llama2", MIXED)
    config = EngineConfig(model=str(path), device="cpu", dtype="float32")
    plain = read_spec(path)
    resolved = resolve(config, plain)
    ids = {model_id(config, resolved.kv, spec, torch.float32, 64) for spec in (plain, packed_as(plain, path))}
    assert len(ids) == 2


def test_what_is_served_follows_the_option_and_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf_of(tmp_path, "llama2", MIXED)
    spec = read_spec(path)

    def served(**options: Any) -> ModelSpec:
        return served_as(spec, EngineConfig(model=str(path), device="cpu", **options))

    monkeypatch.setattr("weft.engine.runner.options.resolve.start_native", lambda _: None)
    assert served().packed is not None
    assert served(quantization="none").packed is None
    assert served(load_format="dummy").packed is None
    monkeypatch.setattr("weft.engine.runner.options.resolve.start_native", lambda _: "no compiler")
    assert served().packed is None
    assert "become 16 or 32 bits: no compiler" in caplog.text
